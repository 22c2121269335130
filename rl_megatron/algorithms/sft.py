"""Supervised fine-tuning: next-token prediction on answers, given prompts."""

from __future__ import annotations

from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.config.algorithms import SFTConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.loader import DataLoader
from rl_megatron.losses import NLLLoss
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy


@register_algorithm(SFTConfig, fixed_loss="nll")
def sft(loop: Loop, policy: MegatronPolicy, data: DataLoader[BatchedDataDict], algorithm: SFTConfig) -> None:
    """Train the policy to predict the tokens of answers."""
    loss_fn = NLLLoss()
    for step, batch in loop.batches(data):
        loop.record(step, loop.train(step, batch, loss_fn))
