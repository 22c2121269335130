"""model=init_from: the model section and the tokenizer of a checkpoint, as configuration."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from rl_megatron.checkpoint.directory import read_manifest
from rl_megatron.cli.convert import export_checkpoint
from rl_megatron.config.checkpoint_metadata import (
    FORMAT,
    find_hugging_face_files,
    find_imported_tokenizer,
    find_run_tokenizer,
)
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.compose import config_directory
from rl_megatron.config.loading.load import load_config, to_yaml
from rl_megatron.config.model import Llama3Rope, ModelConfig

SCALED = Llama3Rope(factor=8.0, original_max_position_embeddings=64)
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=96,
    vocab_size=77,
    rope_scaling=SCALED,
    tie_embeddings=False,
    recompute="full",
    qk_norm=True,
)


def checkpoint(directory, model: dict | None = None, *files: str):
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(json.dumps({"format": FORMAT, "model": model or asdict(MODEL)}))
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text("{}")
    return directory


def test_the_model_is_the_checkpoints_and_recomputation_the_runs(tmp_path):
    begun = f"init_from={checkpoint(tmp_path / 'a, b=c')}"  # whatever the directory is called
    begun = begun.replace("=", "='", 1) + "'"
    config = load_config(["model=init_from", begun])
    assert config.first.model == replace(MODEL, recompute="none")
    changed = load_config(["model=init_from", begun, "model.recompute=selective", "model.max_sequence_length=99"])
    assert changed.first.model == replace(MODEL, recompute="selective", max_sequence_length=99)
    shown = yaml.safe_load(to_yaml(config))["stages"]["sft"]["model"]
    assert shown["rope_scaling"]["factor"] == 8.0 and shown["num_layers"] == 3


def test_every_key_of_the_model_that_the_weights_depend_on_is_the_checkpoints():
    given = yaml.safe_load((Path(config_directory()) / "model" / "init_from.yaml").read_text())
    assert given.keys() == asdict(MODEL).keys()
    of_run = {key for key, value in given.items() if value != f"${{of_checkpoint:{key},${{init_from}}}}"}
    assert of_run == {"recompute", "backend", "cudnn_attention"}


def test_keys_that_were_added_later_have_their_default(tmp_path):
    old = {key: value for key, value in asdict(MODEL).items() if key != "sliding_window"}
    model = load_config(["model=init_from", f"init_from={checkpoint(tmp_path / 'old', old)}"]).first.model
    assert model == replace(MODEL, recompute="none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no manifest.json"),
        ("{", "manifest.json cannot be read"),
        ("3", "manifest.json cannot be read"),
        ('{"format": 2, "step": 1}', "has no model section"),
        ('{"format": 2, "model": {"num_layers": -1}}', "model.num_layers=-1"),
        ('{"format": 2, "model": {"num_layrs": 1}}', "has the unknown key model.num_layrs"),
        ('{"model": {}}', "manifest.json has no number of the checkpoint format"),
        ('{"format": 99, "model": {}}', "manifest.json has the checkpoint format 99"),
    ],
)
def test_a_checkpoint_that_cannot_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(["model=init_from", f"init_from={tmp_path}"])
    assert "interpolation" not in str(error.value)


def test_a_checkpoint_has_to_be_named():
    with pytest.raises(ConfigError, match="^model=init_from takes the model section of a checkpoint: add init_from="):
        load_config(["model=init_from"])


def test_a_carried_tokenizer_is_used_unless_another_is_named(tmp_path):
    carrying = checkpoint(tmp_path / "carrying", None, "hugging_face/tokenizer.json", "hugging_face/config.json")
    assert load_config([f"init_from={carrying}"]).first.tokenizer.path == str(carrying / "hugging_face")
    assert load_config([f"init_from={carrying}", "tokenizer.path=mine"]).first.tokenizer.path == "mine"
    bare = checkpoint(tmp_path / "bare", None, "hugging_face/config.json")
    assert load_config([f"init_from={bare}"]).first.tokenizer.path is None


def test_the_files_that_a_run_began_with_are_found_from_its_checkpoints(tmp_path):
    step = checkpoint(tmp_path / "run" / "checkpoints" / "sft" / "step-000003")
    assert find_hugging_face_files(step) is find_imported_tokenizer(step) is find_run_tokenizer(step) is None
    checkpoint(tmp_path / "run" / "hugging_face", None, "config.json", "tokenizer.json")
    checkpoint(tmp_path / "run" / "tokenizer", None, "tokenizer.json")
    assert find_hugging_face_files(step) == find_imported_tokenizer(step) == tmp_path / "run" / "hugging_face"
    assert find_run_tokenizer(step) == tmp_path / "run" / "tokenizer"
    checkpoint(step / "hugging_face", None, "config.json")
    assert find_hugging_face_files(step) == step / "hugging_face", "its own first"


def test_a_hugging_face_directory_in_place_of_a_checkpoint_names_the_conversion(tmp_path):
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "config.json").write_text("{}")
    conversion = f"rl-megatron convert import {tmp_path}/Qwen checkpoints/Qwen"
    for chosen in (["model=init_from"], []):
        with pytest.raises(ConfigError) as refused:
            config = load_config([*chosen, f"init_from={tmp_path}/Qwen"])
            read_manifest(Path(str(config.init_from)))
        assert f"make a checkpoint of it with {conversion}, and write" in str(refused.value)


def test_a_run_or_a_stage_in_place_of_a_checkpoint_lists_its_checkpoints(tmp_path):
    run = tmp_path / "run"
    for number, name in enumerate(("sft/step-000100", "grpo/step-000020")):
        directory = checkpoint(run / "checkpoints" / name)
        os.utime(directory / "manifest.json", (number, number))
    newest = f"{run}/checkpoints/grpo/step-000020"
    listed = "has the checkpoints checkpoints/sft/step-000100, checkpoints/grpo/step-000020; write"
    with pytest.raises(ConfigError, match=f"init_from={run} .*{listed} init_from={newest}$"):
        load_config(["model=init_from", f"init_from={run}"])
    with pytest.raises(ConfigError, match=f"checkpoint {run} .*{listed} {newest}$"):
        read_manifest(run)
    with pytest.raises(ConfigError, match=f"{listed} rl-megatron convert export {newest} there$"):
        export_checkpoint(str(run), "there", None, merge=False)
    with pytest.raises(ConfigError, match="has the checkpoints step-000100; write"):
        read_manifest(run / "checkpoints" / "sft")
