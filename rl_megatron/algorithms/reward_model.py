"""Reward modelling: a score head learns which of two answers people, or a verifier, prefer.

Source: Bradley-Terry on pairs, as in Ouyang et al. 2022, arXiv:2203.02155 §3.5.
"""

from __future__ import annotations

from rl_megatron.algorithms.loop import Loop
from rl_megatron.algorithms.owned import owned_batches
from rl_megatron.algorithms.pairs import pair_loss
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.config.algorithms import RewardModelConfig
from rl_megatron.data.stage_loader import dataset_loader
from rl_megatron.losses.contract import LossInputType
from rl_megatron.losses.registry import configured_loss

_LOSS = pair_loss(LossInputType.LOGIT, "scores of pairs", "preference")


@register_algorithm(RewardModelConfig, loss=_LOSS, head="score")
def reward_model(stage: Loop, algorithm: RewardModelConfig) -> None:
    """Train the stage's model to score chosen answers above rejected ones."""
    loss_fn = configured_loss(stage.config.loss)
    for step, pairs in owned_batches(stage, dataset_loader(stage.config, stage.tokenizer)):
        stage.record(step, stage.train(step, pairs, loss_fn))
