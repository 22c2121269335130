"""Build the rollout engine on vLLM servers, and check before the first step that it can serve a stage."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rl_megatron.config.engines import choose_vllm_logprobs_mode, releases_memory, shares_gpus
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.generation.servers.devices import check_servers, choose_server_devices
from rl_megatron.generation.servers.engine import ServerEngine, ServerKind
from rl_megatron.generation.servers.node import ServerLauncher, describe_model
from rl_megatron.generation.vllm.dialect import VllmDialect
from rl_megatron.topology.device import choose_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.ipc import check_gpu_memory_can_be_shared
from rl_megatron.weight_sync.servers import ServerSync, WeightServers
from rl_megatron.weight_sync.stock_sync import BaseOnDisk
from rl_megatron.weight_sync.vllm_sync import make_transfer_config, make_transfer_environment, make_vllm_sync

_SIZE_KEY = "tensor_parallel_size"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def build_vllm_engine(policy: MegatronPolicy, stage: StageConfig, output_dir: Path) -> ServerEngine:
    """Build the engine of a stage's policy; its servers log into `output_dir`/servers."""
    generation, settings = stage.generation, stage.generation.vllm
    minutes, bucket_bytes = stage.train.collective_timeout_minutes, int(generation.refit_bucket_mb * (1 << 20))
    directory = Path(generation.refit_directory or output_dir / "servers")

    def make_sync(servers: WeightServers) -> ServerSync:
        return make_vllm_sync(
            generation.refit,
            policy.weights,
            servers,
            bucket_bytes=bucket_bytes,
            timeout_seconds=60 * minutes,
            directory=directory,
        )

    length = settings.max_model_len or policy.model_config.max_sequence_length
    topology, rank, base = policy.topology, None, None
    if stage.peft is not None and generation.refit == "adapter":
        rank, ranks = stage.peft.r, topology.ranks
        base = BaseOnDisk(policy.weights, ranks, bucket_bytes, directory)
    dialect = make_vllm_dialect(generation, length, policy.topology.device, _DTYPES[stage.precision], rank)
    devices = _choose_devices(generation, policy.topology.device)
    kind = ServerKind(dialect, settings, make_sync, length, devices, can_sleep(generation, topology.device), base)
    return ServerEngine(policy, generation, kind, output_dir, minutes)


def make_vllm_dialect(
    generation: GenerationConfig,
    max_model_len: int,
    device: torch.device,
    dtype: str = "float32",
    adapter_rank: int | None = None,
) -> VllmDialect:
    """Make the dialect of a generation section's servers. `device` and `dtype` are those of the policy's weights."""
    transfer = make_transfer_config(generation.refit)
    launch_args = () if transfer is None else ("--weight-transfer-config", json.dumps(transfer))
    return VllmDialect(
        generation.vllm,
        max_model_len,
        choose_vllm_logprobs_mode(generation),
        launch_args,
        make_transfer_environment(generation.refit),
        generation.router_replay,
        can_sleep(generation, device),
        dtype,
        adapter_rank,
    )


def make_vllm_launcher(stage: StageConfig, vocab_size: int) -> ServerLauncher:
    """Return the launcher of a stage's servers on a node without ranks. They may use all GPUs of the node.

    Raises:
        ConfigError: Something is missing; the message names the key.
    """
    _check_launch(stage, vocab_size)
    settings, device = stage.generation.vllm, choose_device(stage.device)
    length = settings.max_model_len or stage.model.max_sequence_length
    dialect = make_vllm_dialect(stage.generation, length, device, _DTYPES[stage.precision])
    model = describe_model(stage.model, _DTYPES[stage.precision], vocab_size)
    return ServerLauncher(settings, dialect, model, choose_server_devices(settings, _SIZE_KEY, device, shared=True))


def can_sleep(generation: GenerationConfig, device: torch.device) -> bool:
    """Return whether the servers that a run starts release their memory while the policy trains on `device`."""
    return device.type == "cuda" and releases_memory(generation)


def check_vllm(stage: StageConfig, vocab_size: int) -> None:
    """Check that Hugging Face's format can express the model, and that this machine has vLLM and enough GPUs.

    Raises:
        ConfigError: Something is missing; the message names the key.
    """
    _check_launch(stage, vocab_size)
    generation, device = stage.generation, choose_device(stage.device)
    _choose_devices(generation, device)
    if device.type == "cuda" and generation.refit == "shared_memory":
        check_gpu_memory_can_be_shared(generation.refit)


def _check_launch(stage: StageConfig, vocab_size: int) -> None:
    """Check that Hugging Face's format can express the model, and that this machine has vLLM."""
    generation, settings = stage.generation, stage.generation.vllm
    remedy = (
        "run scripts/install_vllm.sh, which makes an environment with vLLM, or set the key to the Python of one, or "
        "name servers in generation.vllm.server_urls"
    )
    check_servers(stage, vocab_size, settings, settings.python, "max_model_len", remedy)
    device = choose_device(stage.device)
    if generation.refit == "disk" and stage.model.tie_embeddings and device.type == "cpu" and not settings.server_urls:
        raise ConfigError(
            "generation.refit=disk: on a CPU, vLLM keeps the old weights of a head that is tied to the embedding "
            "(model.tie_embeddings=true) when it reloads files; set generation.refit=collective"
        )


def _choose_devices(generation: GenerationConfig, policy: torch.device) -> tuple[tuple[int, ...], ...]:
    return choose_server_devices(generation.vllm, _SIZE_KEY, policy, shares_gpus(generation))
