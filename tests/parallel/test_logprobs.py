"""Logprobs and their gradients on shards equal those of whole logits: tensor parallel with shards of any width, and
zigzag context parallel."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.logprobs import Sharding, next_token_stats, vocab_parallel_logprobs
from rl_megatron.topology.collectives import ALL_GATHER, REDUCE_SCATTER
from tests.zigzag import zigzag_shard

ROWS = {"torch": 23, "triton": 9}  # Triton's interpreter is slow
IDS = 4
COLLECTIVES = ("all_gather", "all_reduce", ALL_GATHER, REDUCE_SCATTER, "broadcast", "all_to_all")


def make_case(vocab, dtype=torch.float32, valid=None, rows=ROWS["torch"]):
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    logits[4, : vocab // 2] = -torch.inf  # whole shards of −inf
    logits[5] = -torch.inf
    targets = torch.randint(vocab // 2, valid or vocab, (rows,), generator=generator)
    targets[7] = -100
    logits[7] = torch.nan
    ids = torch.randint(vocab // 2, valid or vocab, (rows, IDS), generator=generator)
    ids[:, 0] = targets.clamp(min=0)
    upstream = [torch.randn(shape, generator=generator) for shape in ((rows,), (rows,), (rows, IDS))]
    return logits, targets, ids, upstream


def bounds_of(vocab, size, kind):
    if kind == "even":
        return [vocab * r // size for r in range(size + 1)]
    if kind == "uneven":  # 1001 over 3: 334, 334, 333
        width = math.ceil(vocab / size)
        return [min(r * width, vocab) for r in range(size + 1)]
    return [0, *([vocab - 1] * (size - 1)), vocab]  # "lopsided": empty shards in the middle, one column at the end


def run_stats(logits, targets, ids, upstream, group=None, **options):
    """Return the outputs, this shard's gradient, and how many collectives the forward pass and both passes used."""
    buffer = logits.clone().requires_grad_() * 1
    counts = []
    with mock.patch.multiple(dist, **{name: mock.Mock(side_effect=getattr(dist, name)) for name in COLLECTIVES}):

        def count():
            counts.append({name: getattr(dist, name).call_count for name in COLLECTIVES})

        options |= {"entropy": True, "gather_ids": ids, "temperature": 0.8}
        stats = vocab_parallel_logprobs(buffer, targets, group, **options)
        count()
        outputs = [stats.logprobs, stats.entropy] + ([stats.gathered] if ids is not None else [])
        (gradient,) = torch.autograd.grad(outputs, buffer, upstream[: len(outputs)])
        count()
    assert gradient.data_ptr() == buffer.data_ptr()
    return [output.detach() for output in outputs], gradient, counts


def sharded_stats(vocab, kind, dtype, valid, backend):
    rank, size = dist.get_rank(), dist.get_world_size()
    logits, targets, ids, upstream = make_case(vocab, dtype, valid, ROWS[backend])
    bounds = bounds_of(vocab, size, kind)
    shard = logits[:, bounds[rank] : bounds[rank + 1]]
    vocab_range = None if kind == "even" else (bounds[rank], bounds[rank + 1])
    options = {"vocab_range": vocab_range, "valid_vocab_size": valid, "backend": backend}
    return run_stats(shard, targets, ids, upstream, dist.group.WORLD, **options)


@pytest.mark.parametrize(
    ("size", "vocab", "kind", "dtype", "valid"),
    [
        (1, 1000, "even", torch.float32, None),
        (2, 1000, "even", torch.float32, None),
        (4, 1000, "even", torch.float32, None),
        (3, 1001, "uneven", torch.float32, None),
        (4, 1001, "uneven", torch.bfloat16, None),
        (4, 97, "lopsided", torch.float32, None),
        (4, 1000, "even", torch.float32, 745),  # the last rank holds only padding, the third some
        (2, 1024, "even", torch.bfloat16, 1000),
    ],
)
def test_shards_equal_the_whole(ranks, size, vocab, kind, dtype, valid, backend):
    logits, targets, ids, upstream = make_case(vocab, dtype, valid, ROWS[backend])
    want, want_gradient, _ = run_stats(logits, targets, ids, upstream, valid_vocab_size=valid, backend=backend)
    results = ranks.run(size, sharded_stats, vocab, kind, dtype, valid, backend)
    for outputs, _, _ in results:
        for got, first, expected in zip(outputs, results[0][0], want, strict=True):
            assert torch.equal(got, first), "the ranks' results differ"
            torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
    gradient = torch.cat([shard for _, shard, _ in results], dim=1)
    ulp = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(gradient, want_gradient, rtol=ulp, atol=2e-6)
    assert (gradient[[5, 7]] == 0).all()  # the all −inf row and the ignored NaN row
    if valid is not None:
        assert (gradient[:, valid:] == 0).all()


def count_collectives(gather):
    logits, targets, ids, upstream = make_case(100)
    shard = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    _, _, counts = run_stats(shard, targets, ids if gather else None, upstream, dist.group.WORLD)
    return counts


@pytest.mark.parametrize(("size", "gather", "expected"), [
    (2, False, {ALL_GATHER: 1}), (2, True, {ALL_GATHER: 1, "all_reduce": 1}), (1, True, {}),
])  # fmt: skip
def test_the_forward_pass_needs_one_collective_and_the_backward_pass_none(ranks, size, gather, expected):
    for forward, both in ranks.run(size, count_collectives, gather):
        assert {name: calls for name, calls in forward.items() if calls} == expected
        assert both == forward


def shard_edges(backend):
    """Check the logprobs of targets in the first and the last column of each shard."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 9, 10, 19, 20, 29])
    got = vocab_parallel_logprobs(logits.chunk(size, dim=1)[rank], targets, dist.group.WORLD, backend=backend).logprobs
    torch.testing.assert_close(got, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])


def test_targets_at_the_edges_of_shards(ranks, backend):
    ranks.run(3, shard_edges, backend)


def bad_target(target, valid):
    logits = torch.zeros(3, 10)
    with pytest.raises(ValueError, match=rf"id {target} .* \[0, {valid or 20}\)"):
        vocab_parallel_logprobs(logits, torch.tensor([0, target, 5]), dist.group.WORLD, valid_vocab_size=valid)


@pytest.mark.parametrize(("target", "valid"), [(20, None), (-1, None), (17, 17)])
def test_a_target_that_no_shard_holds_raises_on_every_rank(ranks, target, valid):
    ranks.run(2, bad_target, target, valid)


def bad_tiling():
    start = 9 * dist.get_rank()
    logits, targets = torch.zeros(3, 10), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"must tile .*\[\[0, 10\], \[9, 19\]\]"):
        vocab_parallel_logprobs(logits, targets, dist.group.WORLD, vocab_range=(start, start + 10))


def test_shards_that_overlap_raise(ranks):
    ranks.run(2, bad_tiling)


# Context parallelism


def make_sequences(length):
    generator = torch.Generator().manual_seed(length)
    logits = torch.randn(3, length, 20, generator=generator)
    input_ids = torch.randint(20, (3, length), generator=generator)
    mask = (torch.rand(3, length, generator=generator) > 0.3).float()
    temperature = 0.5 + torch.rand(3, length, generator=generator)
    upstream = [torch.randn(3, length - 1, generator=generator) for _ in range(2)]
    return logits, input_ids, mask, temperature, upstream


def next_token_shard(length, tp_size, use_mask):
    """Return the logprobs, the entropy and the gradient of this rank's shard.

    Tensor-parallel ranks are contiguous. A length that 2·cp does not divide is padded with NaN, which must not be used.
    """
    rank, cp_size = dist.get_rank(), dist.get_world_size() // tp_size
    cp_rank, tp_rank = divmod(rank, tp_size)
    tp_groups = [dist.new_group(list(range(c * tp_size, (c + 1) * tp_size))) for c in range(cp_size)]
    cp_groups = [dist.new_group(list(range(t, cp_size * tp_size, tp_size))) for t in range(tp_size)]
    logits, input_ids, mask, temperature, upstream = make_sequences(length)
    padding = -length % (2 * cp_size)
    padded = torch.nn.functional.pad(logits, (0, 0, 0, padding), value=math.nan)
    shard = zigzag_shard(padded, cp_rank, cp_size, 1).chunk(tp_size, dim=-1)[tp_rank].clone().requires_grad_()
    stats = next_token_stats(
        shard, input_ids, Sharding(tp_groups[cp_rank], cp_groups[tp_rank]), temperature=temperature, entropy=True,
        mask=mask if use_mask else None,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad([stats.logprobs, stats.entropy], shard, upstream)
    return stats.logprobs.detach(), stats.entropy.detach(), gradient


@pytest.mark.parametrize("use_mask", [False, True])
@pytest.mark.parametrize(
    ("length", "cp_size", "tp_size"), [(8, 2, 1), (12, 2, 2), (7, 2, 1), (1, 2, 1), (2, 2, 1), (16, 4, 1)]
)
def test_next_token_stats_over_context_parallel_ranks(ranks, length, cp_size, tp_size, use_mask):
    logits, input_ids, mask, temperature, upstream = make_sequences(length)
    whole = logits.clone().requires_grad_()
    log_p = (whole[:, :-1] / temperature[:, 1:, None]).log_softmax(-1)
    kept = mask[:, 1:] if use_mask else torch.ones(3, length - 1)
    want = [log_p.gather(-1, input_ids[:, 1:, None])[..., 0] * kept, -(log_p.exp() * log_p).sum(-1) * kept]
    (want_gradient,) = torch.autograd.grad(want, whole, upstream)
    want_gradient = torch.nn.functional.pad(want_gradient, (0, 0, 0, -length % (2 * cp_size)))

    results = ranks.run(cp_size * tp_size, next_token_shard, length, tp_size, use_mask)
    for rank, (logprobs, entropy, gradient) in enumerate(results):
        cp_rank, tp_rank = divmod(rank, tp_size)
        torch.testing.assert_close(logprobs, want[0].detach(), rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(entropy, want[1].detach(), rtol=1e-5, atol=2e-6)
        expected = zigzag_shard(want_gradient, cp_rank, cp_size, 1).chunk(tp_size, dim=-1)[tp_rank]
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=2e-6)
