"""Losses: pure formulas over per-token log-probabilities, each a file, each registered by name.

Importing the room registers every loss; `build_loss(name, cfg)` makes one.
"""

from rl_megatron.losses.clipped_pg import ClippedPGLossFn
from rl_megatron.losses.clipped_pg_config import ClippedPGLossConfig, ClippedPGLossDataDict
from rl_megatron.losses.functional import kl_penalty, masked_mean
from rl_megatron.losses.interfaces import (
    LogprobLoss,
    Loss,
    LossFunction,
    LossInputType,
    LossType,
    Reduction,
    ScoreLoss,
)
from rl_megatron.losses.nll import NLLLoss
from rl_megatron.losses.registry import LOSSES, build_loss, register

__all__ = [
    "LOSSES",
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "LogprobLoss",
    "Loss",
    "LossFunction",
    "LossInputType",
    "LossType",
    "NLLLoss",
    "Reduction",
    "ScoreLoss",
    "build_loss",
    "kl_penalty",
    "masked_mean",
    "register",
]
