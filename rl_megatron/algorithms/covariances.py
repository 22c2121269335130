"""Select tokens for Clip-Cov and KL-Cov by the covariance of advantage and logprob.

A step that makes likely tokens likelier lowers the policy's entropy. Tokens with a large covariance lower it most.

Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
(arXiv:2505.22617), eq. 10 to 13.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.losses.contract import LossFunction
from rl_megatron.topology.reductions import RankReduction


def add_covariance_mask(rollouts: Batch, loss_fn: LossFunction, seed: int) -> Batch:
    """Add the `covariance_mask` to rollouts if the loss reads it, and return them. Collective.

    The mask is computed from `advantages` and `prev_logprobs`, both [B, S]. `seed` is for Clip-Cov's random draw of
    tokens, and must differ in every step.
    """
    cfg = getattr(loss_fn, "cfg", None)
    if isinstance(cfg, ClippedPGLossConfig) and cfg.uses_covariances:
        rollouts["covariance_mask"] = select_tokens(rollouts, cfg, seed)
    return rollouts


def select_tokens(rollouts: Batch, cfg: ClippedPGLossConfig, seed: int) -> Float[Tensor, "batch sequence"]:
    """Return 1 at the tokens that Clip-Cov or KL-Cov selects from all ranks' tokens, and 0 elsewhere, [B, S].

    The selection does not depend on how the sequences are spread over ranks. Collective.
    """
    ranks = rollouts.ranks
    counts = (rollouts["token_mask"] != 0) & (rollouts["sample_mask"] != 0)[:, None]
    advantages, logprobs = rollouts["advantages"][counts].double(), rollouts["prev_logprobs"][counts].double()
    number, mean_advantage = ranks.moments(advantages)[:2]
    mean_logprob = ranks.moments(logprobs).mean
    covariances = ((advantages - mean_advantage) * (logprobs - mean_logprob)).float()
    lengths = counts.sum(1)
    sequences = rollouts.numbers.repeat_interleave(lengths)
    if cfg.use_kl_cov:
        chosen = find_largest(covariances, sequences, _share(number, cfg.kl_cov_ratio), ranks)
    else:
        chosen = (covariances > cfg.clip_cov_min) & (covariances < cfg.clip_cov_max)
        drawn = _draws(seed, rollouts.numbers, lengths)[chosen]
        chosen[chosen.clone()] = find_largest(drawn, sequences[chosen], _share(number, cfg.clip_cov_ratio), ranks)
    selected = torch.zeros(counts.shape)
    selected[counts] = chosen.float()
    return selected


def find_largest(
    values: Float[Tensor, " n"], sequences: Int[Tensor, " n"], count: int, ranks: RankReduction
) -> Bool[Tensor, " n"]:
    """Return which of this rank's values are among the `count` largest of all ranks. Collective.

    Among equal values, a lower sequence number wins, then an earlier position in the sequence. If there are fewer
    values, all are chosen. `sequences` is the number of each value's sequence; a sequence is on one rank only.
    """

    def total(chosen: Tensor) -> int:
        return int(ranks.sum(chosen.sum()[None]).item())

    if count >= total(torch.ones_like(values, dtype=torch.bool)):
        return torch.ones_like(values, dtype=torch.bool)
    (bound,) = ranks.order_statistics(-values, [count - 1])
    above, equal = -values < bound, -values == bound
    left = count - total(above)
    (last,) = ranks.order_statistics(sequences[equal].float(), [left - 1])
    lower, at_last = equal & (sequences < last), equal & (sequences == last)
    return above | lower | (at_last & (at_last.cumsum(0) <= left - total(lower)))


def _share(number: int, ratio: float) -> int:
    return max(int(ratio * number), 1)


def _draws(seed: int, numbers: Tensor, lengths: Tensor) -> Tensor:
    """Draw a number for each token that counts. A sequence's draws depend only on `seed` and the sequence's number."""
    draws = [
        np.random.default_rng([seed, number]).random(length, dtype=np.float32)
        for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
    ]
    return torch.from_numpy(np.concatenate(draws)) if draws else torch.zeros(0)
