"""What a checkpoint's manifest says of its model, against the model that would load it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig
from rl_megatron.policy import checkpoint

MODEL = ModelConfig(num_layers=3)


def saved_as(tmp_path, model: dict):
    (tmp_path / checkpoint.MANIFEST).write_text(json.dumps({"step": 1, "model": model, "files": {}}))
    return tmp_path


def test_keys_added_since_had_their_default(tmp_path):
    old = {key: value for key, value in asdict(MODEL).items() if "expert" not in key and key != "sliding_window"}
    assert checkpoint.read_manifest(saved_as(tmp_path, old), MODEL)["step"] == 1
    with pytest.raises(ConfigError, match="model.sliding_window: checkpoint None, run 8"):
        checkpoint.read_manifest(tmp_path, replace(MODEL, sliding_window=8))


def test_weights_outlive_how_they_were_trained(tmp_path):
    experts = replace(MODEL, num_experts=4, router_aux_loss=0.01)
    path = saved_as(tmp_path, asdict(experts))
    checkpoint.read_manifest(path, replace(experts, router_aux_loss=0.0, recompute="full", max_sequence_length=999))
    with pytest.raises(ConfigError, match="model.num_experts: checkpoint 4, run 2"):
        checkpoint.read_manifest(path, replace(experts, num_experts=2))
