"""Microbatches → gradients and metrics, on megatron-core's pipeline schedules."""

from rl_megatron.schedule.microbatch import Microbatch, rooms_of
from rl_megatron.schedule.report import Denominators, NonFiniteLoss, over_steps
from rl_megatron.schedule.runner import FusedHead, Runner

__all__ = ["Denominators", "FusedHead", "Microbatch", "NonFiniteLoss", "Runner", "over_steps", "rooms_of"]
