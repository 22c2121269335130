"""The rules of asynchronous training: what `rollout.async_enabled` needs of the other sections."""

from __future__ import annotations

from rl_megatron.config.algorithm_kinds import PolicyGradientConfig
from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.config.schema import StageConfig

_KEYS = ("max_trajectory_age_steps", "in_flight_weight_updates", "over_sampling", "partial", "importance_correction")
_CORRECTS = "use_importance_sampling_correction"


def check_asynchronous(stage: StageConfig, where: str) -> None:
    """Check that the engine, the data, the loss and the keys of the section suit each other.

    Args:
        stage: The stage.
        where: The name of its section `rollout`, for messages.

    Raises:
        ConfigError: They do not; the message names the key, the rule and the remedy.
    """
    rollout = stage.rollout
    if not rollout.recompute_kv_cache_after_weight_updates:
        raise ConfigError(
            f"{where}.recompute_kv_cache_after_weight_updates=false: no rollout engine of this package keeps keys and "
            "values of older weights; leave it true"
        )
    if not rollout.async_enabled:
        _refuse_keys(rollout, where)
        return
    if not isinstance(stage.algorithm, PolicyGradientConfig):
        return  # the stage only evaluates, and another stage of the run is asynchronous
    if rollout.over_sampling == 1 and not rollout.partial:
        raise ConfigError(
            f"{where}.partial=false has no effect with {where}.over_sampling=1, with which every step waits for all of "
            "its trajectories; set over_sampling above 1, or leave partial out"
        )
    require_extra(f"{where}.async_enabled=true, which writes all trajectories to files,", "data", "pyarrow")
    if rollout.is_asynchronous:
        _check_engine(stage, where)
        _check_data(stage, where)
    _check_correction(stage, where)


def _refuse_keys(rollout: TrajectoryConfig, where: str) -> None:
    default = TrajectoryConfig()
    for key in _KEYS:
        if getattr(rollout, key) != getattr(default, key):
            raise ConfigError(
                f"{where}.{key} has no effect without {where}.async_enabled=true; set it, or leave {key} out"
            )


def _check_engine(stage: StageConfig, where: str) -> None:
    name = stage.generation.engine
    if not ENGINE_DECLARATIONS[name].runs_in_processes:
        others = [other for other, engine in ENGINE_DECLARATIONS.items() if engine.runs_in_processes]
        raise ConfigError(
            f"{where}.async_enabled=true: generation.engine={name} computes on the ranks that train, so it cannot "
            f"generate meanwhile; set generation.engine={' or '.join(others)}, or {where}.max_trajectory_age_steps=0"
        )
    if name == "vllm" and stage.generation.vllm.enable_sleep_mode:
        raise ConfigError(
            f"{where}.async_enabled=true: generation.vllm.enable_sleep_mode=true gives the servers' memory to the "
            "training steps, during which they are to generate; set enable_sleep_mode=false, with GPUs of their own"
        )


def _check_data(stage: StageConfig, where: str) -> None:
    data = stage.data
    key = "data.streaming" if data.streaming else "data.mix_weights" if data.mix_weights is not None else None
    if key is not None:
        raise ConfigError(
            f"{where}.async_enabled=true reads prompts whenever the engine has space for them, and {key} needs the "
            f"order of the steps; leave {key} out, or set {where}.async_enabled=false"
        )


def _check_correction(stage: StageConfig, where: str) -> None:
    """Check that the loss corrects for old trajectories as the section says."""
    correction, loss = stage.rollout.correction, stage.loss
    name = loss.get("name")
    if correction == "recomputed" and _CORRECTS not in loss:
        raise ConfigError(
            f"{where}.importance_correction={stage.rollout.importance_correction}: loss.name={name} has no key "
            f"{_CORRECTS}, so it does not correct for trajectories of older weights; choose loss=clipped_pg, or set "
            f"{where}.importance_correction=engine if its ratio does, or =off to learn without a correction"
        )
    if correction != "engine":
        return
    for key in ("force_on_policy_ratio", "disable_ppo_ratio", _CORRECTS):
        if loss.get(key):
            raise ConfigError(
                f"{where}.importance_correction=engine corrects by the ratio of the loss, π/π_generation, and "
                f"loss.{key}=true leaves that out or makes it 1; set loss.{key}=false, or "
                f"{where}.importance_correction=recomputed"
            )
    if isinstance(stage.algorithm, PolicyGradientConfig) and stage.algorithm.recompute_logprobs == "always":
        raise ConfigError(
            f"{where}.importance_correction=engine takes π_prev from the engine, and algorithm.recompute_logprobs="
            "always computes it; set recompute_logprobs=auto"
        )
