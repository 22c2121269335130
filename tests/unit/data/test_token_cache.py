"""Tokens of large data are kept on disk: equal to those that are made, found by content, and made again if damaged."""

import json

import numpy as np
import pytest

from rl_megatron.config.data_sources import PreferenceConfig, PromptAnswerConfig
from rl_megatron.data import token_cache
from rl_megatron.data.datasets import PreferenceDataset, PromptAnswerDataset, TextDataset
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.data.tasks import Demonstration
from rl_megatron.data.token_cache import TokenCache

TOKENIZER = train_bpe(["question answer 0123456789\n" * 3], 270)


def record(number):
    answers = {"answer": "answer " * (number % 3), "chosen": f"{number}", "rejected": "x" * number + "y"}
    return Record({"question": f"question {number}?", **answers}, f"f:{number}")


RECORDS = [record(number) for number in range(20)]


@pytest.fixture
def built(tmp_path, monkeypatch):
    """`built(kind, **settings)`: the batch of all items, and whether tokens were made for it."""
    monkeypatch.setattr(token_cache, "CACHE", TokenCache(smallest=0))
    made = []
    make = token_cache.track
    monkeypatch.setattr(token_cache, "track", lambda items, what, total: made.append(what) or make(items, what, total))

    def build(kind="answers", records=RECORDS, tokenizer=TOKENIZER, cache_dir=tmp_path / "cache", **settings):
        made.clear()
        settings["cache_dir"] = str(cache_dir)
        if kind == "text":
            dataset = TextDataset([each.values["question"] for each in records], tokenizer, 8, str(cache_dir))
        elif kind == "pairs":
            dataset = PreferenceDataset(records, Renderer(PreferenceConfig(**settings), tokenizer), 64)
        else:
            dataset = PromptAnswerDataset(
                records, Renderer(PromptAnswerConfig(**settings), tokenizer), 24, too_long="truncate"
            )
        batch = dataset.batch(range(len(dataset)))
        return {key: value.tolist() for key, value in batch.items()}, bool(made)

    return build


def test_small_data_is_made_into_tokens_once_in_a_process(built, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "CACHE", TokenCache())
    records = [Record(each.values, f"g:{number}") for number, each in enumerate(RECORDS)]
    (first, was_made), (second, is_made) = built(), built(records=records, cache_dir=tmp_path / "unused")
    assert was_made and not is_made and first == second and not (tmp_path / "unused").exists()
    renderer = Renderer(PromptAnswerConfig(), TOKENIZER)
    prompts = token_cache.encode_prompts(renderer, records)
    assert prompts == [renderer.encode_prompt(each) for each in records]


@pytest.mark.parametrize("kind", ["answers", "pairs", "text"])
def test_kept_tokens_are_those_that_were_made(built, tmp_path, kind):
    expected, _ = built(kind, cache_dir="off")
    assert not (tmp_path / "cache").exists()
    assert built(kind) == (expected, True)
    assert built(kind) == (expected, False)


def test_another_text_tokenizer_or_setting_has_other_tokens(built, tmp_path):
    built()
    changed = [Record({**RECORDS[0].values, "answer": "answer"}, "f:0"), *RECORDS[1:]]
    assert built(records=changed)[1]
    assert built(tokenizer=train_bpe(["other words\n" * 3], 265))[1]
    assert built(prompt_template="{question}: ")[1]
    assert built("pairs")[1]
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    assert built(format="chat", chat_template=template)[1] and not built(format="chat", chat_template=template)[1]
    assert len(list((tmp_path / "cache").iterdir())) == 6
    assert not built(records=[Record(each.values, "elsewhere") for each in RECORDS])[1], "the place does not matter"


def test_another_answer_that_a_task_writes_has_other_tokens(built):
    def records(answer):
        return [Demonstration("question", answer, {"question": "q", "answer": "1"}).as_record()]

    assert built(records=records("1"))[0]["input_ids"] != built(records=records("2"))[0]["input_ids"]
    assert not built(records=records("1"))[1]


def damage_ids(entry):
    ids = np.load(entry / "ids.npy")
    ids[3] += 1
    np.save(entry / "ids.npy", ids)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "ids.npy").write_bytes((entry / "ids.npy").read_bytes()[:-8]),
        lambda entry: (entry / "trained.npy").unlink(),
        lambda entry: (entry / "ends.npy").write_bytes(b""),
        damage_ids,
    ],
    ids=["cut", "missing", "empty", "changed"],
)
def test_a_damaged_entry_is_made_again_with_a_warning(built, tmp_path, logged, damage):
    expected, _ = built()
    (entry,) = (tmp_path / "cache").iterdir()
    damage(entry)
    assert built() == (expected, True)
    assert any("cannot be used" in message and "made again" in message for message in logged)
    assert built() == (expected, False)


def test_tokens_are_not_kept_if_there_is_no_place_for_them(built, tmp_path, logged):
    (tmp_path / "file").write_text("")
    expected, _ = built(cache_dir="off")
    assert built(cache_dir=tmp_path / "file") == (expected, True)
    assert any("cannot be kept" in message and "data.cache_dir" in message for message in logged)


def test_small_data_is_not_kept(built, tmp_path, monkeypatch):
    size = sum(len(json.dumps([record.values], ensure_ascii=False)) for record in RECORDS)
    monkeypatch.setattr(token_cache, "CACHE", TokenCache(smallest=size + 1))
    built()
    assert not (tmp_path / "cache").exists()


def test_long_work_is_reported(monkeypatch, logged):
    from rl_megatron import log

    clock = iter(range(0, 10_000))
    monkeypatch.setattr(log.time, "monotonic", lambda: float(next(clock)))
    assert list(log.track(range(640), "tokenized records", 640)) == list(range(640))
    assert logged == ["tokenized records: 128 of 640", "tokenized records: 640 in 11 s"]
