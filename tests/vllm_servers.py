"""Real vLLM servers for tests, which are started as seldom as possible because each needs half a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_megatron.config.generation import GenerationConfig, VllmConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.generation.servers.process import LocalServers
from rl_megatron.generation.vllm.engine import make_vllm_dialect
from rl_megatron.model.families import family_of_model
from rl_megatron.weight_sync.buckets import RefitPlan

PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"there is no {PYTHON}: scripts/install_vllm.sh makes vLLM's environment"
)
# A model, as overrides of a configuration. vLLM's kernels for CPUs have its head_dim.
OF_RUNS = (
    "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=2",
    "model.num_query_groups=2", "model.qkv_bias=true", "model.tie_embeddings=true", "model.max_sequence_length=256",
    "model.init_std=0.1",
)  # fmt: skip
NUM_TOKENS = 259  # of the tokenizer that `launch.TINY` trains
STEP_TOKENS = 512  # the most that servers shall process in one step


def model_of_runs() -> ModelConfig:
    """Return the model that `OF_RUNS` configures."""
    return replace(load_config(["data.task.name=arithmetic", *OF_RUNS]).first.model, vocab_size=NUM_TOKENS)


def local_server(directory: Path, **keys) -> LocalServers:
    """Return a server on this machine's CPU, for the process that tests run in; nothing is started yet."""
    model, settings = model_of_runs(), VllmConfig(python=str(PYTHON), **keys)
    plan = RefitPlan(family_of_model(model, NUM_TOKENS).write_config(model, NUM_TOKENS) | {"dtype": "float32"}, 1, ())
    dialect = make_vllm_dialect(
        GenerationConfig(engine="vllm", vllm=settings), model.max_sequence_length, torch.device("cpu")
    )
    return LocalServers(1, dialect, settings, plan, (), directory / "server")


def ready(servers_of_sets: Sequence[LocalServers]) -> list[str]:
    """Return the addresses of all servers, which are started if they do not run."""
    for servers in servers_of_sets:
        servers.start()
    for servers in servers_of_sets:
        servers.wait()
    return [url for servers in servers_of_sets for url in servers.urls]
