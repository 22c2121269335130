"""Supervised fine-tuning: next-token prediction on answers, given prompts."""

from __future__ import annotations

from rl_megatron.algorithms.loop import Loop
from rl_megatron.algorithms.owned import owned_batches
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.config.algorithms import SFTConfig
from rl_megatron.data.stage_loader import dataset_loader
from rl_megatron.losses import NLLLoss


@register_algorithm(SFTConfig, fixed_loss="nll")
def sft(stage: Loop, algorithm: SFTConfig) -> None:
    """Train the stage's policy to predict the tokens of answers."""
    loss_fn = NLLLoss()
    for step, batch in owned_batches(stage, dataset_loader(stage.config, stage.tokenizer)):
        stage.record(step, stage.train(step, batch, loss_fn))
