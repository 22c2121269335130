import json

import pytest
import torch

from rl_megatron.config.data_sources import PreferenceConfig
from rl_megatron.data.datasets import PreferenceDataset
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.data.sources import PreferenceSource
from tests.unit.data.shared_data import shared


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte: token counts are character counts, and can be checked by eye."""
    return train_bpe([], 258)


def pair(question, chosen, rejected, location="pairs.jsonl:1"):
    return Record({"question": question, "chosen": chosen, "rejected": rejected}, location)


PAIRS = [
    pair("1+1=", "2", "three", "pairs.jsonl:1"),
    pair("10+10=", "20", "1", "pairs.jsonl:2"),
    pair("9+1=", "10", "100", "pairs.jsonl:3"),
]


def dataset(records, tokenizer, limit=32, too_long="error", **keys):
    """Return the dataset of pairs; `keys` are those of the data section."""
    keys.setdefault("prompt_template", "{question}")
    return PreferenceDataset(records, Renderer(PreferenceConfig(**keys), tokenizer), limit, too_long=too_long)


def texts(tokenizer, batch):
    lengths = batch["input_lengths"].tolist()
    rows = [ids[:length] for ids, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
    return [tokenizer.decode(row, skip_special_tokens=False) for row in rows]


def learned(tokenizer, batch):
    """Return the text of the predicted tokens of each sequence."""
    rows = zip(batch["input_ids"], batch["token_mask"].bool(), strict=True)
    return [tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False) for ids, mask in rows]


class TestDataset:
    def test_chosen_and_rejected_sequences_alternate_and_only_answers_are_learned(self, tokenizer):
        pairs = dataset(PAIRS, tokenizer)
        assert len(pairs) == 3
        batch = pairs.batch([1, 0])
        assert texts(tokenizer, batch) == ["10+10=20<eos>", "10+10=1<eos>", "1+1=2<eos>", "1+1=three<eos>"]
        assert learned(tokenizer, batch) == ["20<eos>", "1<eos>", "2<eos>", "three<eos>"]
        assert batch["input_ids"].shape == (4, 10)
        assert batch["sample_mask"].tolist() == [1] * 4
        assert {key: value.dtype for key, value in batch.items()} == {
            "input_ids": torch.int64,
            "input_lengths": torch.int64,
            "token_mask": torch.float32,
            "sample_mask": torch.float32,
        }

    def test_position_0_is_never_learned(self, tokenizer):
        batch = dataset(PAIRS, tokenizer, 32, prompt_template="").batch([1])
        assert batch["token_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]

    def test_prompt_and_answers_are_encoded_separately(self):
        merging = train_bpe(["ab ab ab ab"], 300)
        assert len(merging.encode("ab")) == 1, "or the test shows nothing"
        chosen, rejected = dataset([pair("a", "b", "c")], merging).batch([0])["input_ids"].tolist()
        assert chosen == [*merging.encode("a"), *merging.encode("b"), merging.eos_id]
        assert chosen[0] == rejected[0]

    def test_the_answer_template_applies_to_both_answers(self, tokenizer):
        records = [Record({**PAIRS[0].values, "answer": "not this", "by": "Al"}, "pairs.jsonl:1")]
        batch = dataset(records, tokenizer, answer_template="{by}: {answer}<eos>").batch([0])
        assert learned(tokenizer, batch) == ["Al: 2<eos><eos>", "Al: three<eos><eos>"]

    def test_a_sequence_that_is_too_long_names_its_line(self, tokenizer):
        with pytest.raises(
            ValueError,
            match=r"pairs.jsonl:1: .*has 10 tokens, .* is 8 \(2 of 3 pairs are longer.*too_long=truncate",
        ):
            dataset(PAIRS, tokenizer, 8)

    def test_a_pair_is_dropped_whole(self, tokenizer, logged):
        kept = dataset(PAIRS, tokenizer, 8, too_long="drop")
        assert texts(tokenizer, kept.batch([0])) == ["9+1=10<eos>", "9+1=100<eos>"] and len(kept) == 1
        assert logged == [
            "2 of 3 pairs exceed max_sequence_length = 8 (the longest has 10 tokens): dropped 2, truncated 0"
        ]
        with pytest.raises(ValueError, match="every pair exceeds max_sequence_length = 5"):
            dataset(PAIRS, tokenizer, 5, too_long="drop")

    def test_truncating_cuts_only_the_longer_sequences(self, tokenizer):
        batch = dataset(PAIRS, tokenizer, 8, too_long="truncate").batch([0, 1])
        assert learned(tokenizer, batch) == ["2<eos>", "thre", "20", "1<eos>"]

    def test_a_pair_without_an_answer_left_is_dropped(self, tokenizer):
        kept = dataset(PAIRS, tokenizer, 7, too_long="truncate")
        assert learned(tokenizer, kept.batch([0, 1, 2])) == ["2<eos>", "thr", "2", "1", "10<eos>", "100"]
        kept = dataset(PAIRS, tokenizer, 6, too_long="truncate")
        assert learned(tokenizer, kept.batch([0])) == ["2<eos>", "th"], "the second prompt alone has 6 tokens"

    def test_a_pair_that_truncation_makes_equal_is_dropped(self, tokenizer):
        kept = dataset(PAIRS, tokenizer, 6, too_long="truncate")
        assert len(kept) == 1, "of 10 and 100 remains 10 and 10"

    def test_without_a_prompt_a_single_token_is_not_an_answer(self, tokenizer):
        with pytest.raises(ValueError, match="every pair exceeds"):
            dataset(PAIRS[:1], tokenizer, 1, prompt_template="", too_long="truncate")

    def test_errors_before_the_first_step(self, tokenizer, monkeypatch):
        with pytest.raises(ValueError, match="no records"):
            dataset([], tokenizer)
        with pytest.raises(ValueError, match="pairs.jsonl:1.*'qustion'.*did you mean 'question'"):
            dataset(PAIRS, tokenizer, 32, prompt_template="{qustion}")
        with pytest.raises(ValueError, match="pairs.jsonl:1.*'author'"):
            dataset(PAIRS, tokenizer, answer_template="{author}: {answer}")
        with pytest.raises(ValueError, match=r"answer_template='\{chosen\}' has no \{answer\}"):
            dataset(PAIRS, tokenizer, answer_template="{chosen}")
        with pytest.raises(ValueError, match="pairs.jsonl:1: the pair has no 'rejected'"):
            dataset([Record({"question": "1", "chosen": "2"}, "pairs.jsonl:1")], tokenizer)
        with pytest.raises(ValueError, match="did you mean 'drop'"):
            dataset(PAIRS, tokenizer, too_long="dropp")
        monkeypatch.setattr(tokenizer, "encode_template", lambda template, values: [5])
        with pytest.raises(ValueError, match="pairs.jsonl:1: 'chosen' and 'rejected' are the same tokens"):
            dataset(PAIRS, tokenizer)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def graded(question, *solutions, **fields):
    """`graded("1+1", ("2", True), ("3", False))`: one record of graded solutions."""
    values = {f"model_{n}": {"is_correct": right, "solution": text} for n, (text, right) in enumerate(solutions)}
    return {"question": question, **fields, **values}


def load_preferences(path, heldout_fraction=0.05, prompt_template=None):
    data = PreferenceConfig(path=str(path), heldout_fraction=heldout_fraction, prompt_template=prompt_template)
    return PreferenceSource(None, data).parts()


def sides(records):
    return [(record.values["chosen"], record.values["rejected"]) for record in records]


class TestPairs:
    ROWS = [{"question": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(20)]

    def test_a_single_file_is_split(self, tmp_path):
        file = write_jsonl(tmp_path / "pairs.jsonl", self.ROWS)
        train, heldout = load_preferences(file, 0.25)
        assert len(train) == 15 and len(heldout) == 5
        assert sorted(int(record.location.rpartition(":")[2]) for record in train + heldout) == list(range(1, 21))
        assert load_preferences(file, 0.25) == (train, heldout)
        assert load_preferences(file, 0)[1] == []

    def test_all_pairs_of_a_prompt_are_on_one_side(self, tmp_path):
        rows = [row | {"chosen": f"yes {copy}", "id": copy} for copy in range(3) for row in self.ROWS]
        train, heldout = load_preferences(write_jsonl(tmp_path / "pairs.jsonl", rows), 0.25)
        assert len(train) == 45 and len(heldout) == 15
        assert not {r.values["question"] for r in train} & {r.values["question"] for r in heldout}

    def test_a_prompt_is_what_the_template_makes_of_a_record(self, tmp_path):
        rows = [{"tone": "kind" if n % 2 else "rude", "n": n, "chosen": "yes", "rejected": "no"} for n in range(20)]
        file = write_jsonl(tmp_path / "pairs.jsonl", rows)
        train, heldout = load_preferences(file, 0.5, "Be {tone}: ")
        assert (
            len({record.values["tone"] for record in train}) == len({record.values["tone"] for record in heldout}) == 1
        )
        with pytest.raises(ValueError, match="pairs.jsonl:1: .*none of question, prompt"):
            load_preferences(file, 0.5)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rejected": ...}, "pairs.jsonl:2: the pair has no 'rejected'; known: chosen, question"),
            ({"chosen": ..., "chsen": "yes"}, "pairs.jsonl:2: the pair has no 'chosen'; did you mean 'chsen'"),
            ({"chosen": ["yes"]}, "pairs.jsonl:2: 'chosen', message 1 is 'yes'; it must be a mapping"),
            ({"chosen": 3}, "pairs.jsonl:2: 'chosen' is a int; it must be a string"),
            ({"rejected": None}, "pairs.jsonl:2: the pair has no 'rejected'"),
            ({"rejected": ""}, "pairs.jsonl:2: 'rejected' is empty"),
            ({"rejected": " \n"}, "pairs.jsonl:2: 'rejected' is empty"),
            ({"rejected": "yes"}, "pairs.jsonl:2: 'chosen' and 'rejected' are equal"),
            ({"question": ...}, "pairs.jsonl:2: .*'question'"),
            (
                {"chosen": ..., "rejected": ..., "m": {"is_correct": True, "solution": "2"}},
                "pairs.jsonl:2 has graded solutions, in a file that begins with a pair .*pairs.jsonl:1",
            ),
        ],
    )
    def test_errors_name_the_line(self, tmp_path, changes, message):
        changed = {key: value for key, value in (self.ROWS[1] | changes).items() if value is not ...}
        file = write_jsonl(tmp_path / "pairs.jsonl", [self.ROWS[0], changed, *self.ROWS[2:]])
        with pytest.raises(ValueError, match=message):
            load_preferences(file, 0.25)

    def test_a_first_record_that_is_not_a_pair_is_named(self, tmp_path):
        file = write_jsonl(tmp_path / "pairs.jsonl", [{"question": "1+1"}, *self.ROWS])
        with pytest.raises(ValueError, match="pairs.jsonl:1: the pair has no 'chosen'"):
            load_preferences(file)

    def test_a_file_of_neither_form(self, tmp_path):
        file = write_jsonl(tmp_path / "qa.jsonl", [{"question": "1+1", "answer": "2"}])
        with pytest.raises(
            ValueError,
            match=r"qa.jsonl:1 has no preference, nor .* its fields are \['answer', 'question'\].*is_correct",
        ):
            load_preferences(file)


class TestGradedSolutions:
    def test_every_right_solution_with_every_wrong_one(self, tmp_path):
        row = graded("1+1", ("2", True), ("3", False), ("two", True), ("4", False), ground_truth="2", source={"n": 1})
        file = write_jsonl(tmp_path / "solutions.jsonl", [row])
        pairs, _ = load_preferences(file, 0)
        assert sides(pairs) == [("2", "3"), ("2", "4"), ("two", "3"), ("two", "4")]
        fields = {key: value for key, value in pairs[0].values.items() if key not in ("chosen", "rejected")}
        assert fields == {"question": "1+1", "ground_truth": "2", "source": {"n": 1}}
        assert {record.location for record in pairs} == {f"{file}:1"}

    def test_equal_texts_count_once(self, tmp_path):
        row = graded("1+1", ("2", True), ("3", False), ("2", True), ("3", False))
        assert sides(load_preferences(write_jsonl(tmp_path / "s.jsonl", [row]), 0)[0]) == [("2", "3")]

    def test_questions_without_both_grades_are_left_out_and_counted_once(self, tmp_path, logged):
        rows = [
            graded("0", ("2", True), ("two", True)),
            graded("1", ("2", True), ("3", False)),
            graded("2", ("3", False)),
            {"question": "nobody has answered"},
        ]
        file = write_jsonl(tmp_path / "solutions.jsonl", rows)
        for _ in range(2):
            assert [record.values["question"] for record in load_preferences(file, 0, "{question}")[0]] == ["1"]
        (message,) = logged
        assert "3 of 4 questions are left out" in message and str(file) in message

    @pytest.mark.parametrize("name", ["solutions.jsonl", "train.jsonl"])
    def test_the_first_question_may_have_no_answer_yet(self, tmp_path, name):
        rows = [{"question": "nobody has answered"}, graded("1", ("2", True), ("3", False))]
        file = write_jsonl(tmp_path / name, rows)
        write_jsonl(tmp_path / "test.jsonl", rows)
        train, _ = load_preferences(tmp_path if name == "train.jsonl" else file, 0)
        assert [record.values["question"] for record in train] == ["1"]

    def test_a_fraction_of_the_questions_with_pairs_is_held_out(self, tmp_path):
        rows = [graded(f"{n}", ("2", True), ("3", False), ("4", False)) for n in range(20)]
        rows += [graded(f"{n}", ("2", True)) for n in range(20, 60)]
        train, heldout = load_preferences(write_jsonl(tmp_path / "solutions.jsonl", rows), 0.25)
        assert (len(train), len(heldout)) == (30, 10)
        assert not {r.values["question"] for r in train} & {r.values["question"] for r in heldout}

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (graded("2", ("2", True), ("2", False)), "s.jsonl:2: the text of 'model_1' is graded both right and wrong"),
            (graded("2", ("2", 1)), r"s.jsonl:2: 'model_0' needs 'is_correct' \(true or false\)"),
            ({"m": {"is_correct": True}}, r"s.jsonl:2: 'm' needs .* 'solution' \(a string\)"),
            (graded("2", (None, True)), "s.jsonl:2: 'model_0.solution' is a NoneType; it must be a string"),
            (graded("2", ("", False)), "s.jsonl:2: 'model_0.solution' is empty"),
            (
                {"question": "2", "chosen": "2", "rejected": "3"},
                "s.jsonl:2 has a pair, in a file that begins with graded solutions .*s.jsonl:1",
            ),
        ],
    )
    def test_errors_name_the_line(self, tmp_path, row, message):
        file = write_jsonl(tmp_path / "s.jsonl", [graded("1", ("2", True), ("3", False)), row])
        with pytest.raises(ValueError, match=message):
            load_preferences(file)

    def test_no_pair_at_all(self, tmp_path):
        with pytest.raises(ValueError, match="s.jsonl: no question has both a right and a wrong solution"):
            load_preferences(write_jsonl(tmp_path / "s.jsonl", [graded("1", ("2", True))]))


class TestDirectory:
    PAIR = {"question": "1+1", "chosen": "2", "rejected": "3"}

    def test_which_file_is_read(self, tmp_path):
        for name in ("train.jsonl", "test.jsonl"):
            write_jsonl(tmp_path / name, [self.PAIR | {"chosen": name}])
        train, heldout = load_preferences(tmp_path)
        assert sides(train) == [("train.jsonl", "3")] and sides(heldout) == [("test.jsonl", "3")]
        write_jsonl(tmp_path / "model_solutions.jsonl", [graded("1+1", ("graded", True), ("3", False))])
        assert load_preferences(tmp_path, 0) == load_preferences(tmp_path / "model_solutions.jsonl", 0)
        write_jsonl(tmp_path / "preferences.jsonl", [self.PAIR])
        assert load_preferences(tmp_path, 0) == load_preferences(tmp_path / "preferences.jsonl", 0)

    def test_a_directory_without_preferences_is_refused(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"data\.path: .* has no data files \(found: nothing\)"):
            load_preferences(tmp_path)
        for name in ("train", "test"):
            write_jsonl(tmp_path / f"{name}.jsonl", [{"question": "1", "answer": "2"}])
        with pytest.raises(ValueError, match=r"train.jsonl:1 has no preference.*needs 'chosen' and 'rejected'"):
            load_preferences(tmp_path)

    def test_a_missing_path_names_its_key(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"data\.path: there is nothing at .*absent"):
            load_preferences(tmp_path / "absent")

    def test_gsm8k(self):
        train, heldout = load_preferences(shared("gsm8k"), 0.2)
        assert len(train) + len(heldout) == 2426
        questions = [{record.values["question"] for record in part} for part in (train, heldout)]
        assert not questions[0] & questions[1] and list(map(len, questions)) == [585, 146]
        tokenizer = train_bpe((record.values["chosen"] for record in heldout), 512)
        pairs = dataset(heldout, tokenizer, 4096)
        for number in (0, len(pairs) - 1):
            answers = [text.removesuffix("<eos>") for text in learned(tokenizer, pairs.batch([number]))]
            assert answers == [heldout[number].values["chosen"], heldout[number].values["rejected"]]
