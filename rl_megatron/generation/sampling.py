"""Sample from logits that are sharded over the vocabulary, without gathering them.

One uniform number per sequence decides the token: [0, 1) is divided among the ranks by their shares of the probability
mass. So the same number gives the same token for every tensor-parallel degree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.generation.interfaces import Sampling
from rl_megatron.logprobs.sampling_filter import SamplingFilter, filter_thresholds
from rl_megatron.logprobs.vocab_parallel import VocabShard
from rl_megatron.topology.collectives import gather_from_ranks

_BLOCK = 64  # columns that are summed in fp32


def sample(
    logits: Tensor, uniforms: Tensor, sampling: Sampling, tp_group: dist.ProcessGroup | None, valid_vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Sample one token for each sequence.

    Args:
        logits: [B, V/tp], this rank's equal shard.
        uniforms: [B] in [0, 1), equal on all ranks.
        sampling: How tokens are sampled.
        tp_group: The tensor-parallel ranks; None if the logits are not sharded.
        valid_vocab_size: Token ids from this one on are padding and never sampled.

    Returns:
        Token ids [B] and their logprobs [B] fp32, equal on all ranks. Logprobs are those of the whole distribution at
        the temperature, before top-k and top-p.
    """
    start = _rank(tp_group) * logits.size(-1)
    # A shard that has only padding keeps one column, whose score is −inf.
    logits = logits[:, : max(1, min(logits.size(-1), valid_vocab_size - start))]
    scores = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scores = scores / sampling.temperature
    if start >= valid_vocab_size:
        scores = torch.full_like(scores, -torch.inf)

    peak = scores.amax(-1)
    _all_reduce(peak, dist.ReduceOp.MAX, tp_group)
    scores = scores - peak[:, None]  # logits relative to the best one, ≤ 0
    weights = scores.exp()
    blocks = _sum_blocks(weights)
    total = gather_from_ranks(blocks.sum(-1), tp_group).sum(0)

    if sampling.temperature == 0:
        chosen = _choose_best(scores, start, tp_group)
    else:
        sampling_filter = SamplingFilter(sampling.top_k or None, sampling.top_p)
        if not sampling_filter.is_off:
            shard = VocabShard(start, start + logits.size(-1), valid_vocab_size, tp_group)
            temperatures = torch.full_like(peak, sampling.temperature)
            everywhere = torch.ones_like(peak, dtype=torch.bool)
            thresholds = filter_thresholds(logits, sampling_filter, shard, temperatures, everywhere)
            weights = weights * (logits >= thresholds[:, None])
            blocks = _sum_blocks(weights)
        chosen = _invert(weights, blocks, uniforms.double(), start, tp_group)

    mine = (chosen >= start) & (chosen < start + logits.size(-1))
    local = (chosen - start).clamp(0, logits.size(-1) - 1)
    score = torch.where(mine, scores.gather(-1, local[:, None])[:, 0].double(), 0.0)
    _all_reduce(score, dist.ReduceOp.SUM, tp_group)
    return chosen, (score - total.log()).float()


def _sum_blocks(weights: Tensor) -> Tensor:
    """Return the sums of blocks of columns, [B, blocks] fp64, so that only few numbers are summed in fp32."""
    full = weights.size(-1) // _BLOCK * _BLOCK
    sums = [weights[:, :full].unflatten(-1, (-1, _BLOCK)).sum(-1), weights[:, full:].sum(-1, keepdim=True)]
    return torch.cat(sums, dim=-1).double()


def _choose_best(scores: Tensor, start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the lowest id with the best score, so that ties break alike under every sharding.

    If scores are NaN, none is the best, and the id is 0. The logprob is then NaN, which ends the run.
    """
    best, index = scores.max(-1)
    nowhere = torch.iinfo(torch.long).max
    candidates = torch.where(best == 0, index + start, nowhere)
    _all_reduce(candidates, dist.ReduceOp.MIN, group)
    return torch.where(candidates == nowhere, 0, candidates)


def _invert(weights: Tensor, blocks: Tensor, uniforms: Tensor, start: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the id at which the cumulated weight first exceeds uniform · total, [B].

    The block of columns is found first, and then the column in it.

    Args:
        weights: [B, V/tp] fp32, ≥ 0.
        blocks: `_sum_blocks` of the weights.
        uniforms: [B] fp64.
        start: This rank's first id.
        group: The ranks that share the vocabulary.
    """
    cumulated = blocks.cumsum(-1)
    masses = gather_from_ranks(cumulated[:, -1].contiguous(), group)  # [tp, B]
    edges = masses.cumsum(0)
    target = uniforms * edges[-1]
    # Rounding can make the target equal the total mass. Then the last rank that has any mass owns it.
    owner = _find_first_above(edges.T, masses.T, target)
    lower_edge = edges.gather(0, owner[None])[0] - masses.gather(0, owner[None])[0]
    inside = (target - lower_edge).clamp(min=0)
    block = _find_first_above(cumulated, blocks, inside)
    rest = (inside - (cumulated - blocks).gather(-1, block[:, None])[:, 0]).clamp(min=0)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    exists = columns < weights.size(-1)
    in_block = weights.gather(-1, columns.clamp(max=weights.size(-1) - 1)).double() * exists
    index = block * _BLOCK + _find_first_above(in_block.cumsum(-1), in_block, rest)
    token = torch.where(owner == _rank(group), index + start, 0)
    _all_reduce(token, dist.ReduceOp.SUM, group)
    return token


def _find_first_above(cumulated: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Return [B]: the first index at which `cumulated` exceeds `target`, or else the last index with a weight above 0.

    `cumulated` and `weights` are [B, n]. If all weights are 0, the result is 0.
    """
    index = (cumulated <= target[:, None]).sum(-1)
    last = (weights > 0).long().mul(torch.arange(weights.size(-1), device=weights.device)).amax(-1)
    return torch.minimum(index, last)


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
