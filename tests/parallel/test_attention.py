"""Portable attention of sequences that are cut over context-parallel ranks equals that of whole sequences.

Ranks cut a sequence into slices, each of which attends to the keys up to its own end.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.model.layers import attention as layers
from rl_megatron.model.layers.attention import PortableAttention, PortablePacking
from rl_megatron.model.layers.packed import PackedSequences
from rl_megatron.topology.context_parallel import zigzag_positions
from tests.unit.model.test_attention import attention, random_qkv

pytestmark = pytest.mark.change

EVEN, UNEVEN = [16, 8, 16, 16], [24, 8, 16, 8]


def own_tokens(padded_lengths):
    """Return the indices of this rank's tokens in the whole pack."""
    starts = torch.tensor([0, *padded_lengths]).cumsum(0)[:-1]
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [start + zigzag_positions(n, rank, size) for start, n in zip(starts, padded_lengths, strict=True)]
    return torch.cat(parts)


def run(window, padded_lengths):
    """Attend on this rank, and return output, gradients, this rank's tokens and the lengths of each call's keys.

    Args:
        window: The tokens to which a token attends, or None for all before it.
        padded_lengths: The lengths of a pack, or None for a padded batch of three sequences.
    """
    shape = (16, 3) if padded_lengths is None else (sum(padded_lengths), 1)
    tokens = own_tokens(padded_lengths or [16])
    mine = [x.detach()[tokens].requires_grad_() for x in random_qkv(*shape)]
    upstream = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[tokens]
    packing = None
    if padded_lengths is not None:
        packing = PortablePacking(sequences=PackedSequences.from_padded_lengths(padded_lengths, dist.group.WORLD))
    layer: PortableAttention = attention(window)
    layer.cp_group = dist.group.WORLD
    lengths, attend = [], layers.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        lengths.append((query.size(2), key.size(2)))
        return attend(query, key, value, **options)

    with mock.patch.object(layers, "scaled_dot_product_attention", recorded):
        found = layer(*mine, packed_seq_params=packing)
    return found.detach(), torch.autograd.grad(found, mine, upstream), tokens, lengths


@pytest.mark.parametrize("padded_lengths", [None, EVEN, UNEVEN], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("size", [2, 4])
def test_cut_sequences_attend_like_whole_ones(ranks, size, window, padded_lengths):
    output, gradients, *_ = ranks.reference(run, window, padded_lengths)
    for rank, (found, found_gradients, tokens, lengths) in enumerate(ranks.run(size, run, window, padded_lengths)):
        torch.testing.assert_close(found, output[tokens], rtol=1e-10, atol=1e-12)
        for one, whole in zip(found_gradients, gradients, strict=True):
            torch.testing.assert_close(one, whole[tokens], rtol=1e-10, atol=1e-12)
        if window is None and padded_lengths is None:
            part = 16 // (2 * size)
            assert lengths == [(part, part * (rank + 1)), (part, part * (2 * size - rank))]
