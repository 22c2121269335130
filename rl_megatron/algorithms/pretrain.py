"""Pretraining: next-token prediction on text."""

from __future__ import annotations

from rl_megatron.algorithms.inputs import pretraining_rows
from rl_megatron.algorithms.stage import Stage
from rl_megatron.losses import NLLLoss


def pretrain(stage: Stage) -> None:
    loss_fn = NLLLoss()
    for step, batch in stage.batches(pretraining_rows(stage.config, stage.tokenizer)):
        stage.record(step, stage.train(step, batch, loss_fn))
