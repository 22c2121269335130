"""Reward modelling: a score head learns which answer of a pair people, or a verifier, prefer.

Source: Bradley-Terry on pairs, as in Ouyang et al. 2022, arXiv:2203.02155 §3.5.
"""

from __future__ import annotations

from rl_megatron.algorithms.inputs import preference_rows
from rl_megatron.algorithms.stage import Stage
from rl_megatron.losses.registry import configured_loss


def reward_model(stage: Stage) -> None:
    loss_fn = configured_loss(stage.config.loss)
    for step, pairs in stage.batches(preference_rows(stage.config, stage.tokenizer)):
        stage.record(step, stage.train(step, pairs, loss_fn))
