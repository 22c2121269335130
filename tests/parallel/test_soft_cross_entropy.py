"""Soft cross-entropy and KL over vocabulary shards equal those of whole logits; columns of a smaller vocabulary."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.logprobs import vocab_parallel_kl, vocab_parallel_soft_cross_entropy, vocab_subset
from rl_megatron.topology.collectives import ALL_GATHER, REDUCE_SCATTER

ROWS = 19
COLLECTIVES = ("all_gather", "all_reduce", ALL_GATHER, REDUCE_SCATTER, "broadcast", "all_to_all")


def make_case(vocab, dtype, valid):
    generator = torch.Generator().manual_seed(vocab)
    student, teacher = (3 * torch.randn(2, ROWS, vocab, generator=generator)).to(dtype)
    student[1, : vocab // 2] = teacher[1, : vocab // 2] = -torch.inf  # whole shards are −inf: of both models,
    student[2, : vocab // 2] = -torch.inf  # of the student where the teacher has probability,
    teacher[3, vocab // 2 :] = -torch.inf  # or of the teacher
    student[4], teacher[5] = -torch.inf, -torch.inf
    # The teacher's probability rounds to 0 here, although its logits are finite and these may be all of a shard.
    student[6, : vocab // 2], teacher[6, : vocab // 2] = -torch.inf, -2000.0
    student[:, valid:], teacher[:, valid:] = 50.0, torch.nan
    rows = torch.arange(ROWS)
    rows[7], rows[8] = -1, 9
    student[7] = torch.nan
    return student, teacher, rows, torch.randn(ROWS, generator=generator)


OPERATORS = {
    "cross_entropy": vocab_parallel_soft_cross_entropy,
    "forward": partial(vocab_parallel_kl, direction="forward", temperature=torch.linspace(0.6, 1.5, ROWS)),
    "reverse": partial(vocab_parallel_kl, direction="reverse", temperature=torch.linspace(0.6, 1.5, ROWS)),
}


def run(operator, student, teacher, rows, upstream, group, valid):
    """Return the operator's value, its gradient, and the numbers of collectives of the forward and of both passes."""
    buffer, counts = student.clone().requires_grad_() * 1, []
    with mock.patch.multiple(dist, **{name: mock.Mock(side_effect=getattr(dist, name)) for name in COLLECTIVES}):
        value = OPERATORS[operator](buffer, teacher, group, teacher_rows=rows, valid_vocab_size=valid)
        counts.append({name: getattr(dist, name).call_count for name in COLLECTIVES})
        (gradient,) = torch.autograd.grad(value, buffer, upstream)
        counts.append({name: getattr(dist, name).call_count for name in COLLECTIVES})
    assert gradient.data_ptr() == buffer.data_ptr()
    return value.detach(), gradient, counts


def sharded(operator, vocab, dtype, valid):
    student, teacher, rows, upstream = make_case(vocab, dtype, valid)
    student, teacher = (x.chunk(dist.get_world_size(), dim=1)[dist.get_rank()] for x in (student, teacher))
    return run(operator, student, teacher.contiguous(), rows, upstream, dist.group.WORLD, valid)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("size", "vocab", "dtype", "valid"),
    [
        (1, 1000, torch.float32, 1000),
        (2, 1000, torch.float32, 1000),
        (4, 1000, torch.float32, 1000),
        (4, 1000, torch.float64, 745),  # the last rank holds only padding, the third some
        (2, 1024, torch.bfloat16, 1000),
        (4, 12, torch.float32, 11),
    ],
)
def test_shards_equal_the_whole(ranks, operator, size, vocab, dtype, valid):
    want, want_gradient, _ = run(operator, *make_case(vocab, dtype, valid), None, valid)
    infinite = [3, 4] if operator == "reverse" else [2, 4]
    assert torch.isfinite(want).sum() == ROWS - len(infinite) and want[infinite].isinf().all()
    results = ranks.run(size, sharded, operator, vocab, dtype, valid)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for value, _, (forward, both) in results:
        assert torch.equal(value, results[0][0]), "the ranks' results differ"
        torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance)
        assert {name: calls for name, calls in forward.items() if calls} == ({ALL_GATHER: 1} if size > 1 else {})
        assert both == forward
    gradient = torch.cat([part for _, part, _ in results], dim=1)
    ulp = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(gradient, want_gradient, rtol=ulp, atol=tolerance * (5 if operator == "reverse" else 1))
    assert (gradient[[4, 5, 7]] == 0).all() and (gradient[:, valid:] == 0).all()


def subset(ids, num_local, valid):
    """Check this rank's columns of a smaller vocabulary."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = torch.randn(3, 5, 8 * size, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    whole = torch.nn.functional.pad(logits[..., ids], (0, size * num_local - len(ids)))
    got = vocab_subset(logits.chunk(size, dim=-1)[rank], ids, num_local, dist.group.WORLD, valid_vocab_size=valid)
    assert torch.equal(got, whole.chunk(size, dim=-1)[rank])


@pytest.mark.parametrize(
    ("size", "ids", "num_local"),
    [
        (2, [0, 1, 8, 9], 2),
        (2, [15, 3, 9, 8, 2, 0], 4),  # out of order, with padding
        (2, [1, 2, 3, 0], 2),  # all from one rank
        (4, [30, 4, 12, 20, 5], 2),  # the last rank needs no column
        (4, list(range(30))[::-1], 8),
    ],
)
def test_columns_come_from_the_shards_that_hold_them(ranks, size, ids, num_local):
    ranks.run(size, subset, torch.tensor(ids), num_local, max(ids) + 1)
