"""Preference pairs from a configuration: training data, held-out data, and errors before the first step."""

import json

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.run_tokenizer import build_tokenizer
from rl_megatron.data.training_data import build_dataset
from rl_megatron.evaluation.heldout import build_evaluation
from rl_megatron.runs.preflight import check


@pytest.fixture
def configured(tmp_path):
    """`configured(*overrides)`: a DPO run on 20 questions with two pairs each."""
    rows = [
        {
            "question": f"{n} apples and {n} apples?",
            "a": {"is_correct": True, "solution": f"There are {2 * n} apples"},
            "b": {"is_correct": False, "solution": f"There are {n} pears"},
            "c": {"is_correct": False, "solution": "There are none"},
        }
        for n in range(20)
    ]
    (tmp_path / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = [
        "algorithm=dpo",
        "loss=dpo",
        "data=gsm8k_pairs",
        f"data.path={tmp_path / 'solutions.jsonl'}",
        "tokenizer.vocab_size=300",
    ]
    return lambda *overrides: load_config([*fixed, *overrides])


def decoded(tokenizer, batch):
    return [tokenizer.decode(row).rstrip() for row in batch["input_ids"].tolist()]


def test_pairs_are_split_by_question(configured):
    stage = configured().first
    tokenizer = build_tokenizer(stage)
    train, heldout = build_dataset(stage, tokenizer), build_evaluation(stage, tokenizer).batch
    assert (len(train), heldout.size) == (32, 16)
    texts = [set(decoded(tokenizer, batch)[::2]) for batch in (train.batch(range(len(train))), heldout)]
    assert len(texts[0]) == 16 and len(texts[1]) == 4 and not texts[0] & texts[1]
    assert all(text.startswith("Question: ") and "\nAnswer: There are" in text for text in texts[0])


def test_more_is_held_out_if_evaluation_asks_for_more(configured, caplog):
    stage = configured("data.num_eval_examples=18").first
    tokenizer = build_tokenizer(stage)
    with caplog.at_level("INFO", "rl_megatron"):
        batch = build_evaluation(stage, tokenizer).batch
    train = build_dataset(stage, tokenizer)
    assert (len(train), batch.size) == (30, 18), "of 5 questions instead of 4"
    assert not set(decoded(tokenizer, batch)) & set(decoded(tokenizer, train.batch(range(len(train)))))
    assert "data.num_eval_examples holds 5 of 20 items out of training" in caplog.text


@pytest.mark.parametrize(("limit", "rows"), [(2, 2), (6, 6), ("null", 16)])
def test_every_evaluation_uses_the_same_heldout_pairs(configured, limit, rows):
    stage = configured(f"data.num_eval_examples={limit}").first
    tokenizer = build_tokenizer(stage)
    batch, again = (build_evaluation(stage, tokenizer).batch for _ in range(2))
    assert batch.size == rows
    everything = build_evaluation(configured().first, tokenizer).batch
    assert decoded(tokenizer, batch) == decoded(tokenizer, again) == decoded(tokenizer, everything)[:rows]


def test_the_tokenizer_learns_prompts_and_both_answers_of_the_training_questions(configured):
    tokenizer = build_tokenizer(configured("tokenizer.vocab_size=2000").first)
    for word in ("Question", " apples", " pears", " none"):
        assert len(tokenizer.encode(word)) == 1
    dressed = build_tokenizer(configured("tokenizer.vocab_size=2000", "data.answer_template='Well: {answer}'").first)
    assert len(dressed.encode("Well")) == 1 < len(tokenizer.encode("Well"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.global_batch_size=66"], ["train.global_batch_size=66 is 33 pairs", "has 32"]),
        (["data.heldout_fraction=0"], ["data.heldout_fraction=0.0 leaves nothing"]),
        (
            ["data.num_eval_examples=80"],
            ["data.num_eval_examples=80 leaves nothing to train", "solutions.jsonl has 40 records"],
        ),
        (
            ["data.num_eval_examples=162", "data.eval_path=${data.path}"],
            ["data.num_eval_examples=162 exceeds the number of held-out sequences, 80"],
        ),
        (["data.path=absent.jsonl"], ["data.path: there is nothing at"]),
        (["data.prompt_template='{qestion}'"], ["solutions.jsonl:1", "'qestion'; did you mean 'question'"]),
        (["data.answer_template='{anwer}'"], ["data.answer_template='{anwer}' has no {answer}"]),
        (["model.max_sequence_length=8"], ["every pair exceeds max_sequence_length = 8"]),
    ],
)
def test_errors_are_found_before_the_first_step(configured, tmp_path, overrides, words):
    with pytest.raises(ConfigError) as error:
        check(configured(*overrides), tmp_path / "out")
    assert all(word in str(error.value) for word in words), error.value


def test_a_batch_of_all_pairs_is_allowed(configured, tmp_path):
    config = configured("train.global_batch_size=64")
    assert check(config, tmp_path / "out").digest == build_tokenizer(config.first).digest
