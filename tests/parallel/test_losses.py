"""Losses of sharded model outputs equal those of one process: value, metrics and gradient, for every case."""

import pytest
import torch
import torch.distributed as dist

from rl_megatron.losses import build_loss
from tests.contract.loss_cases import CASES, VOCAB
from tests.zigzag import zigzag_shard

# The vocabulary is padded to an even size; the padding must not change the loss.
PADDED_VOCAB = VOCAB + 1


def make(case):
    generator = torch.Generator().manual_seed(5)
    batch = case.make_batch(generator)
    output = case.make_output(generator, batch, PADDED_VOCAB)
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return batch, output, (batch["sample_mask"].sum(), mask.sum())


def shard(output, cp_rank, cp_size, tp_rank, tp_size):
    """Return a rank's part of logits or scores.

    Positions are cut zigzag over CP, and the vocabulary of logits over TP. Every TP rank has all scores.
    """
    part = zigzag_shard(output, cp_rank, cp_size, 1)
    return part.chunk(tp_size, dim=-1)[tp_rank] if output.dim() == 3 else part


def whole(case):
    batch, output, counts = make(case)
    output.requires_grad_()
    value, metrics = build_loss(case.name, case.cfg)(output, batch, *counts, valid_vocab_size=VOCAB)
    return value.item(), metrics, torch.autograd.grad(value, output)[0]


def sharded_cases(tp_size, cases):
    """Compute every case on this rank's part, in one call of the pool. Tensor-parallel ranks are contiguous."""
    cp_size = dist.get_world_size() // tp_size
    cp_rank, tp_rank = divmod(dist.get_rank(), tp_size)
    tp_groups = [dist.new_group(list(range(c * tp_size, (c + 1) * tp_size))) for c in range(cp_size)]
    cp_groups = [dist.new_group(list(range(t, cp_size * tp_size, tp_size))) for t in range(tp_size)]
    results = []
    for case in (CASES[index] for index in cases):
        batch, output, counts = make(case)
        part = shard(output, cp_rank, cp_size, tp_rank, tp_size).clone().requires_grad_()
        batch |= {key: shard(batch[key], cp_rank, cp_size, tp_rank, tp_size) for key in case.outputs_in_batch}
        value, metrics = build_loss(case.name, case.cfg)(
            part, batch, *counts, vocab_parallel_rank=tp_rank, vocab_parallel_group=tp_groups[cp_rank],
            context_parallel_group=cp_groups[tp_rank], valid_vocab_size=VOCAB,
        )  # fmt: skip
        results.append((value.item(), metrics, torch.autograd.grad(value, part)[0]))
    return results


@pytest.mark.parametrize(("tp_size", "cp_size"), [(2, 1), (1, 2), (2, 2)])
def test_sharded_outputs_equal_one_process(ranks, tp_size, cp_size):
    # A case with one score per sequence has no positions to cut.
    cases = [index for index, case in enumerate(CASES) if make(case)[1].dim() > 1]
    assert {CASES[index].name for index in cases} == {case.name for case in CASES}
    per_rank = ranks.run(tp_size * cp_size, sharded_cases, tp_size, cases)
    for results in zip(*per_rank, strict=True):
        case = CASES[cases.pop(0)]
        want_value, want_metrics, want_gradient = whole(case)
        for rank, (value, metrics, gradient) in enumerate(results):
            cp_rank, tp_rank = divmod(rank, tp_size)
            assert value == pytest.approx(want_value, rel=1e-12), case
            assert metrics == pytest.approx(want_metrics, rel=1e-12, abs=1e-13), case
            expected = shard(want_gradient, cp_rank, cp_size, tp_rank, tp_size)
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def wrong_rank():
    case = CASES[0]
    batch, output, counts = make(case)
    dist.barrier()  # nothing below communicates: otherwise one rank could leave while the other still connects
    with pytest.raises(ValueError, match=r"vocab_parallel_rank=7, but this process is rank \d"):
        build_loss(case.name)(output, batch, *counts, vocab_parallel_rank=7, vocab_parallel_group=dist.group.WORLD)


def test_a_wrong_vocab_parallel_rank_is_refused(ranks):
    ranks.run(2, wrong_rank)
