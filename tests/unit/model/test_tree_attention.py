"""Attention within prefix trees equals attention of each whole sequence, in values and in every gradient."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.model.layers.attention import PortableAttention, PortablePacking
from rl_megatron.model.layers.packed_tree import PackedTree
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
