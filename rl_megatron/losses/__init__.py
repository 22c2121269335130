"""Losses: pure formulas over per-token log-probabilities. Each loss is registered by name.

Importing this package registers every loss; `build_loss(name, cfg)` makes one.

Annotations give shapes, as in `rl_megatron.logprobs`. `batch sequence` is [B, S]. `batch tokens` is [B, S-1], the shape
of next-token streams. `*shape` is any shape.
"""

from rl_megatron.config.losses import (
    CPOLossConfig,
    DistillationLossConfig,
    DPOLossConfig,
    DraftCrossEntropyLossConfig,
    FullDistillationLossConfig,
    IPOLossConfig,
    KTOLossConfig,
    MSEValueLossConfig,
    NLLLossConfig,
    ORPOLossConfig,
    PreferenceLossConfig,
    SimPOLossConfig,
)
from rl_megatron.losses.base import LogprobLoss, Loss, ScoreLoss
from rl_megatron.losses.calling import Call, NaNLoss
from rl_megatron.losses.clipped_pg import ClippedPGLossConfig, ClippedPGLossDataDict, ClippedPGLossFn
from rl_megatron.losses.contract import LossFunction, LossInputType, LossType, Reduction
from rl_megatron.losses.distillation import DistillationLossDataDict, DistillationLossFn
from rl_megatron.losses.dpo import DPOLossDataDict, DPOLossFn, IPOLossFn
from rl_megatron.losses.draft import (
    DraftCrossEntropyLossDataDict,
    DraftCrossEntropyLossFn,
    DraftLossWrapper,
)
from rl_megatron.losses.foreign import as_loss
from rl_megatron.losses.full_distillation import FullDistillationLossDataDict, FullDistillationLossFn
from rl_megatron.losses.functional import kl_penalty, masked_mean
from rl_megatron.losses.kto import KTOLossDataDict, KTOLossFn
from rl_megatron.losses.nll import NLLLoss
from rl_megatron.losses.packing_wrapper import SequencePackingLossWrapper
from rl_megatron.losses.ppo import PPOLoss
from rl_megatron.losses.preference import PreferenceLoss, PreferenceLossDataDict
from rl_megatron.losses.reference_free import CPOLossFn, ORPOLossFn, SimPOLossFn
from rl_megatron.losses.registry import LOSSES, build_loss, register_loss
from rl_megatron.losses.value import MSEValueLoss, MSEValueLossDataDict

__all__ = [
    "LOSSES",
    "CPOLossConfig",
    "CPOLossFn",
    "Call",
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
    "FullDistillationLossConfig",
    "FullDistillationLossDataDict",
    "FullDistillationLossFn",
    "IPOLossConfig",
    "IPOLossFn",
    "KTOLossConfig",
    "KTOLossDataDict",
    "KTOLossFn",
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
    "NaNLoss",
    "ORPOLossConfig",
    "ORPOLossFn",
    "PPOLoss",
    "PreferenceLoss",
    "PreferenceLossConfig",
    "PreferenceLossDataDict",
    "Reduction",
    "ScoreLoss",
    "SequencePackingLossWrapper",
    "SimPOLossConfig",
    "SimPOLossFn",
    "as_loss",
    "build_loss",
    "kl_penalty",
    "masked_mean",
    "register_loss",
]
