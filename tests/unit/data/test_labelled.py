"""Answers with labels: their batches, their held-out part, and records without a usable label."""

import json

import pytest

from rl_megatron.config.data_sources import LabelledConfig
from rl_megatron.data.answers import split_by_prompt
from rl_megatron.data.datasets import LabelledDataset
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import train_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([], 258)


def record(prompt, completion, label, line=1):
    return Record({"prompt": prompt, "completion": completion, "label": label}, f"answers.jsonl:{line}")


def dataset(records, tokenizer, limit=32, **options):
    return LabelledDataset(records, Renderer(LabelledConfig(), tokenizer), limit, **options)


def test_a_batch_has_the_label_of_every_answer(tokenizer):
    answers = dataset([record("1+1=", "2", True), record("1+1=", "three", False), record("2=", "2", True)], tokenizer)
    batch = answers.batch([2, 1, 0])
    assert answers.num_desirable == 2 and batch["desirable"].tolist() == [1.0, 0.0, 1.0]
    learned = [
        tokenizer.decode(ids[mask != 0].tolist())
        for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)
    ]
    assert learned == ["2", "three", "2"]


def test_labels_stay_with_their_answers_if_others_are_dropped(tokenizer):
    records = [record("1+1=", "a long answer", True), record("1+1=", "3", False), record("2=", "2", True)]
    answers = dataset(records, tokenizer, limit=8, too_long="drop")
    assert len(answers) == 2 and answers.batch([0, 1])["desirable"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            r"answers.jsonl:3: the record has no 'label', .*data.columns=\{label: …\}",
        ),
        ({"prompt": "a", "completion": "b", "lable": True}, r"did you mean 'lable'"),
        ({"prompt": "a", "completion": "b", "label": 1}, r"answers.jsonl:3: 'label' is 1; it must be true"),
        ({"prompt": "a", "completion": "b", "label": None}, r"'label' is None; it must be true \(desirable\) or false"),
    ],
)
def test_a_record_without_a_usable_label_is_named(tokenizer, values, message):
    with pytest.raises(ValueError, match=message):
        dataset([record("a", "b", True), Record(values, "answers.jsonl:3")], tokenizer)


@pytest.mark.parametrize("chat", [False, True])
def test_all_answers_to_a_prompt_are_held_out_together(chat):
    def of(text):
        return [{"role": "user", "content": text}] if chat else text

    def answer(text):
        return [{"role": "assistant", "content": text}] if chat else text

    records = [record(of(f"q{n // 3}"), answer(f"a{n}"), n % 2 == 0, n) for n in range(30)]
    train, heldout = split_by_prompt(records, 0.2, "{prompt}")
    prompts = [{json.dumps(each.values["prompt"]) for each in part} for part in (train, heldout)]
    assert len(heldout) == 6 and len(prompts[1]) == 2 and not prompts[0] & prompts[1]
