"""Sample from logits that are sharded over the vocabulary, without gathering them.

One uniform number per sequence decides the token: rank r owns the part of [0, 1) that its share of the probability mass
covers. So the token depends on that number alone, not on the tensor-parallel degree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.generation.interfaces import Sampling
from rl_megatron.logprobs.sampling_filter import SamplingFilter, filter_thresholds
from rl_megatron.logprobs.vocab_parallel import VocabShard


def sample(
    logits: Tensor, uniforms: Tensor, sampling: Sampling, tp_group: dist.ProcessGroup | None, valid_vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Sample one token for each sequence.

    Args:
        logits: [B, V/tp], this rank's equal shard.
        uniforms: [B] in [0, 1), equal on all ranks.
        sampling: How tokens are sampled.
        tp_group: The tensor-parallel ranks; None if the logits are whole.
        valid_vocab_size: Token ids from here on are padding and never sampled.

    Returns:
        Token ids [B] and their logprobs [B] fp32, equal on all ranks. A logprob is that of the whole distribution at
        the temperature, before top-k and top-p.
    """
    start = _rank(tp_group) * logits.size(-1)
    scores = logits.float() / (sampling.temperature or 1.0)
    ids = torch.arange(start, start + logits.size(-1), device=logits.device)
    scores = scores.masked_fill(ids >= valid_vocab_size, -torch.inf)

    peak = scores.amax(-1)
    _all_reduce(peak, dist.ReduceOp.MAX, tp_group)
    scores = scores - peak[:, None]  # logits relative to the best one, ≤ 0
    weights = scores.exp().double()
    masses = _gather(weights.sum(-1), tp_group)
    log_normaliser = masses.sum(0).log()

    if sampling.temperature == 0:
        chosen = _greedy(scores, start, tp_group)
    else:
        shard = VocabShard(start, start + logits.size(-1), valid_vocab_size, tp_group)
        left = SamplingFilter(sampling.top_k or None, sampling.top_p)
        temperatures = torch.full_like(peak, sampling.temperature)
        thresholds = filter_thresholds(logits, left, shard, temperatures, torch.ones_like(peak, dtype=torch.bool))
        chosen = _invert(weights * (logits >= thresholds[:, None]), uniforms.double(), start, tp_group)

    mine = (chosen >= start) & (chosen < start + logits.size(-1))
    local = (chosen - start).clamp(0, logits.size(-1) - 1)
    score = torch.where(mine, scores.gather(-1, local[:, None])[:, 0].double(), 0.0)
    _all_reduce(score, dist.ReduceOp.SUM, tp_group)
    return chosen, (score - log_normaliser).float()


def _greedy(scores: Tensor, start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the lowest id among the best, so that ties break alike under every sharding."""
    best, index = scores.max(-1)
    candidates = torch.where(best == 0, index + start, torch.iinfo(torch.long).max)
    _all_reduce(candidates, dist.ReduceOp.MIN, group)
    return candidates


def _invert(weights: Tensor, uniforms: Tensor, start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the id at which the cumulated weight first exceeds uniform · total, [B]."""
    cumulated = weights.cumsum(-1)
    masses = _gather(cumulated[:, -1].contiguous(), group)  # [tp, B]
    edges = masses.cumsum(0)
    target = uniforms * edges[-1]
    owner = (edges <= target).sum(0)
    # Rounding can put the target on the last edge: the last rank that has mass owns it then.
    has_mass = torch.arange(len(masses), device=weights.device)[:, None] * (masses > 0)
    owner = torch.minimum(owner, has_mass.amax(0))
    before = edges.gather(0, owner[None])[0] - masses.gather(0, owner[None])[0]
    inside = (target - before).clamp(min=0)
    index = (cumulated <= inside[:, None]).sum(-1)
    last = (weights > 0).long().mul(torch.arange(weights.size(-1), device=weights.device)).amax(-1)
    token = torch.where(owner == _rank(group), torch.minimum(index, last) + start, 0)
    _all_reduce(token, dist.ReduceOp.SUM, group)
    return token


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather […] of each rank into [tp, …], in rank order."""
    if group is None or group.size() == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
