"""NeMo RL's functions that change the rewards of a batch, as in NeMo RL 0.6 to 0.8.

They change `total_reward` in place and return the batch. Settings are strict, like those of losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.compat.nemo_rl.advantages import get_gdpo_reward_component_keys
from rl_megatron.compat.nemo_rl.batched_data_dict import BatchedDataDict
from rl_megatron.compat.nemo_rl.errors import RuleError, require
from rl_megatron.config.loading.settings import check_types, parse_settings
from rl_megatron.rewards.functions import LengthPenalty

Batch = TypeVar("Batch", bound=BatchedDataDict[Any])


@dataclass(frozen=True)
class RewardScalingConfig:
    """The section `grpo.reward_scaling`: the interval of the rewards, and the interval that they are mapped to."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.source_min < self.source_max,
            f"source_min={self.source_min} must be less than source_max={self.source_max}",
        )


@dataclass(frozen=True)
class RewardShapingConfig:
    """The section `grpo.reward_shaping`: DAPO's penalty for long responses, or a factor for truncated ones."""

    enabled: bool = False
    overlong_buffer_length: int | None = None
    overlong_buffer_penalty: float | None = None
    max_response_length: int | None = None
    stop_properly_penalty_coef: float | None = None

    def __post_init__(self) -> None:
        check_types(self)


def scale_rewards(repeated_batch: Batch, reward_scaling_cfg: object) -> Batch:
    """Scale `total_reward` and the reward components linearly to the target interval, and return the batch.

    Rewards outside the source interval are first clamped to it, with a warning.
    """
    cfg = parse_settings(RewardScalingConfig, reward_scaling_cfg)
    if not cfg.enabled:
        return repeated_batch
    for key in ("total_reward", *get_gdpo_reward_component_keys(repeated_batch)):
        rewards = repeated_batch[key]
        clamped = rewards.clamp(cfg.source_min, cfg.source_max)
        if (clamped != rewards).any():
            log.once(f"rewards {key!r} outside [{cfg.source_min}, {cfg.source_max}] are clamped before they are scaled")
        share = (clamped - cfg.source_min) / (cfg.source_max - cfg.source_min)
        repeated_batch[key] = cfg.target_min + share * (cfg.target_max - cfg.target_min)
    return repeated_batch


def apply_reward_shaping(batch: Batch, cfg: object) -> Batch:
    """Reduce `total_reward` of long or truncated responses, and return the batch.

    The penalty is `rl_megatron.rewards.functions.LengthPenalty`. As in NeMo RL, it still grows past
    `max_response_length`. If `stop_properly_penalty_coef` is set, truncated responses get this factor instead. The
    original rewards are kept as `unshaped_total_reward`.

    Raises:
        RuleError: A key that the settings need is missing, or a value is out of range.
    """
    settings = parse_settings(RewardShapingConfig, cfg)
    if not settings.enabled:
        return batch
    rewards: Tensor = batch["total_reward"]
    if settings.stop_properly_penalty_coef is not None:
        shaped = _scale_truncated(rewards, batch, settings.stop_properly_penalty_coef)
    else:
        shaped = rewards - _overlong_penalties(batch, len(rewards), settings).to(rewards)
    batch["unshaped_total_reward"], batch["total_reward"] = rewards, shaped
    return batch


def _scale_truncated(rewards: Tensor, batch: Mapping[str, Any], factor: float) -> Tensor:
    require(0 <= factor <= 1, f"stop_properly_penalty_coef must be in [0, 1], got {factor}")
    require("truncated" in batch, "truncated field not found in batch: stop_properly_penalty_coef needs it")
    truncated = torch.as_tensor(batch["truncated"], dtype=torch.bool, device=rewards.device)
    return torch.where(truncated, rewards * factor, rewards)


def _overlong_penalties(batch: Mapping[str, Any], num_rewards: int, settings: RewardShapingConfig) -> Tensor:
    """Return the penalty of each response, [B]."""
    buffer, penalty, longest = (
        settings.overlong_buffer_length, settings.overlong_buffer_penalty, settings.max_response_length,
    )  # fmt: skip
    if buffer is None or penalty is None or longest is None:
        raise RuleError(
            "without stop_properly_penalty_coef, only DAPO reward shaping is currently supported; set the keys that "
            f"are None: overlong_buffer_length={buffer}, overlong_buffer_penalty={penalty}, "
            f"max_response_length={longest}"
        )
    require(penalty >= 0, f"overlong_buffer_penalty={penalty} must be >=0")
    require(0 < buffer <= longest, f"overlong_buffer_length={buffer} must be from 1 to max_response_length={longest}")
    lengths = _response_lengths(batch)
    require(
        len(lengths) == num_rewards,
        "The number of messages in the batch must match the number of rewards, but there are "
        f"{len(lengths)} and {num_rewards}",
    )
    score = LengthPenalty(max_tokens=buffer, free_tokens=longest - buffer)
    return torch.tensor([-penalty * score([0] * length) for length in lengths])


def _response_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return `response_token_lengths`, or the length of the first assistant message in each message log."""
    if "response_token_lengths" in batch:
        return torch.as_tensor(batch["response_token_lengths"]).tolist()
    lengths = []
    for messages in batch["message_log"]:
        answers = [message for message in messages if message["role"] == "assistant"]
        require(bool(answers), "Assistant response not found during reward shaping")
        lengths.append(len(answers[0]["token_ids"]))
    return lengths
