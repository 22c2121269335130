"""The choice of a layer's modules if a run needs what Transformer Engine's layers lack."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.model import backend
from rl_megatron.model.backend import choose_backend
from rl_megatron.model.build import build_transformer_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def chosen(model: ModelConfig, device: torch.device, precision: str = "bf16", **degrees: int) -> str:
    """Return the backend that a run on a device would choose, without the device."""
    degrees = {"context": 1, "expert_tensor": 1} | degrees
    topology: Any = SimpleNamespace(device=device, is_cuda=device.type == "cuda", **degrees)
    return choose_backend(model, topology, precision)


@pytest.fixture
def installed(monkeypatch):
    """Pretend that Transformer Engine is installed."""
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name)


@pytest.mark.parametrize("preset", ["nano", "nano_moe", "qwen3_30b_a3b"])
def test_auto_chooses_transformer_engine_on_a_gpu_if_it_is_installed(installed, preset):
    model = load_config([f"model={preset}"]).first.model
    assert (chosen(model, CUDA), chosen(model, CPU)) == ("transformer_engine", "portable")
    assert chosen(replace(model, backend="portable"), CUDA) == "portable"


@pytest.mark.parametrize(
    ("preset", "key"),
    [
        ("gemma3_1b", "model.local_rope_base=10000.0"),
        ("deepseek_v3", "model.kv_lora_rank=512"),
        ("glm4_5_air", "model.first_dense_layers=1"),
        ("gpt_oss_20b", "model.activation=swiglu_oai"),
    ],
)
def test_a_key_that_only_portable_layers_support_is_named(installed, preset, key):
    model = load_config([f"model={preset}"]).first.model
    assert chosen(model, CUDA) == "portable"
    with pytest.raises(ConfigError, match=f"model.backend=transformer_engine: .*{key}; use model.backend=auto"):
        chosen(replace(model, backend="transformer_engine"), CUDA)


def test_experts_whose_matrices_are_split_take_the_portable_layers(installed):
    model = load_config(["model=nano_moe"]).first.model
    assert chosen(model, CUDA, expert_tensor=2) == "portable"
    with pytest.raises(ConfigError, match="only portable layers support parallel.expert_tensor=2; use model.backend"):
        chosen(replace(model, backend="transformer_engine"), CUDA, expert_tensor=2)


def test_transformer_engine_without_a_gpu_is_refused():
    model = load_config(["model.backend=transformer_engine"]).first.model
    with pytest.raises(ConfigError, match="it needs a GPU"):
        chosen(model, CPU)


def test_fp32_takes_the_portable_layers_because_transformer_engine_computes_in_tf32(installed, logged):
    model = load_config(["model=nano"]).first.model
    assert chosen(model, CUDA, precision="fp32") == "portable"
    assert any("TF32 under precision=fp32" in message for message in logged)
    with pytest.raises(ConfigError, match="TF32 under precision=fp32; use model.backend=auto"):
        chosen(replace(model, backend="transformer_engine"), CUDA, precision="fp32")


def test_windows_under_context_parallelism_take_the_portable_layers(installed):
    model = replace(load_config(["model=nano"]).first.model, sliding_window=16)
    assert chosen(model, CUDA) == "transformer_engine"
    assert chosen(replace(model, sliding_window=None), CUDA, context=2) == "transformer_engine"
    assert chosen(model, CUDA, context=2) == "portable"
    with pytest.raises(ConfigError, match="model.sliding_window=16 with parallel.context=2; use model.backend=auto"):
        chosen(replace(model, backend="transformer_engine"), CUDA, context=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_and_its_runner_use_the_same_layers(installed, monkeypatch, precision):
    """The runner packs sequences for these layers, so it has to ask about the same precision and layout."""
    from rl_megatron.training import inference

    asked = []
    monkeypatch.setattr(inference, "choose_backend", lambda *question: asked.append(question) or "portable")
    topology = SimpleNamespace()
    model: Any = SimpleNamespace(config="model", topology=topology, precision=precision, head="lm", lora=None)
    model.model_chunks, model.vocab_size = [], 1
    inference.build_runner(model, None)
    assert asked == [("model", topology, precision)]


def test_transformer_engine_rotates_packs_without_reading_their_lengths_from_the_device(monkeypatch):
    """megatron-core's own rotation reads them for the queries and the keys of each layer."""
    calls = []

    def fused(t, cu_seqlens, freqs, cp_size, cp_rank, **options):
        calls.append((cu_seqlens, cp_size, cp_rank))
        return t

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", lambda t, freqs, interleaved: t)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", fused)
    layout: Any = SimpleNamespace(
        tensor=1, sequence=False, pipeline=1, virtual_pipeline=1, context=2, expert=1, expert_tensor=1,
        first_stage_layers=None, last_stage_layers=None,
    )  # fmt: skip
    model, cp_group = load_config(["model=nano"]).first.model, SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    config = build_transformer_config(model, layout, "bf16", "transformer_engine")
    # Tensors on "meta" have no values: reading one raises an error.
    starts = torch.tensor([0, 4, 12], dtype=torch.int32).to("meta")
    query, angles = torch.empty(6, 2, 8, device="meta"), torch.empty(8, 1, 1, 8, device="meta")
    assert rope_utils.apply_rotary_pos_emb(query, angles, config, starts, cp_group=cp_group) is query
    assert calls == [(starts, 2, 1)]
    assert not build_transformer_config(model, layout, "bf16", "portable").apply_rope_fusion
