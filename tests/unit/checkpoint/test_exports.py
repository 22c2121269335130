"""Exports of checkpoints: when they can be seen, what deletes them, and what is refused before the first step."""

from __future__ import annotations

import shutil
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.checkpoint import exports
from rl_megatron.checkpoint.directory import name_checkpoint
from rl_megatron.checkpoint.exports import Exporter, check_exports, locate_export
from rl_megatron.checkpoint.hf_convert import export_weights, import_weights
from rl_megatron.checkpoint.retention import delete_older
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.topology.ranks import Ranks
from tests.parallel.family_cases import assert_same_tensors, tensors
from tests.unit.checkpoint.test_hf_convert import MODEL, directory_of


@pytest.fixture
def stage(tmp_path):
    """The directory of a stage's checkpoints, and what saves the next one."""
    source, checkpoints = directory_of(tmp_path / "hf"), tmp_path / "run" / "checkpoints" / "sft"

    def save(step: int) -> Path:
        import_weights(source, checkpoints / name_checkpoint(step))
        return checkpoints / name_checkpoint(step)

    return checkpoints, save


@pytest.fixture
def held(monkeypatch):
    """Let exports wait in the middle, until the event is set."""
    go_on, waits = threading.Event(), threading.Event()

    def export(checkpoint, target, progress, **options):
        def report(done, total):
            waits.set()
            go_on.wait(30)
            progress(done, total)

        return export_weights(checkpoint, target, progress=report, **options)

    monkeypatch.setattr(exports, "export_weights", export)
    yield go_on, waits
    go_on.set()


def exported(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in (checkpoints.parent.parent / "exported" / "sft").glob("*"))


def test_an_export_has_its_name_once_it_is_complete(stage, held, tmp_path, logged):
    (checkpoints, save), (go_on, waits) = stage, held
    exporter = Exporter(checkpoints, Ranks())
    exporter.begin(checkpoint := save(1))
    assert waits.wait(30)
    assert exported(checkpoints) == ["step-000001.new.incomplete"] and not locate_export(checkpoint).exists()
    go_on.set()
    exporter.wait()
    assert exported(checkpoints) == ["step-000001"]
    assert_same_tensors(tensors(locate_export(checkpoint)), tensors(tmp_path / "hf"))
    assert any(f"{locate_export(checkpoint)}: exported for Hugging Face in" in message for message in logged)


def test_an_export_that_is_ended_leaves_nothing_and_begins_again(stage, held):
    (checkpoints, save), (go_on, waits) = stage, held
    exporter = Exporter(checkpoints, Ranks())
    exporter.begin(save(1))
    assert waits.wait(30)
    threading.Timer(0.2, go_on.set).start()
    exporter.close()
    assert exported(checkpoints) == []
    exporter.wait()
    again = Exporter(checkpoints, Ranks())
    again.begin_missing()
    again.wait()
    assert exported(checkpoints) == ["step-000001"]
    before = (checkpoints.parent.parent / "exported/sft/step-000001/config.json").stat().st_mtime_ns
    again.begin_missing()
    again.wait()
    assert (checkpoints.parent.parent / "exported/sft/step-000001/config.json").stat().st_mtime_ns == before


def test_exports_are_deleted_with_their_checkpoints_when_a_newer_one_is_complete(stage, held):
    (checkpoints, save), (go_on, waits) = stage, held
    go_on.set()
    exporter = Exporter(checkpoints, Ranks())
    for step in (1, 2):
        exporter.begin(save(step))
        exporter.wait()
    (checkpoints.parent.parent / "exported" / "sft" / "step-000003.new.incomplete").mkdir()  # of a run that was killed
    (checkpoints.parent.parent / "exported" / "sft" / "step-000001.deleted").mkdir()
    go_on.clear()
    waits.clear()
    exporter.begin(save(3))
    delete_older(checkpoints, keep=1)
    assert waits.wait(30)
    assert {"step-000001", "step-000002"} <= {*exported(checkpoints)}, "the new one is not complete yet"
    go_on.set()
    exporter.wait()
    assert exported(checkpoints) == ["step-000003"]


def test_the_export_of_a_step_that_is_saved_again_is_replaced(stage):
    checkpoints, save = stage
    exporter = Exporter(checkpoints, Ranks())
    exporter.begin(checkpoint := save(1))
    exporter.wait()
    (locate_export(checkpoint) / "of the first").touch()
    exporter.begin(checkpoint)
    exporter.wait()
    assert exported(checkpoints) == ["step-000001"] and not (locate_export(checkpoint) / "of the first").exists()
    exporter.discard(1)
    assert exported(checkpoints) == []


def test_a_failure_says_how_to_export_by_hand(stage, logged):
    checkpoints, save = stage
    exporter = Exporter(checkpoints, Ranks())
    checkpoint = save(1)
    exports_directory = checkpoints.parent.parent / "exported"
    exports_directory.write_text("a file is in the way")
    exporter.begin(checkpoint)
    exporter.wait(must_succeed=False)
    by_hand = f"rl-megatron convert export {checkpoint} {locate_export(checkpoint)}"
    (message,) = logged
    assert "could not be exported" in message and by_hand in message and message.endswith("; training continues")
    exporter.begin(checkpoint)
    with pytest.raises(SaveFailed, match="because .*exported is a file; .*the checkpoint is complete"):
        exporter.wait()
    exporter.wait()


def test_a_failure_of_rank_0_is_raised_on_ranks_that_export_nothing(tmp_path):
    answers = iter([True, False, "the disk is full"])  # it is being written, it has ended, and how

    class OfRank0(Ranks):
        def share(self, make, errors=()):
            return next(answers)

    exporter = Exporter(tmp_path, OfRank0(rank=1, size=2))
    exporter.begin(tmp_path / name_checkpoint(1))
    with pytest.raises(SaveFailed, match="the disk is full"):
        exporter.wait()


def test_nothing_is_exported_if_it_is_not_wanted(stage):
    checkpoints, save = stage
    exporter = Exporter(checkpoints, Ranks(), is_wanted=False)
    exporter.begin(save(1))
    exporter.begin_missing()
    exporter.wait()
    exporter.discard(1)
    exporter.close()
    assert exported(checkpoints) == []


TOKENIZER = namedtuple("Tokenizer", "vocab_size eos_id pad_id")(30, 1, 0)


def checked(output_dir: Path, model=MODEL, head="lm", precision="bf16", is_adapter=False, **train):
    settings = replace(load_config([]).first.train, **{"export_hf": True, **train})
    check_exports(
        settings, model, head=head, precision=precision, is_adapter=is_adapter, tokenizer=TOKENIZER,
        output_dir=output_dir, init_from=None,
    )  # fmt: skip


def test_a_model_without_a_family_is_refused_before_the_first_step(tmp_path):
    checked(tmp_path / "run")
    checked(tmp_path / "run", head="score")
    unlike = replace(MODEL, attention_sinks=True)
    message = (
        "train.export_hf=true: model: none of LlamaForCausalLM.* can express these keys.*; set train.export_hf=false"
    )
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path / "run", unlike)
    checked(tmp_path / "run", unlike, export_hf=False)
    with pytest.raises(ConfigError, match="an adapter with a score head.*; set train.export_hf=false"):
        checked(tmp_path / "run", head="score", is_adapter=True)


def test_a_full_disk_is_refused_before_the_first_step(tmp_path, monkeypatch):
    usage = namedtuple("Usage", "total used free")
    free = 3000  # bytes; an export in bf16 takes less than half of it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free, 0, free))
    checked(tmp_path / "run", steps=1)
    with pytest.raises(
        ConfigError, match=r"needs .* GB for 3 exports of .* free; free space, set another output_dir, lower"
    ):
        checked(tmp_path / "run", steps=9, save_every=1)
    with pytest.raises(ConfigError, match="for 2 exports"):
        checked(tmp_path / "run", steps=9, save_every=1, keep_checkpoints=1)
    checked(tmp_path / "run", steps=9, save_every=1, is_adapter=True)
