"""Reward modelling: a score head learns which of two answers people, or a verifier, prefer.

Source: Bradley-Terry on pairs, as in Ouyang et al. 2022, arXiv:2203.02155 §3.5.
"""

from __future__ import annotations

from rl_megatron.algorithms.pairs import pair_loss
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.config.algorithms import RewardModelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.loader import DataLoader
from rl_megatron.losses.contract import LossInputType
from rl_megatron.losses.registry import configured_loss
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy

_LOSS = pair_loss(LossInputType.LOGIT, "scores of pairs", "preference")


@register_algorithm(RewardModelConfig, loss=_LOSS, head="score")
def reward_model(
    loop: Loop, policy: MegatronPolicy, data: DataLoader[BatchedDataDict], algorithm: RewardModelConfig
) -> None:
    """Train the stage's model to score chosen answers above rejected ones."""
    loss_fn = configured_loss(loop.config.loss)
    for step, pairs in loop.batches(data):
        loop.record(step, loop.train(step, pairs, loss_fn))
