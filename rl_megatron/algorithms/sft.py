"""Supervised fine-tuning: next-token prediction on answers, given prompts."""

from __future__ import annotations

from rl_megatron.algorithms.inputs import answer_rows
from rl_megatron.algorithms.stage import Stage
from rl_megatron.losses import NLLLoss


def sft(stage: Stage) -> None:
    loss_fn = NLLLoss()
    for step, batch in stage.batches(answer_rows(stage.config, stage.tokenizer)):
        stage.record(step, stage.train(step, batch, loss_fn))
