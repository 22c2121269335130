"""A completion ends at the first token after which its text contains a stop string."""

import pickle
import random

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.generation.stop_strings import StopStrings

TOKENIZER = train_bpe(["the answer is 42. the answer is 43.\n\nQuestion: what is the answer? € ü"] * 3, 320)
WIDTH = 60


def completed(sequences, texts):
    """Grow completions token by token, as engines do."""
    stop_strings = StopStrings(texts, TOKENIZER.definition)
    ends = [next((n for n in range(1, WIDTH + 1) if stop_strings.ends(ids[:n])), None) for ids in sequences]
    return [end or WIDTH for end in ends], [end is not None for end in ends]


def expected(ids, texts):
    for length in range(1, len(ids) + 1):
        if any(text in TOKENIZER.decode(ids[:length], skip_special_tokens=False) for text in texts):
            return length, True
    return len(ids), False


@pytest.mark.parametrize(
    "texts", [("\n\nQuestion:",), ("answer", "42."), ("€",), ("ü",), ("<eos><pad>",), (". the answer is 4", "x")]
)
def test_a_completion_ends_at_the_first_token_after_which_it_has_the_text(texts):
    draw = random.Random(str(texts))
    pieces = ["the", " answer", " is", " 42", ".", "\n", "\n\nQuestion:", "\nQuestion", ":", " €", "ü", "x", " 4", "2"]
    sequences = []
    for _ in range(40):
        ids = []
        while len(ids) < WIDTH:
            ids += [TOKENIZER.eos_id, TOKENIZER.pad_id] * (draw.random() < 0.1) + TOKENIZER.encode(draw.choice(pieces))
        sequences.append(ids[:WIDTH])
    by_hand = [expected(ids, texts) for ids in sequences]
    assert sum(stopped for _, stopped in by_hand) > 3, "or the test shows nothing"
    assert completed(sequences, texts) == tuple(map(list, zip(*by_hand, strict=True)))


def test_engines_in_other_processes_get_the_texts_and_the_tokenizer():
    there = pickle.loads(pickle.dumps(StopStrings(("the answer",), TOKENIZER.definition)))
    assert there.appear_in(TOKENIZER.encode("is the answer 4")) and not there.appear_in(TOKENIZER.encode("the"))
    assert len(repr(there)) < 100


def test_stop_tokens_may_be_special_and_longer_texts_are_stop_strings():
    stage = load_config(["data=arithmetic", "algorithm=grpo", "generation.stop_tokens=['<pad>']"]).first
    sampling = make_sampling(stage, TOKENIZER)
    assert sampling.stop_ids == (TOKENIZER.eos_id, TOKENIZER.pad_id) and sampling.stop_strings is None
    stage = load_config(["data=arithmetic", "algorithm=grpo", "generation.stop_tokens=['\\n\\nQ']"]).first
    with pytest.raises(ConfigError, match=r"'.*' is \d tokens .* set generation.stop_strings for a text of several"):
        make_sampling(stage, TOKENIZER)
    stage = load_config(["data=arithmetic", "algorithm=grpo", "generation.stop_strings=['Question: ']"]).first
    assert make_sampling(stage, TOKENIZER).stop_strings == StopStrings(("Question: ",), TOKENIZER.definition)
    with pytest.raises(ConfigError, match="generation.stop_strings"):
        load_config(["data=arithmetic", "generation.stop_strings=['']"])
