"""Manifests of checkpoints: comparison with the model that is loaded, digests, and replaced directories."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from rl_megatron import __version__
from rl_megatron.checkpoint.directory import (
    REPLACED,
    Damaged,
    check_digests,
    find_checkpoints,
    publish,
    put_back,
    read_manifest,
)
from rl_megatron.config.checkpoint_metadata import FORMAT, MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from tests.synced_files import note_syncs

MODEL = ModelConfig(num_layers=3)


def saved_as(tmp_path, model: dict):
    (tmp_path / "partial").mkdir()
    publish(tmp_path / "partial", tmp_path / "saved", {"step": 1, "model": model})
    return tmp_path / "saved"


def test_keys_that_are_newer_than_the_checkpoint_have_their_defaults(tmp_path):
    old = {key: value for key, value in asdict(MODEL).items() if "expert" not in key and key != "sliding_window"}
    path = saved_as(tmp_path, old)
    assert read_manifest(path, MODEL)["step"] == 1
    with pytest.raises(ConfigError, match="model.sliding_window: checkpoint None, run 8"):
        read_manifest(path, replace(MODEL, sliding_window=8))


@pytest.mark.parametrize("saved_size", [None, MODEL.hidden_size // MODEL.num_attention_heads])
def test_a_head_dim_of_null_equals_its_computed_value(tmp_path, saved_size):
    path = saved_as(tmp_path, asdict(replace(MODEL, head_dim=saved_size)))
    for size in (None, MODEL.hidden_size // MODEL.num_attention_heads):
        assert read_manifest(path, replace(MODEL, head_dim=size))["step"] == 1
    with pytest.raises(ConfigError, match="model.head_dim: checkpoint 32, run 16"):
        read_manifest(path, replace(MODEL, head_dim=16))


def test_keys_that_do_not_change_the_weights_may_differ(tmp_path):
    experts = replace(MODEL, num_experts=4, router_aux_loss=0.01)
    path = saved_as(tmp_path, asdict(experts))
    read_manifest(path, replace(experts, router_aux_loss=0.0, recompute="full", max_sequence_length=999))
    with pytest.raises(ConfigError, match="model.num_experts: checkpoint 4, run 2"):
        read_manifest(path, replace(experts, num_experts=2))


def published(directory, **manifest):
    partial, final = directory / "step-000001.incomplete", directory / "step-000001"
    partial.mkdir()
    (partial / "weights").write_bytes(bytes(range(256)))
    publish(partial, final, {"step": 1, "model": asdict(MODEL), **manifest})
    return final


def test_one_changed_byte_is_damage(tmp_path):
    path = published(tmp_path)
    check_digests(path, read_manifest(path, MODEL))
    (path / "weights").write_bytes(bytes(255) + b"\x01")
    with pytest.raises(Damaged, match="is damaged: weights has changed .*use an older one"):
        check_digests(path, read_manifest(path))


def test_a_changed_byte_at_the_end_of_a_large_file_is_damage(tmp_path):
    path = tmp_path / "step-000001"
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "weights").write_bytes(bytes(3 << 20))
    publish(tmp_path / "partial", path, {"step": 1, "model": asdict(MODEL)})
    (path / "weights").write_bytes(bytes((3 << 20) - 1) + b"\x01")
    with pytest.raises(Damaged, match="weights has changed"):
        check_digests(path, read_manifest(path))


def test_a_directory_without_a_manifest_is_named_once_and_kept_when_its_step_is_saved(tmp_path, logged):
    path = published(tmp_path)
    assert find_checkpoints(tmp_path) == [path] and logged == []
    for number in (1, 2):
        (path / MANIFEST).unlink()
        for _ in range(2):
            assert find_checkpoints(tmp_path) == []
        assert len([text for text in logged if f"{path} has no {MANIFEST}, so it is not a whole" in text]) == 1
        assert published(tmp_path) == path and find_checkpoints(tmp_path) == [path]
        kept = tmp_path / f"{path.name}.without-manifest-{number}"
        assert (kept / "weights").is_file() and str(kept) in logged[-1]


def test_files_and_directory_are_on_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    synced = note_syncs(monkeypatch)
    path = published(tmp_path)
    partial, sizes = f"{path}.incomplete", [(path / name).stat().st_size for name in ("weights", MANIFEST)]
    of_files = [*zip([f"{partial}/weights", f"{partial}/{MANIFEST}"], sizes, strict=True)]
    assert synced == [*of_files, (partial, None), (str(tmp_path), None)]


def test_readers_share_the_files_and_together_read_all(tmp_path):
    (tmp_path / "partial").mkdir()
    for index in range(6):
        (tmp_path / "partial" / f"part{index}").write_bytes(bytes(index))
    path = tmp_path / "step-000001"
    publish(tmp_path / "partial", path, {"step": 1})
    files = read_manifest(path)["files"]
    for changed in files:
        manifest, finders = {"files": {**files, changed: {**files[changed], "sha256": ""}}}, []
        for rank in range(3):
            try:
                check_digests(path, manifest, rank, 3)
            except Damaged:
                finders.append(rank)
        assert len(finders) == 1, (changed, finders)


@pytest.mark.parametrize(
    ("was", "became"),
    [('"step": 1', '"step": 2'), ('"num_layers": 3', '"num_layers": 4'), ("{", "[")],
)
def test_a_changed_manifest_is_damage(tmp_path, was, became):
    path = published(tmp_path)
    text = (path / MANIFEST).read_text()
    assert was in text
    (path / MANIFEST).write_text(text.replace(was, became, 1))
    with pytest.raises(Damaged, match=f"is damaged: .*{MANIFEST}"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("was", "became", "named"),
    [
        (f'"format": {FORMAT}', '"format": 99', "has the checkpoint format 99 (written by rl_megatron 7.8.9)"),
        (f' "format": {FORMAT},\n', "", "has no number of the checkpoint format (written by rl_megatron 7.8.9)"),
    ],
)
def test_another_format_is_refused_before_anything_else_is_compared(tmp_path, was, became, named):
    path = published(tmp_path, versions={"rl_megatron": "7.8.9"})
    assert read_manifest(path)["format"] == FORMAT
    text = (path / MANIFEST).read_text()
    assert text.count(was) == 1
    (path / MANIFEST).write_text(text.replace(was, became))
    (path / "weights").unlink()
    with pytest.raises(ConfigError) as error:
        read_manifest(path)
    message = str(error.value)
    assert f"{path / MANIFEST} {named}, and rl_megatron {__version__} reads only format {FORMAT}; " in message
    assert "`rl-megatron convert export` of that version" in message and not isinstance(error.value, Damaged)


def test_the_digest_is_of_the_manifest_as_json_reads_it(tmp_path):
    path = published(tmp_path, counts={10: "a", 9: "b"})
    assert read_manifest(path)["counts"] == {"10": "a", "9": "b"}


def test_a_checkpoint_whose_name_differs_after_a_dot_is_not_changed(tmp_path):
    (tmp_path / "qwen2.replaced").mkdir()
    (tmp_path / "partial").mkdir()
    for _ in range(2):  # the second in the place of the first
        (tmp_path / "partial").mkdir(exist_ok=True)
        publish(tmp_path / "partial", tmp_path / "qwen2.5", {"step": 0, "model": asdict(MODEL)})
    assert {each.name for each in tmp_path.iterdir()} == {"qwen2.replaced", "qwen2.5"}


def test_a_checkpoint_whose_replacement_was_killed_gets_its_name_back(tmp_path):
    path = published(tmp_path, note="first")
    path.rename(tmp_path / f"{path.name}{REPLACED}")  # and then the run was killed
    assert find_checkpoints(tmp_path) == []
    put_back(tmp_path)
    assert find_checkpoints(tmp_path) == [path]
    older = tmp_path / f"{path.name}{REPLACED}"
    older.mkdir()
    (older / MANIFEST).write_text("{}")
    put_back(tmp_path)  # killed a moment later: its place is taken
    assert older.is_dir() and read_manifest(path)["note"] == "first"


def test_a_checkpoint_replaces_one_of_the_same_name(tmp_path):
    path = published(tmp_path, note="first")
    assert published(tmp_path, note="second") == path
    assert read_manifest(path)["note"] == "second"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
