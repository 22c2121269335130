"""The rules of `train.deterministic`: what a stage may not use, because two equal runs could differ."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig

VLLM_SWITCH = "VLLM_BATCH_INVARIANT"


def check_deterministic(stage: StageConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Check that nothing in a stage depends on time, if `train.deterministic` is on.

    Args:
        stage: The stage.
        environment: This process's environment, which servers that the run starts inherit.

    Raises:
        ConfigError: Attention, the rollout engine or the reward depends on time; the message says why, and what to
            choose.
    """
    if stage.train.deterministic and stage.model.cudnn_attention:
        raise ConfigError(
            "train.deterministic=true and model.cudnn_attention=true: cuDNN sums gradients in any order; set "
            "model.cudnn_attention=false"
        )
    if not (stage.train.deterministic and stage.scores_completions):
        return
    why = _why_engine_varies(stage, environment)
    if why is not None:
        raise ConfigError(
            f"train.deterministic=true and generation.engine={stage.generation.engine}: {why}, or choose "
            "generation.engine=embedded"
        )
    if stage.reward.on_timeout != "error":
        raise ConfigError(
            f"train.deterministic=true and reward.on_timeout={stage.reward.on_timeout}: the machine's load would "
            "decide the reward of a slow sample; set reward.on_timeout=error"
        )


def _why_engine_varies(stage: StageConfig, environment: Mapping[str, str]) -> str | None:
    """Return why the rollout engine may give other tokens in another run, and the remedy; None if it does not."""
    generation = stage.generation
    if generation.engine == "transformers":
        return "its processes compute without the switches of this one"
    if generation.engine == "vllm" and generation.vllm.urls:
        return "what servers that run already batch together depends on time; let the run start its servers"
    if generation.engine == "vllm" and environment.get(VLLM_SWITCH) != "1":
        return (
            f"the bits of a logprob depend on which requests are batched together, and so on time; set {VLLM_SWITCH}=1 "
            "in the environment, if the GPU supports it"
        )
    if generation.engine == "sglang" and not generation.sglang.enable_deterministic_inference:
        return (
            "the bits of a logprob depend on which requests are batched together; set "
            "generation.sglang.enable_deterministic_inference=true"
        )
    return None
