"""The logits form on sharded logits equals one process: value, metrics and gradient, for every case of the table."""

import pytest
import torch
import torch.distributed as dist

from rl_megatron.losses import build_loss
from rl_megatron.topology.context_parallel import zigzag_shard
from tests.contract.loss_cases import CASES, VOCAB


def make(case):
    """Vocabulary padded to an even size: padding must stay without effect through the loss as well."""
    generator = torch.Generator().manual_seed(5)
    batch = case.make_batch(generator)
    logits = torch.randn(*batch["input_ids"].shape, VOCAB + 1, generator=generator, dtype=torch.float64)
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return batch, logits, (batch["sample_mask"].sum(), mask.sum())


def whole(case):
    batch, logits, counts = make(case)
    logits.requires_grad_()
    value, metrics = build_loss(case.name, case.cfg)(logits, batch, *counts, valid_vocab_size=VOCAB)
    return value.item(), metrics, torch.autograd.grad(value, logits)[0]


def sharded_cases(tp_size):
    """Every case on this rank's slice, in one visit to the pool. Ranks are TP-major inside CP."""
    cp_size = dist.get_world_size() // tp_size
    cp_rank, tp_rank = divmod(dist.get_rank(), tp_size)
    tp_groups = [dist.new_group(list(range(c * tp_size, (c + 1) * tp_size))) for c in range(cp_size)]
    cp_groups = [dist.new_group(list(range(t, cp_size * tp_size, tp_size))) for t in range(tp_size)]
    results = []
    for case in CASES:
        batch, logits, counts = make(case)
        mine = zigzag_shard(logits, cp_rank, cp_size, 1).chunk(tp_size, dim=-1)[tp_rank].clone().requires_grad_()
        value, metrics = build_loss(case.name, case.cfg)(
            mine, batch, *counts, vocab_parallel_rank=tp_rank, vocab_parallel_group=tp_groups[cp_rank],
            context_parallel_group=cp_groups[tp_rank], valid_vocab_size=VOCAB,
        )  # fmt: skip
        results.append((value.item(), metrics, torch.autograd.grad(value, mine)[0]))
    return results


@pytest.mark.parametrize(("tp_size", "cp_size"), [(2, 1), (1, 2), (2, 2)])
def test_sharded_logits_equal_one_process(ranks, tp_size, cp_size):
    per_rank = ranks.run(tp_size * cp_size, sharded_cases, tp_size)
    for index, case in enumerate(CASES):
        want_value, want_metrics, want_gradient = whole(case)
        for rank, results in enumerate(per_rank):
            cp_rank, tp_rank = divmod(rank, tp_size)
            value, metrics, gradient = results[index]
            assert value == pytest.approx(want_value, rel=1e-12), case
            assert metrics == pytest.approx(want_metrics, rel=1e-12, abs=1e-13), case
            expected = zigzag_shard(want_gradient, cp_rank, cp_size, 1).chunk(tp_size, dim=-1)[tp_rank]
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def wrong_rank():
    case = CASES[0]
    batch, logits, counts = make(case)
    dist.barrier()  # nothing below communicates: without it one rank could leave while the other still connects
    with pytest.raises(ValueError, match=r"vocab_parallel_rank=7, but this process is rank \d"):
        build_loss(case.name)(logits, batch, *counts, vocab_parallel_rank=7, vocab_parallel_group=dist.group.WORLD)


def test_a_wrong_vocab_parallel_rank_is_named(ranks):
    ranks.run(2, wrong_rank)
