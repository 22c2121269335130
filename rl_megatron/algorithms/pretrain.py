"""Pretraining: next-token prediction on text."""

from __future__ import annotations

from rl_megatron.algorithms.inputs import pretraining_rows
from rl_megatron.algorithms.stage import Stage
from rl_megatron.data.order import BatchSchedule
from rl_megatron.losses import NLLLoss


def pretrain(stage: Stage) -> None:
    rows = pretraining_rows(stage.config, stage.tokenizer)
    order = BatchSchedule(len(rows), stage.config.train.global_batch_size, stage.config.train.seed)
    loss_fn = NLLLoss()
    for step in stage.steps():
        batch = rows.batch(order.rows_at(step - 1))
        stage.record(step, stage.train(step, batch, loss_fn))
