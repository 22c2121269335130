"""Supervised fine-tuning: next-token prediction on answers, given prompts."""

from __future__ import annotations

from rl_megatron.algorithms.inputs import answer_rows
from rl_megatron.algorithms.stage import Stage
from rl_megatron.data.order import BatchSchedule
from rl_megatron.losses import NLLLoss


def sft(stage: Stage) -> None:
    rows = answer_rows(stage.config, stage.tokenizer)
    order = BatchSchedule(len(rows), stage.config.train.global_batch_size, stage.config.train.seed)
    loss_fn = NLLLoss()
    for step in stage.steps():
        batch = rows.batch(order.rows_at(step - 1))
        stage.record(step, stage.train(step, batch, loss_fn))
