"""The small model of a certification keeps the model's family and fits the parallel degrees."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rl_megatron.certify.workload import VOCAB_SIZE, shrink
from rl_megatron.config.loading.compose import config_directory
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.rules import check_model
from rl_megatron.topology.degrees import validate_model

PRESETS = sorted(path.stem for path in (config_directory() / "model").glob("*.yaml") if path.stem != "init_from")
DEGREES = [
    {},
    {"tensor": 4, "sequence": True},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"pipeline": 3, "first_stage_layers": 2},
]


@pytest.mark.parametrize(("scope", "coefficient"), [("global", 0.1), ("microbatch", 0.0)])
def test_a_shrunk_model_has_the_balancing_loss_that_no_layout_changes(scope, coefficient):
    balance = ["model=nano_moe", "model.router_aux_loss=0.1", f"model.router_aux_loss_scope={scope}"]
    small, _ = shrink(load_config(balance).first.model, ParallelConfig(expert=2))
    assert small.router_aux_loss == coefficient


def test_a_shrunk_model_of_an_imported_one_has_few_rows_beyond_the_tokenizers():
    imported = load_config(["model=nano", "model.vocab_size=151936"]).first.model
    assert VOCAB_SIZE < shrink(imported, ParallelConfig())[0].vocab_size < 2 * VOCAB_SIZE


@pytest.mark.change
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_shrunk_model_is_of_its_family_and_fits(preset, degrees):
    model = load_config([f"model={preset}"]).first.model
    expert = 1 if model.num_experts is None else 2
    small, parallel = shrink(model, ParallelConfig(**degrees, expert=expert))
    check_model(small)
    validate_model(small, parallel)
    for key in (field.name for field in fields(ModelConfig)):
        value = getattr(model, key)
        if value is None or isinstance(value, bool | str):
            assert getattr(small, key) == value or key == "expert_ffn_hidden_size", key
        elif key not in ("first_dense_layers", "router_aux_loss"):
            assert getattr(small, key) is not None, key
    assert bool(small.first_dense_layers) == bool(model.first_dense_layers)
