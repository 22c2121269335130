"""Losses: pure formulas over per-token log-probabilities, each a file, each registered by name.

Importing the room registers every loss; `build_loss(name, cfg)` makes one.
"""

from rl_megatron.losses.clipped_pg import ClippedPGLossFn
from rl_megatron.losses.clipped_pg_config import ClippedPGLossConfig, ClippedPGLossDataDict
from rl_megatron.losses.distillation import DistillationLossConfig, DistillationLossDataDict, DistillationLossFn
from rl_megatron.losses.dpo import DPOLossConfig, DPOLossDataDict, DPOLossFn
from rl_megatron.losses.draft import (
    DraftCrossEntropyLossConfig,
    DraftCrossEntropyLossDataDict,
    DraftCrossEntropyLossFn,
    DraftLossWrapper,
)
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
from rl_megatron.losses.ipo import IPOLossConfig, IPOLossFn
from rl_megatron.losses.nll import NLLLoss, NLLLossConfig
from rl_megatron.losses.packing_wrapper import SequencePackingLossWrapper
from rl_megatron.losses.ppo import PPOLoss
from rl_megatron.losses.preference import PreferenceLoss, PreferenceLossConfig, PreferenceLossDataDict
from rl_megatron.losses.registry import LOSSES, build_loss, register
from rl_megatron.losses.value import MSEValueLoss, MSEValueLossConfig, MSEValueLossDataDict

__all__ = [
    "LOSSES",
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossDataDict",
    "DPOLossFn",
    "DistillationLossConfig",
    "DistillationLossDataDict",
    "DistillationLossFn",
    "DraftCrossEntropyLossConfig",
    "DraftCrossEntropyLossDataDict",
    "DraftCrossEntropyLossFn",
    "DraftLossWrapper",
    "IPOLossConfig",
    "IPOLossFn",
    "LogprobLoss",
    "Loss",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MSEValueLoss",
    "MSEValueLossConfig",
    "MSEValueLossDataDict",
    "NLLLoss",
    "NLLLossConfig",
    "PPOLoss",
    "PreferenceLoss",
    "PreferenceLossConfig",
    "PreferenceLossDataDict",
    "Reduction",
    "ScoreLoss",
    "SequencePackingLossWrapper",
    "build_loss",
    "kl_penalty",
    "masked_mean",
    "register",
]
