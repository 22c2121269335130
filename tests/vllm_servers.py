"""Real vLLM servers for tests, which are started as seldom as possible because each needs half a minute."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.servers import VllmConfig
from rl_megatron.generation.servers.process import LocalServers
from rl_megatron.generation.vllm.engine import vllm_dialect
from rl_megatron.model.families import family_of_model
from rl_megatron.weight_sync.plan import RefitPlan

PYTHON = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"there is no {PYTHON}: scripts/install_vllm.sh makes vLLM's environment"
)
# The quickstart's model; head_dim is one that vLLM's kernels for CPUs have.
MODEL = ModelConfig(
    num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, num_query_groups=2,
    max_sequence_length=128, tie_embeddings=True, init_std=0.08,
)  # fmt: skip
VOCAB_SIZE = 260
# A smaller one, as overrides of a run's configuration; the tokenizer of `launch.TINY` has NUM_TOKENS tokens.
OF_RUNS = (
    "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=2",
    "model.num_query_groups=2", "model.qkv_bias=true", "model.tie_embeddings=true", "model.max_sequence_length=256",
    "model.init_std=0.1",
)  # fmt: skip
NUM_TOKENS = 259


def model_of_runs() -> ModelConfig:
    """Return the model that `OF_RUNS` configures."""
    return replace(load_config(["data.task.name=arithmetic", *OF_RUNS]).first.model, vocab_size=NUM_TOKENS)


def local_servers(directory: Path, count: int = 1, model: ModelConfig = MODEL, refit: str = "collective", **keys):
    """Return servers on this machine's CPU, for the process that tests run in; nothing is started yet."""
    settings = VllmConfig(python=str(PYTHON), num_servers=count, **keys)
    size = model.vocab_size or VOCAB_SIZE
    plan = RefitPlan(family_of_model(model, size).write_config(model, size) | {"dtype": "float32"}, 1, ())
    generation = GenerationConfig(engine="vllm", refit=refit, vllm=settings)
    return LocalServers(
        count, vllm_dialect(generation, model.max_sequence_length, torch.device("cpu")), settings, plan, (),
        Path(directory) / "servers",
    )  # fmt: skip


def free_ports(count: int) -> int:
    """Return the first of `count` ports in a row that are free, below those that Linux gives to outgoing connections.

    A server listens some seconds after it has started, and another process may get its port until then.
    """
    while True:
        first = random.randrange(20_000, 32_000)
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
            except OSError:
                continue


@contextmanager
def running_servers(directory: Path, count: int = 1, **keys):
    """Yield servers that are ready."""
    servers = local_servers(directory, count, **keys)
    servers.start()
    try:
        servers.wait()
        yield servers
    finally:
        servers.end()
