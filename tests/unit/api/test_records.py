"""Records in memory are written to files, which the run reads like any others."""

from __future__ import annotations

import json
import re
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
    assert not (tmp_path / "out.data").exists()
    write_records(files)
    assert read(place["path"]) == RECORDS
    (file,) = (tmp_path / "out.data").glob("*")
    assert place == {"path": str(file)} and re.fullmatch("train-[0-9a-f]{12}.jsonl", file.name)
    config = run_config("sft", None, place, (), tmp_path / "out", {"data.heldout_fraction": 0.5})
    assert (config.first.data.path, config.first.data.heldout_fraction) == (place["path"], 0.5)


def test_the_section_may_have_records_to_train_and_to_evaluate_on(tmp_path):
    place, files = take_records({"path": RECORDS, "eval_path": RECORDS[:1], "streaming": True}, tmp_path / "out")
    write_records(files)
    assert place.keys() == {"path", "eval_path", "streaming"} and read(place["eval_path"]) == RECORDS[:1]
    place, _ = take_records({"path": "a.jsonl", "eval_path": RECORDS}, tmp_path / "out")
    assert place["path"] == "a.jsonl" and Path(place["eval_path"]).name.startswith("eval-")


@pytest.mark.parametrize(
    "data",
    [
        None,
        "a.jsonl",
        Path("a"),
        ["a", Path("b")],
        {"mix": [{"path": "a"}], "columns": {"x": "y"}},
        {"source": "mine", "tables": [{"name": "x"}]},
    ],
)
def test_paths_stay_as_they_are(data, tmp_path):
    assert take_records(data, tmp_path / "out") == (data, {})


def test_other_records_have_another_file_and_the_same_ones_are_not_written_again(tmp_path):
    place, files = take_records(RECORDS, tmp_path / "out")
    write_records(files)
    written = Path(place["path"]).stat()
    write_records(files)
    assert Path(place["path"]).stat().st_ino == written.st_ino
    other, files = take_records(RECORDS[:1], tmp_path / "out")
    write_records(files)
    assert (read(place["path"]), read(other["path"])) == (RECORDS, RECORDS[:1])


def test_a_directory_that_cannot_be_written_names_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "out.data").write_text("a file")
    _, files = take_records(RECORDS, tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot be written to .*; choose another output_dir"):
        write_records(files)
    monkeypatch.chdir(tmp_path)
    place, _ = take_records(RECORDS, Path("."))
    assert Path(place["path"]).parent == tmp_path.with_name(f"{tmp_path.name}.data")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((record for record in RECORDS), "data is a generator; pass a path, or records"),
        ({"path": {"a", "b"}}, r"data\['path'\] is a set of str; pass a path"),
        ([*RECORDS, "a.jsonl"], "record 2 of data is a str; records are dictionaries"),
        ([*RECORDS, {"x": b"1"}], "record 2 of data cannot be written as JSON: .*bytes"),
        ([*RECORDS, {"x": float("nan")}], "record 2 of data cannot be written as JSON: .*Out of range"),
    ],
)
def test_what_is_no_record_is_refused(data, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        write_records(take_records(data, tmp_path / "out")[1])
    assert not list(tmp_path.rglob("*.*l*"))


def test_splits_are_refused_with_what_to_write(tmp_path):
    with pytest.raises(ConfigError, match="records in 'train', but only 'path' and 'eval_path' .*data\\['train'\\]"):
        take_records({"train": dataset()}, tmp_path / "out")
