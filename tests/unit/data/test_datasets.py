import pytest
import torch

from rl_megatron.config.data_sources import PromptAnswerConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.datasets import PromptAnswerDataset, TextDataset
from rl_megatron.data.encoding import Limit
from rl_megatron.data.files import load_records, load_text
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.data.tasks import Demonstration
from tests.unit.data.shared_data import shared


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte: token counts are character counts, and can be checked by eye."""
    return train_bpe([], 258)


RECORDS = [
    Record({"question": "1+1", "answer": 2}, "sums.jsonl:1"),
    Record({"question": "10+10", "answer": 20}, "sums.jsonl:2"),
    Record({"question": "100+100", "answer": 200}, "sums.jsonl:3"),
]


def answers(records, tokenizer, limit=32, too_long="error", pad_to_multiple_of=1, **keys):
    """Return the dataset of records; `keys` are those of the data section."""
    keys.setdefault("prompt_template", "{question}=")
    renderer = Renderer(PromptAnswerConfig(**keys), tokenizer)
    return PromptAnswerDataset(records, renderer, limit, too_long=too_long, pad_to_multiple_of=pad_to_multiple_of)


def predicted(batch):
    """Return the text of the predicted tokens, in the order of the sequences."""
    return batch["input_ids"][batch["token_mask"].bool()].tolist()


class TestText:
    @pytest.mark.parametrize("sequence_length", [2, 3, 7, 16, 100])
    def test_every_token_is_predicted_exactly_once(self, tokenizer, sequence_length):
        documents = ["to be, or not", "ü", "that is"]
        dataset = TextDataset(documents, tokenizer, sequence_length)
        batch = dataset.batch(range(len(dataset)))
        tokens = predicted(batch)
        assert tokenizer.decode(tokens, skip_special_tokens=False) == "<eos>".join(documents)
        assert len(tokens) == dataset.num_predicted_tokens
        assert (dataset.num_characters, dataset.num_bytes) == (21, 22)
        assert batch["token_mask"][:, 0].sum() == 0

    def test_windows_share_one_token(self, tokenizer):
        dataset = TextDataset(["abcdefgh"], tokenizer, 4)
        rows = dataset.batch([0, 1, 2])["input_ids"].tolist()
        windows = [tokenizer.decode(row, skip_special_tokens=False) for row in rows]
        assert windows == ["<eos>abc", "cdef", "fgh<pad>"]
        batch = dataset.batch([2, 0])
        assert batch["input_lengths"].tolist() == [3, 4]
        assert batch["token_mask"].tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]

    def test_types(self, tokenizer):
        batch = TextDataset(["abcdefgh"], tokenizer, 4).batch([0])
        assert {key: value.dtype for key, value in batch.items()} == {
            "input_ids": torch.int64,
            "input_lengths": torch.int64,
            "token_mask": torch.float32,
            "sample_mask": torch.float32,
        }

    def test_errors(self, tokenizer):
        with pytest.raises(ValueError, match="sequence_length = 1"):
            TextDataset(["a"], tokenizer, 1)
        with pytest.raises(ValueError, match="no text"):
            TextDataset(["", ""], tokenizer, 4)
        with pytest.raises(IndexError):
            TextDataset(["abc"], tokenizer, 4).batch([1])

    def test_shakespeare(self, tokenizer):
        path = shared("tinyshakespeare/input.txt")
        train, heldout = load_text(path, 0.1)
        dataset = TextDataset([heldout], tokenizer, 128)
        assert dataset.num_bytes + len(train.encode()) == path.stat().st_size
        assert dataset.num_predicted_tokens == dataset.num_bytes
        assert dataset.batch(range(len(dataset)))["token_mask"].sum() == dataset.num_bytes


class TestPromptAnswer:
    def test_only_the_answer_and_its_eos_are_learned(self, tokenizer):
        dataset = answers(RECORDS, tokenizer)
        batch = dataset.batch([2, 0])
        assert batch["input_lengths"].tolist() == [12, 6]
        assert batch["input_ids"].shape == (2, 12)
        texts = [tokenizer.decode(row, skip_special_tokens=False) for row in batch["input_ids"].tolist()]
        assert texts == ["100+100=200<eos>", "1+1=2<eos>" + 6 * "<pad>"]
        assert tokenizer.decode(predicted(batch), skip_special_tokens=False) == "200<eos>2<eos>"
        assert batch["sample_mask"].tolist() == [1, 1]

    def test_the_width_is_the_longest_sequence_rounded_up(self, tokenizer):
        dataset = answers(RECORDS, tokenizer, 32, pad_to_multiple_of=8)
        assert dataset.batch([0])["input_ids"].shape == (1, 8)
        assert dataset.batch([0, 2])["token_mask"].shape == (2, 16)
        with pytest.raises(ValueError, match="pad_to_multiple_of"):
            answers(RECORDS, tokenizer, 32, pad_to_multiple_of=0)

    def test_an_empty_prompt_leaves_its_first_token_out(self, tokenizer):
        batch = answers(RECORDS, tokenizer, 32, prompt_template="").batch([1])
        assert batch["token_mask"].tolist() == [[0, 1, 1]]

    def test_a_sequence_that_is_too_long_names_its_line_and_the_remedy(self, tokenizer):
        with pytest.raises(
            ValueError,
            match=r"sums.jsonl:2: .*has 9 tokens, .* is 8 \(2 of 3 .* longest has 12\).*too_long=truncate",
        ):
            answers(RECORDS, tokenizer, 8)
        with pytest.raises(ValueError, match="did you mean 'truncate'"):
            answers(RECORDS, tokenizer, 8, too_long="truncated")

    def test_dropping_and_truncating_are_counted_once(self, tokenizer, logged):
        dropped = answers(RECORDS, tokenizer, 8, too_long="drop")
        truncated = answers(RECORDS, tokenizer, 8, too_long="truncate")
        assert logged == [
            "2 of 3 sequences exceed max_sequence_length = 8 (the longest has 12 tokens): dropped 2, truncated 0",
            "2 of 3 sequences exceed max_sequence_length = 8 (the longest has 12 tokens): dropped 1, truncated 1",
        ]
        assert len(dropped) == 1 and len(truncated) == 2, "the third prompt leaves no tokens for its answer"
        batch = truncated.batch([0, 1])
        assert batch["input_lengths"].tolist() == [6, 8]
        assert tokenizer.decode(predicted(batch), skip_special_tokens=False) == "2<eos>20"
        with pytest.raises(ValueError, match="every sequence"):
            answers(RECORDS, tokenizer, 3, too_long="drop")

    def test_errors_before_the_first_step(self, tokenizer):
        with pytest.raises(ValueError, match="sums.jsonl:1.*'qustion'.*did you mean 'question'"):
            answers(RECORDS, tokenizer, 32, prompt_template="{qustion}")
        with pytest.raises(ValueError, match="'solution'"):
            answers(RECORDS, tokenizer, 32, answer_template="{solution}")
        with pytest.raises(ValueError, match="no records"):
            answers([], tokenizer)

    def test_demonstrations_word_for_word(self, tokenizer):
        shown = [Demonstration("{2}+2=", "4{").as_record()]
        ids = answers(shown, tokenizer, prompt_template=None).batch([0])["input_ids"][0].tolist()
        assert tokenizer.decode(ids, skip_special_tokens=False) == "{2}+2=4{<eos>"
        dressed = answers(shown, tokenizer, prompt_template="Q: {prompt} A: ")
        assert tokenizer.decode(dressed.batch([0])["input_ids"][0].tolist()) == "Q: {2}+2= A: 4{"

    def test_what_the_tokenizer_puts_before_a_text_comes_once(self, tokenizer, monkeypatch):
        monkeypatch.setattr(tokenizer, "prefix_ids", [tokenizer.pad_id])
        for template in ("{question}", "<pad>{question}"):
            batch = answers(RECORDS, tokenizer, 32, prompt_template=template).batch([0])
            text = tokenizer.decode(batch["input_ids"][0].tolist(), skip_special_tokens=False)
            assert text == "<pad>1+12<eos>"

    def test_gsm8k(self):
        train, heldout = load_records(shared("gsm8k"))
        assert (len(train), len(heldout)) == (7473, 1319)
        tokenizer = train_bpe((record.values["answer"] for record in heldout), 512)
        dataset = answers(heldout, tokenizer, 4096, prompt_template=None)
        batch = dataset.batch([7, 11])
        for row, record in enumerate((heldout[7], heldout[11])):
            learned = batch["input_ids"][row][batch["token_mask"][row].bool()].tolist()
            assert tokenizer.decode(learned) == record.values["answer"] and learned[-1] == tokenizer.eos_id


@pytest.mark.parametrize("policy", ["error", "drop", "truncate"])
def test_completions_that_leave_no_space_for_a_prompt_are_refused(policy):
    assert Limit.for_prompts(128, 127, policy).tokens == 1
    with pytest.raises(ConfigError, match="generation.max_new_tokens=128 leaves no space .*_length=128; lower the one"):
        Limit.for_prompts(128, 128, policy)
