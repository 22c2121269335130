"""Run microbatches to gradients and metrics, on megatron-core's pipeline schedules."""

from rl_megatron.execution.metrics import Denominators, NonFiniteLoss, over_steps
from rl_megatron.execution.runner import FusedHead, Runner

__all__ = ["Denominators", "FusedHead", "NonFiniteLoss", "Runner", "over_steps"]
