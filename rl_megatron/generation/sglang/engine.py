"""Build the rollout engine on SGLang servers, and check before the first step that it can serve a stage."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.config.schema import StageConfig
from rl_megatron.generation.servers.devices import check_servers, choose_server_devices
from rl_megatron.generation.servers.engine import ServerEngine, ServerKind
from rl_megatron.generation.servers.node import ServerLauncher, describe_model
from rl_megatron.generation.sglang.dialect import SglangDialect
from rl_megatron.topology.device import choose_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.servers import WeightServers
from rl_megatron.weight_sync.sglang import SglangSync

_SIZE_KEY = "tp_size"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def build_sglang_engine(policy: MegatronPolicy, stage: StageConfig, output_dir: Path) -> ServerEngine:
    """Build the engine of a stage's policy; its servers log into `output_dir`/servers."""
    settings, minutes = stage.generation.sglang, stage.train.collective_timeout_minutes
    length = settings.context_length or policy.model_config.max_sequence_length

    def make_sync(servers: WeightServers) -> SglangSync:
        return SglangSync(servers, policy.weights, policy.topology, 60 * minutes)

    devices = choose_server_devices(settings, _SIZE_KEY, policy.topology.device)
    dialect = SglangDialect(settings, length)
    kind = ServerKind(dialect, settings, make_sync, max_tokens=length, devices=devices)
    return ServerEngine(policy, stage.generation, kind, output_dir, minutes)


def check_sglang(stage: StageConfig, vocab_size: int) -> None:
    """Check that Hugging Face's format can express the model, and that this machine has SGLang and enough GPUs.

    Raises:
        ConfigError: Something is missing; the message names the key.
    """
    _check_launch(stage, vocab_size)
    choose_server_devices(stage.generation.sglang, _SIZE_KEY, choose_device(stage.device))


def _check_launch(stage: StageConfig, vocab_size: int) -> None:
    """Check that Hugging Face's format can express the model, and that this machine has SGLang."""
    settings = stage.generation.sglang
    remedy = (
        "set the key to the Python of an environment in which SGLang is installed, or name servers in "
        "generation.sglang.server_urls"
    )
    check_servers(stage, vocab_size, settings, settings.python, "context_length", remedy)


def make_sglang_launcher(stage: StageConfig, vocab_size: int) -> ServerLauncher:
    """Return the launcher of a stage's servers on a node without ranks. The servers may use all its GPUs.

    Raises:
        ConfigError: Something is missing; the message names the key.
    """
    _check_launch(stage, vocab_size)
    settings, device = stage.generation.sglang, choose_device(stage.device)
    dialect = SglangDialect(settings, settings.context_length or stage.model.max_sequence_length)
    model = describe_model(stage.model, _DTYPES[stage.precision], vocab_size)
    return ServerLauncher(settings, dialect, model, choose_server_devices(settings, _SIZE_KEY, device, shared=True))
