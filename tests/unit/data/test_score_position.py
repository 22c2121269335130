"""A reward model's score is read at the token with which a rollout of the same answer ends, whatever the template."""

from dataclasses import replace
from functools import cache

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template

from rl_megatron.config.data_sources import PreferenceConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.batch import score_positions
from rl_megatron.data.datasets import PreferenceDataset
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.stage_sampling import stage_sampling
from tests.unit.data.chat_families import (
    FAMILIES,
    ONE_TURN,
    SHORT_FAMILIES,
    assistant,
    template_of,
    user,
    write_tokenizer,
)
from tests.unit.rollouts.engines import samples_of

CONTEXT = [*ONE_TURN, user("And 4 + 4?")]
ANSWERS = ["That is 8.", "  It is 9, and then 10.\n"]
CASES = [
    *((family, "none") for family in FAMILIES | SHORT_FAMILIES),
    *((family, "trl") for family in ("qwen3", "llama3")),
    *((family, markers) for family in SHORT_FAMILIES for markers in ("turn", "text")),
]
# What ends the answers. Templates that write none get the tokenizer's <eos>.
ENDS = {
    "qwen3": "<|im_end|>", "qwen2_5": "<|im_end|>", "qwen2_5 base": "<|im_end|>", "llama3": "<|eot_id|>",
    "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>", "gemma3": "<end_of_turn>", "gpt_oss": "<|return|>",
    "glm4": "<|endoftext|>", "text after the turn": "<|im_end|>", "eos after the turn": "<|endoftext|>",
}  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Family → (our tokenizer, transformers')."""
    found = {}
    for family in FAMILIES | SHORT_FAMILIES:
        directory = write_tokenizer(family, tmp_path_factory.mktemp("family") / "tokenizer")
        found[family] = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    return found


def read_up_to(pairs, number=0):
    """Return the tokens of both sequences of a pair, up to the one at which the score is read."""
    batch = pairs.batch([number])
    ends = score_positions(batch).tolist()
    assert score_positions({"input_lengths": batch["input_lengths"]}).tolist() == ends
    return [ids[: end + 1] for ids, end in zip(batch["input_ids"].tolist(), ends, strict=True)]


@cache
def stage():
    return load_config(["data=arithmetic", "algorithm=grpo"]).first


def as_rollouts(tokenizer, rendered, prompt, written, max_new_tokens):
    """Return the samples that a reward model gets if the policy writes some tokens after a prompt."""
    sampling = replace(
        stage_sampling(stage(), tokenizer, end_of_turn_ids=rendered.end_of_turn_ids), max_new_tokens=max_new_tokens
    )
    encoded = rendered.build_prompt(Problem("", ""), Record({}, "x:1"), prompt)
    return samples_of(written, [encoded] * len(written), tokenizer, sampling)


@pytest.mark.parametrize(("family", "markers"), CASES)
def test_an_answer_is_read_where_a_rollout_of_it_ends(families, family, markers):
    tokenizer, theirs = families[family]
    template = get_training_chat_template(theirs) if markers == "trl" else template_of(family, markers)
    rendered = Renderer(PreferenceConfig(chat_template=template, trained_turns="last"), tokenizer)
    record = Record({"prompt": CONTEXT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, "pairs.jsonl:1")
    pairs = PreferenceDataset([record], rendered, 1000)
    prompt = theirs.apply_chat_template(
        CONTEXT, chat_template=template, add_generation_prompt=True, return_dict=False
    )  # fmt: skip
    written = []
    for answer in ANSWERS:  # the policy would write what the template does, and then <eos>
        whole = theirs.apply_chat_template([*CONTEXT, assistant(answer)], chat_template=template, return_dict=False)
        assert whole[: len(prompt)] == prompt
        written.append([*whole[len(prompt) :], tokenizer.eos_id])
    samples = as_rollouts(tokenizer, rendered, prompt, written, 100)
    assert read_up_to(pairs) == [sample.sequence_ids for sample in samples]
    assert {tokenizer.decode_token(sample.sequence_ids[-1]) for sample in samples} == {ENDS[family]}
    assert not any(sample.truncated for sample in samples)
    for sample in samples:  # a server that gets the text puts the tokenizer's BOS before it
        assert [*tokenizer.prefix_ids, *tokenizer.encode_special(sample.sequence_text).ids] == sample.sequence_ids

    differ = next(n for n, (one, other) in enumerate(zip(*written, strict=False)) if one != other)
    for num_new in (differ + 1, differ + 3):  # answers that are cut, and rollouts that end by length
        cut = PreferenceDataset([record], rendered, len(prompt) + num_new, too_long="truncate")
        samples = as_rollouts(tokenizer, rendered, prompt, written, num_new)
        assert read_up_to(cut) == [sample.sequence_ids for sample in samples]
        assert all(sample.truncated for sample in samples)


@pytest.mark.parametrize("family", sorted(FAMILIES | SHORT_FAMILIES))
def test_a_plain_answer_is_read_at_eos(families, family):
    tokenizer, _ = families[family]
    rendered = Renderer(PreferenceConfig(format="plain", prompt_template="{question}"), tokenizer)
    record = Record({"question": "4 + 4?", "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, "pairs.jsonl:1")
    pairs = PreferenceDataset([record], rendered, 1000)
    prompt = rendered.encode_prompt(record)
    written = [[*tokenizer.encode(answer), tokenizer.eos_id, *tokenizer.encode(" more")] for answer in ANSWERS]
    samples = as_rollouts(tokenizer, rendered, prompt, written, 100)
    assert read_up_to(pairs) == [sample.sequence_ids for sample in samples]
    assert {sample.sequence_ids[-1] for sample in samples} == {tokenizer.eos_id}


def test_text_after_the_turn_is_left_out_and_said(families, logged):
    tokenizer, _ = families["text after the turn"]
    rendered = Renderer(PreferenceConfig(), tokenizer)
    pair = rendered.encode_pair(Record({"prompt": CONTEXT[-1:], "chosen": "8", "rejected": "9"}, "pairs.jsonl:1"))
    assert tokenizer.decode(pair.chosen.ids, skip_special_tokens=False).endswith("assistant\n8<|im_end|>")
    assert any("text follows the token that ends the assistant's turn" in message for message in logged)
