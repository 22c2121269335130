"""The choice of a layer's modules if a model needs what Transformer Engine's layers lack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import load_config
from rl_megatron.model import backend
from rl_megatron.model.backend import choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that Transformer Engine is installed."""
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize("preset", ["nano", "nano_moe", "qwen3_30b_a3b"])
def test_auto_chooses_transformer_engine_on_a_gpu_if_it_is_installed(installed, preset):
    model = load_config([f"model={preset}"]).first.model
    assert (choose_backend(model, CUDA), choose_backend(model, CPU)) == ("transformer_engine", "portable")
    assert choose_backend(replace(model, backend="portable"), CUDA) == "portable"


@pytest.mark.parametrize(
    ("preset", "key"), [("gemma3_1b", "model.local_rope_base=10000.0"), ("deepseek_v3", "model.kv_lora_rank=512")]
)
def test_a_key_that_only_portable_layers_support_is_named(installed, preset, key):
    model = load_config([f"model={preset}"]).first.model
    assert choose_backend(model, CUDA) == "portable"
    with pytest.raises(ConfigError, match=f"model.backend=transformer_engine: .*{key}; use model.backend=auto"):
        choose_backend(replace(model, backend="transformer_engine"), CUDA)


def test_transformer_engine_without_a_gpu_is_refused():
    model = load_config(["model.backend=transformer_engine"]).first.model
    with pytest.raises(ConfigError, match="it needs a GPU"):
        choose_backend(model, CPU)
