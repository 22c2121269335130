"""Token layouts, padded or packed, on one rank or cut zigzag: each token is on one rank and returns to its place, and
its gradient reaches its owner."""

import pytest
import torch
import torch.distributed as dist

from rl_megatron.topology.context_parallel import zigzag_positions
from rl_megatron.topology.token_layout import TokenLayout

LENGTHS = [5, 0, 8, 1]
WIDTH = 8


def batch():
    return torch.arange(1, len(LENGTHS) * WIDTH + 1).view(len(LENGTHS), WIDTH)


def boundaries(lengths, multiple):
    rounded = [-(-length // multiple) * multiple for length in lengths]
    return torch.tensor([0, *lengths]).cumsum(0), torch.tensor([0, *rounded]).cumsum(0)


def present():
    return torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def test_one_rank_padded_sequences():
    layout = TokenLayout.from_padded_batch((4, WIDTH), 10, None, torch.device("cpu"))
    local = layout.scatter(batch(), -7)
    assert torch.equal(local[:, :WIDTH], batch()) and (local[:, WIDTH:] == -7).all() and local.shape == (4, 10)
    assert torch.equal(layout.gather(local.double()), batch().double())


def test_one_rank_packed():
    cu, padded = boundaries(LENGTHS, 4)
    layout = TokenLayout.from_pack(cu, padded, WIDTH, 24, None)
    tokens = layout.scatter(batch(), 0)[0].tolist()
    assert tokens == [1, 2, 3, 4, 5, 0, 0, 0, *range(17, 25), 25, 0, 0, 0, 0, 0, 0, 0]
    again = layout.gather(torch.tensor(tokens, dtype=torch.float64)[None])
    assert torch.equal(again, torch.where(present(), batch(), 0).double())


def test_trailing_dimensions_are_gathered_and_padding_has_no_gradient():
    cu, padded = boundaries(LENGTHS, 2)
    layout = TokenLayout.from_pack(cu, padded, WIDTH, 16, None)
    x = torch.full((1, 16, 3), float("nan"))
    x = torch.where(layout.scatter(present().float(), 0.0)[..., None] > 0, torch.ones(1, 16, 3), x).requires_grad_()
    whole = layout.gather(x)
    assert torch.equal(whole, present()[..., None].expand(-1, -1, 3).float())
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    assert gradient.sum() == 3 * sum(LENGTHS) and gradient.isfinite().all()


def check_next_tokens(layout, there):
    """Check the index of the next token's values for each local token: −1 without one; padding is never indexed.

    Returns:
        The values that the index refers to, and the local values.
    """
    numbers = layout.scatter(torch.where(there, batch(), 0), 0)
    x = torch.where(numbers > 0, numbers, torch.nan)[..., None] * torch.tensor([1.0, -2.0])
    values, index = layout.locate_next_tokens(x)
    followed = torch.nn.functional.pad(there[:, 1:], (0, 1)) & there
    want = layout.scatter(torch.where(followed, batch() + 1, -1), -1)
    assert torch.equal(index < 0, want < 0)
    found = values.flatten(0, -2)[index[index >= 0]]
    assert torch.equal(found, want[want >= 0][:, None] * torch.tensor([1.0, -2.0]))
    return values, x


@pytest.mark.parametrize("packed", [False, True])
def test_the_values_of_the_next_token(packed):
    if packed:
        layout, there = TokenLayout.from_pack(*boundaries(LENGTHS, 4), WIDTH, 24, None), present()
    else:
        layout = TokenLayout.from_padded_batch((4, WIDTH), 10, None, torch.device("cpu"))
        there = torch.ones(4, WIDTH) > 0
    values, x = check_next_tokens(layout, there)
    assert values.data_ptr() == x.data_ptr(), "one rank has all tokens, so that no copy is needed"


def _cut(packed):
    """Check this rank's tokens against the zigzag cut of each sequence, the gathered batch, and the gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    cu, padded = boundaries(LENGTHS, 2 * size)
    if packed:
        layout = TokenLayout.from_pack(cu, padded, WIDTH, int(padded[-1]) // size, group)
        starts, spans = padded[:-1].tolist(), padded.diff().tolist()
    else:
        layout = TokenLayout.from_padded_batch((4, WIDTH), 12 // size, group, torch.device("cpu"))
        starts, spans = [12 * sequence for sequence in range(4)], [12] * 4
    flat = torch.zeros(sum(spans), dtype=torch.long)
    for sequence, (start, length) in enumerate(zip(starts, LENGTHS if packed else [WIDTH] * 4, strict=True)):
        flat[start : start + length] = batch()[sequence, :length]
    own = [flat[start + zigzag_positions(span, rank, size)] for start, span in zip(starts, spans, strict=True) if span]
    local = layout.scatter(batch(), 0)
    assert torch.equal(local.flatten(), torch.cat(own))

    there = present() if packed else torch.ones(4, WIDTH, dtype=torch.bool)
    x = local.double().requires_grad_()
    whole = layout.gather(x)
    assert torch.equal(whole, torch.where(there, batch(), 0).double())
    weight = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weight * whole).sum(), x)  # all ranks have the same loss, which counts once
    assert torch.equal(gradient, layout.scatter(torch.where(there, weight, 0.0), 0.0))
    check_next_tokens(layout, there)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_cut_over_ranks(ranks, world_size, packed):
    ranks.run(world_size, _cut, packed)
