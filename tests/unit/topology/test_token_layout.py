"""Padded or packed, whole or cut zigzag: every token once, back in its place, its gradient to its owner."""

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
    layout = TokenLayout.padded((4, WIDTH), 10, None, torch.device("cpu"))
    rows = layout.scatter(batch(), -7)
    assert torch.equal(rows[:, :WIDTH], batch()) and (rows[:, WIDTH:] == -7).all() and rows.shape == (4, 10)
    assert torch.equal(layout.gather(rows.double()), batch().double())


def test_one_rank_packed():
    cu, padded = boundaries(LENGTHS, 4)
    layout = TokenLayout.packed(cu, padded, WIDTH, 24, None)
    row = layout.scatter(batch(), 0)[0].tolist()
    assert row == [1, 2, 3, 4, 5, 0, 0, 0, *range(17, 25), 25, 0, 0, 0, 0, 0, 0, 0]
    again = layout.gather(torch.tensor(row, dtype=torch.float64)[None])
    assert torch.equal(again, torch.where(present(), batch(), 0).double())


def test_trailing_dimensions_travel_along_and_what_is_absent_has_no_gradient():
    cu, padded = boundaries(LENGTHS, 2)
    layout = TokenLayout.packed(cu, padded, WIDTH, 16, None)
    x = torch.full((1, 16, 3), float("nan"))
    x = torch.where(layout.scatter(present().float(), 0.0)[..., None] > 0, torch.ones(1, 16, 3), x).requires_grad_()
    whole = layout.gather(x)
    assert torch.equal(whole, present()[..., None].expand(-1, -1, 3).float())
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    assert gradient.sum() == 3 * sum(LENGTHS) and gradient.isfinite().all()


def check_following(layout, there):
    """Each local row finds the row of its sequence's next token, or −1; what lies between tokens is not touched."""
    numbers = layout.scatter(torch.where(there, batch(), 0), 0)
    x = torch.where(numbers > 0, numbers, torch.nan)[..., None] * torch.tensor([1.0, -2.0])
    rows, index = layout.following(x)
    followed = torch.nn.functional.pad(there[:, 1:], (0, 1)) & there
    want = layout.scatter(torch.where(followed, batch() + 1, -1), -1)
    assert torch.equal(index < 0, want < 0)
    found = rows.flatten(0, -2)[index[index >= 0]]
    assert torch.equal(found, want[want >= 0][:, None] * torch.tensor([1.0, -2.0]))
    return rows, x


@pytest.mark.parametrize("packed", [False, True])
def test_the_values_of_the_next_token(packed):
    if packed:
        layout, there = TokenLayout.packed(*boundaries(LENGTHS, 4), WIDTH, 24, None), present()
    else:
        layout, there = TokenLayout.padded((4, WIDTH), 10, None, torch.device("cpu")), torch.ones(4, WIDTH) > 0
    rows, x = check_following(layout, there)
    assert rows.data_ptr() == x.data_ptr(), "one rank has every row: nothing is copied"


def _cut(packed):
    """This rank's row as the zigzag of each sequence says, what gathers to the batch, and its gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    cu, padded = boundaries(LENGTHS, 2 * size)
    if packed:
        layout = TokenLayout.packed(cu, padded, WIDTH, int(padded[-1]) // size, group)
        starts, spans = padded[:-1].tolist(), padded.diff().tolist()
    else:
        layout = TokenLayout.padded((4, WIDTH), 12 // size, group, torch.device("cpu"))
        starts, spans = [12 * row for row in range(4)], [12] * 4
    flat = torch.zeros(sum(spans), dtype=torch.long)
    for row, (start, length) in enumerate(zip(starts, LENGTHS if packed else [WIDTH] * 4, strict=True)):
        flat[start : start + length] = batch()[row, :length]
    mine = [flat[start + zigzag_positions(span, rank, size)] for start, span in zip(starts, spans, strict=True) if span]
    local = layout.scatter(batch(), 0)
    assert torch.equal(local.flatten(), torch.cat(mine))

    there = present() if packed else torch.ones(4, WIDTH, dtype=torch.bool)
    x = local.double().requires_grad_()
    whole = layout.gather(x)
    assert torch.equal(whole, torch.where(there, batch(), 0).double())
    weight = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weight * whole).sum(), x)  # the same loss on every rank: it counts once
    assert torch.equal(gradient, layout.scatter(torch.where(there, weight, 0.0), 0.0))
    check_following(layout, there)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_cut_over_ranks(ranks, world_size, packed):
    ranks.run(world_size, _cut, packed)
