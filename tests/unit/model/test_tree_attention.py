"""Attention within prefix trees equals attention of each whole sequence, in values and in every gradient."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.model.layers.attention import PortableAttention, PortablePacking
from rl_megatron.model.layers.packed_tree import PackedTree
from rl_megatron.model.layers.tree_attention import attend_in_tree_by_flash
from rl_megatron.topology.degrees import zigzag_slices
from rl_megatron.topology.token_layout import TokenLayout
from tests.unit.model.test_attention import assert_same_values_and_gradients

HEADS, GROUPS = 4, 2


def random_tree(seed: int) -> PrefixTree:
    """Return the tree of a few sequences that share tokens at random, with up to five segments in a sequence."""
    rng = random.Random(seed)
    lengths, shared = [], []
    for number in range(rng.randint(1, 7)):
        longest_shared = lengths[-1] if number else 0
        common = rng.choice([0, rng.randint(0, longest_shared), longest_shared // 2, min(shared[-1:] or [0])])
        lengths.append(common + rng.randint(1, 12))
        shared.append(common)
    return PrefixTree.build(lengths, shared)


def formula(query, key, value, window, sinks):
    """Return the attention of one sequence in plain torch: [S, N, D], [S, G, D], [S, G, Dv] → [S, N·Dv]."""
    length, heads, size = query.shape
    key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) / size**0.5
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], dim=-1)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1)[..., :length], value).flatten(1)


@pytest.mark.parametrize("value_size", [8, 4, 12])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
def test_a_token_of_a_tree_attends_to_the_earlier_tokens_of_its_sequence(window, has_sinks, value_size):
    config = SimpleNamespace(window_size=None if window is None else (window - 1, 0), window_attn_skip_freq=None,
                             softmax_type="vanilla")  # fmt: skip
    attention = PortableAttention(config, 1, AttnMaskType.causal, "self")
    generator, most = torch.Generator().manual_seed(0), 0
    for seed in range(8):
        tree = random_tree(seed)
        most = max(most, tree.depth)
        shapes = [(tree.num_tokens, 1, heads, size) for heads, size in ((HEADS, 8), (GROUPS, 8), (GROUPS, value_size))]
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
        sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64).requires_grad_() if has_sinks else None
        attention.softmax_offset = sinks if sinks is None else torch.nn.Parameter(sinks)
        packed = PackedTree.from_tree(tree, [segment.length for segment in tree.segments], None)
        found = attention(*inputs, packed_seq_params=PortablePacking(sequences=packed))[:, 0]
        starts = torch.tensor([0] + [segment.length for segment in tree.segments]).cumsum(0)
        wanted, rows = [], []
        for path in tree.paths:
            own = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in path])
            assert packed.positions[own].tolist() == list(range(len(own)))
            wanted.append(formula(*(x[own, 0] for x in inputs), window, attention.softmax_offset))
            rows.append(own)
        parameters = inputs if sinks is None else [*inputs, attention.softmax_offset]
        assert_same_values_and_gradients(found[torch.cat(rows)], torch.cat(wanted), parameters)
    assert most >= 4, "no tree is deep"


# --- the flash kernel, which needs a GPU, is stood in for by its definition ---


def pairs_of(query_starts, key_starts):
    for (first, last), (begin, end) in zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        yield slice(first, last), slice(begin, end)


def scores_of(query, key, is_causal, scale):
    """Return the scores [N, q, k] of a pair; a causal query attends up to its position, counted from the last key."""
    scores = torch.einsum("qnd,knd->nqk", query, key) * (query.size(-1) ** -0.5 if scale is None else scale)
    if not is_causal:
        return scores
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.size(2) - scores.size(1))
    return scores.masked_fill(~seen, -torch.inf)


def flash(query, key, value, *options, scale=None):
    """Pairs without keys give 0 and +inf. What is beyond the largest numbers is not written."""
    query_starts, key_starts, most_queries, most_keys, _, is_causal, _ = options
    output, log_sum = torch.full_like(query, torch.nan), query.new_full((query.size(1), len(query)), torch.nan)
    for queries, keys in pairs_of(query_starts, key_starts):
        written = slice(queries.start, min(queries.stop, queries.start + most_queries))
        key_, value_ = (x[keys][:most_keys].repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
        scores = scores_of(query[written], key_, is_causal, scale)
        has_keys = keys.stop > keys.start
        output[written] = torch.einsum("nqk,knd->qnd", scores.softmax(-1), value_) if has_keys else 0.0
        log_sum[:, written] = scores.logsumexp(-1) if has_keys else torch.inf
    return output, log_sum, query.new_zeros(2), query.new_zeros(()), query.new_zeros(0)


def flash_backward(gradient, query, key, value, output, log_sum, *options, scale=None):
    query_starts, key_starts, most_queries, most_keys, _, is_causal, *_ = options
    gradients = [torch.full_like(x, torch.nan) for x in (query, key, value)]
    factor = query.size(-1) ** -0.5 if scale is None else scale
    for queries, keys in pairs_of(query_starts, key_starts):
        queries = slice(queries.start, min(queries.stop, queries.start + most_queries))
        keys = slice(keys.start, min(keys.stop, keys.start + most_keys))
        key_, value_ = (x[keys].repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
        shares = (scores_of(query[queries], key_, is_causal, scale) - log_sum[:, queries, None]).exp()
        mean = (gradient[queries] * output[queries]).sum(-1).T[..., None]
        of_scores = shares * (torch.einsum("qnd,knd->nqk", gradient[queries], value_) - mean) * factor
        gradients[0][queries] = torch.einsum("nqk,knd->qnd", of_scores, key_)
        of_keys = torch.einsum("nqk,qnd->knd", of_scores, query[queries])
        of_values = torch.einsum("nqk,qnd->knd", shares, gradient[queries])
        for total, x in zip(gradients[1:], (of_keys, of_values), strict=True):
            total[keys] = x.unflatten(1, (GROUPS, -1)).sum(2)
    return tuple(gradients)


@pytest.fixture
def flash_on_cpu():
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_call_of_the_flash_kernel_attends_to_a_level_of_ancestors(flash_on_cpu, cp_size, has_sinks):
    generator, deepest = torch.Generator().manual_seed(0), 0
    for seed in range(8):
        tree = random_tree(seed)
        multiple = zigzag_slices(cp_size)
        padded = [-(-segment.length // multiple) * multiple for segment in tree.segments]
        total, starts = sum(padded), [0, *accumulate(padded)]
        shapes = [(total, heads, 8) for heads in (HEADS, GROUPS, GROUPS)]
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
        sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64).requires_grad_() if has_sinks else None
        rows = [
            torch.cat([torch.arange(tree.segments[index].length) + starts[index] for index in path])
            for path in tree.paths
        ]
        wanted = [formula(*(x[own] for x in inputs), None, sinks) for own in rows]

        segments = [(segment.begin, segment.length) for segment in tree.segments]
        ranks = [SimpleNamespace(rank=lambda r=r: r, size=lambda: cp_size) for r in range(cp_size)]
        width = max(map(len, rows))
        places = TokenLayout.from_segments(segments, tree.paths, padded, width, ranks[0]).index
        rank_order = torch.zeros(total, dtype=torch.long)  # padding may have any query
        for own, place in zip(rows, places, strict=True):
            rank_order[place[: len(own)]] = own
        outputs = []
        for rank, own in zip(ranks, rank_order.chunk(cp_size), strict=True):
            packed = PackedTree.from_tree(tree, padded, None if cp_size == 1 else rank)
            assert len(packed.flash_calls) == min(cp_size, 2) + tree.depth - 1
            deepest = max(deepest, tree.depth)
            outputs.append(attend_in_tree_by_flash(inputs[0][own], *inputs[1:], packed.flash_calls, None, sinks))
        found = torch.cat(outputs)[torch.cat([place[: len(own)] for own, place in zip(rows, places, strict=True)])]
        assert_same_values_and_gradients(found, torch.cat(wanted), inputs if sinks is None else [*inputs, sinks])
    assert deepest >= 4
