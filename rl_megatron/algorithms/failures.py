"""The errors that end a run after its start."""

from __future__ import annotations

from rl_megatron.algorithms.advantage_estimators import AdvantagesFailed
from rl_megatron.algorithms.endpoint_teacher import TeacherFailed
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.generation.logprob_check import EngineMismatch
from rl_megatron.rewards.scorer import RewardFailed
from rl_megatron.rollouts.runner import RolloutFailed
from rl_megatron.runs.desync import RanksDiffer
from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.weight_sync.plan import WeightsRefused


class DiskFull(RuntimeError):
    """Raised if the disk is full where a run cannot go on without writing. Other ranks may not know of it."""


# Errors that end a run after its start, with exit status 1.
FAILURES = (
    NonFiniteLoss,
    WeightsRefused,
    EngineFailed,
    EngineMismatch,
    RewardFailed,
    RolloutFailed,
    AdvantagesFailed,
    TeacherFailed,
    SaveFailed,
    DiskFull,
    RanksDiffer,
)
