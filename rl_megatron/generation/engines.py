"""Register the package's rollout engines, and build the one that a stage's configuration chooses.

Engine processes import other modules of `generation`, but not this one, because it imports the policy.
"""

from __future__ import annotations

from pathlib import Path

from rl_megatron.config.engines import opens_memory
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import RolloutEngine
from rl_megatron.generation.registry import ENGINES, EngineKind, register_engine
from rl_megatron.generation.sglang.engine import build_sglang_engine, check_sglang, make_sglang_launcher
from rl_megatron.generation.transformers.devices import choose_engine_devices
from rl_megatron.generation.transformers.engine import TransformersEngine
from rl_megatron.generation.vllm.engine import build_vllm_engine, check_vllm, make_vllm_launcher
from rl_megatron.model.families import family_of_model
from rl_megatron.topology.device import choose_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.ipc import check_gpu_memory_can_be_shared


def build_engine(policy: MegatronPolicy, stage: StageConfig, output_dir: Path) -> RolloutEngine:
    """Build the rollout engine of a stage's policy; the engine writes its files to `output_dir`."""
    return ENGINES[stage.generation.engine].build(policy, stage, output_dir)


def check_engine(stage: StageConfig, vocab_size: int) -> None:
    """Raise ConfigError if the stage's rollout engine cannot serve the stage; the message names the key."""
    ENGINES[stage.generation.engine].check(stage, vocab_size)


def _check_transformers(stage: StageConfig, vocab_size: int) -> None:
    """Check that the engines can use their devices, and that Hugging Face's format can express the model."""
    policy = choose_device(stage.device)
    devices = choose_engine_devices(stage.generation, policy)
    if policy.type == "cuda" and opens_memory(stage.generation) and devices[0] != "cpu":
        check_gpu_memory_can_be_shared(stage.generation.refit)
    try:
        family_of_model(stage.model, stage.model.vocab_size or vocab_size)
    except ConfigError as error:
        raise ConfigError(f"generation.engine=transformers: {error}; set generation.engine=embedded") from error


@register_engine("embedded")
def _build_embedded(policy: MegatronPolicy, stage: StageConfig) -> RolloutEngine:
    generation = stage.generation
    return EmbeddedEngine(policy, generation.batch_size, generation.router_replay, generation.cuda_graphs)


@register_engine("transformers", runs_in_processes=True, check=_check_transformers)
def _build_transformers(policy: MegatronPolicy, stage: StageConfig) -> RolloutEngine:
    return TransformersEngine(policy, stage.generation, stage.train.collective_timeout_minutes)


ENGINES.register("vllm")(EngineKind(build_vllm_engine, check_vllm, make_vllm_launcher))
ENGINES.register("sglang")(EngineKind(build_sglang_engine, check_sglang, make_sglang_launcher))
