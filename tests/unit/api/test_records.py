"""Records in memory are written to files, which the run reads like any others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_megatron.api.records import take_records, write_records
from rl_megatron.api.settings import run_config
from rl_megatron.config.errors import ConfigError

RECORDS = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "größer", "answer": None}]


def read(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def dataset():
    return pytest.importorskip("datasets").Dataset.from_list(RECORDS)


@pytest.mark.parametrize("make", [lambda: RECORDS, lambda: tuple(RECORDS), dataset], ids=["list", "tuple", "Dataset"])
def test_records_become_a_file_beside_the_output_directory(make, tmp_path):
    place, files = take_records(make(), tmp_path / "out")
    assert place == {"path": str(tmp_path / "out.data" / "train.jsonl")} and not (tmp_path / "out.data").exists()
    write_records(files, "cpu")
    assert read(place["path"]) == RECORDS
    assert [path.name for path in (tmp_path / "out.data").iterdir()] == ["train.jsonl"]
    config = run_config("sft", None, place, (), tmp_path / "out", {"data.heldout_fraction": 0.5})
    assert (config.first.data.path, config.first.data.heldout_fraction) == (place["path"], 0.5)


def test_the_section_may_have_records_to_train_and_to_evaluate_on(tmp_path):
    place, files = take_records({"path": RECORDS, "eval_path": RECORDS[:1], "streaming": True}, tmp_path / "out")
    write_records(files, "cpu")
    assert place.keys() == {"path", "eval_path", "streaming"} and read(place["eval_path"]) == RECORDS[:1]
    place, _ = take_records({"path": "a.jsonl", "eval_path": RECORDS}, tmp_path / "out")
    assert place == {"path": "a.jsonl", "eval_path": str(tmp_path / "out.data" / "eval.jsonl")}


@pytest.mark.parametrize(
    "data", [None, "a.jsonl", Path("a"), ["a", Path("b")], {"mix": [{"path": "a"}], "columns": {"x": "y"}}]
)
def test_paths_stay_as_they_are(data, tmp_path):
    assert take_records(data, tmp_path / "out") == (data, {})


def test_a_file_with_the_same_records_is_not_written_again(tmp_path):
    place, files = take_records(RECORDS, tmp_path / "out")
    write_records(files, "cpu")
    written = Path(place["path"]).stat()
    write_records(files, "cpu")
    assert Path(place["path"]).stat().st_ino == written.st_ino
    write_records(dict.fromkeys(files, RECORDS[:1]), "cpu")
    assert read(place["path"]) == RECORDS[:1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((record for record in RECORDS), "data is a generator; pass a path, or records"),
        ({"train": RECORDS, "test": RECORDS}, "data has records in 'train', 'test', but only 'path' and 'eval_path'"),
        ({"path": {"a", "b"}}, r"data\['path'\] is a set of str; pass a path"),
        ([*RECORDS, "a.jsonl"], "record 2 of data is a str; records are dictionaries"),
        ([*RECORDS, {"x": b"1"}], "record 2 of data cannot be written as JSON: .*bytes"),
        ([*RECORDS, {"x": float("nan")}], "record 2 of data cannot be written as JSON: .*Out of range"),
    ],
)
def test_what_is_no_record_is_refused(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write_records(take_records(data, tmp_path / "out")[1], "cpu")
    assert not list(tmp_path.rglob("*.*l*"))
