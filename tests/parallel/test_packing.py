"""Packed and sharded sequences give what padded ones give in one process: value, metrics and gradient of every loss.

Distillation over the whole vocabulary is compared with TRL's own code too.
"""

import math

import pytest
import torch
import torch.distributed as dist

from rl_megatron.losses import SequencePackingLossWrapper, build_loss
from tests.contract.loss_cases import VOCAB
from tests.contract.packing import PACKABLE, Shape, random_batch
from tests.zigzag import zigzag_shard

PADDED_VOCAB = VOCAB + 1
# There are an empty sequence, one of one token and one that fills its padded length. Padded lengths are multiples of
# 2·cp for cp up to 2.
SHAPE = Shape((7, 2, 0, 8, 1, 10), width=11, multiple=4, slack=4)


def make(case):
    batch, output = random_batch(case, SHAPE, torch.Generator().manual_seed(29), PADDED_VOCAB)
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return batch, output, (batch["sample_mask"].sum(), mask.sum())


def whole(case):
    batch, output, counts = make(case)
    output.requires_grad_()
    value, metrics = build_loss(case.name, case.cfg)(output, batch, *counts, valid_vocab_size=VOCAB)
    return value.item(), metrics, torch.autograd.grad(value, output)[0]


def by_trl(case):
    """Return the value and the gradient of a distillation loss from TRL's GKD and whole logits."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer  # ranks do without it

    batch, output, (_, num_tokens) = make(case)
    output.requires_grad_()
    cfg = build_loss(case.name, case.cfg).cfg
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    labels = torch.where(mask != 0, batch["input_ids"][:, 1:], -100)
    temperature = batch["temperature"][:, None, None] if "temperature" in batch else 1.0
    student, teacher = (x[:, :-1, :VOCAB] / temperature for x in (output, batch["teacher_logits"]))
    forward = cfg.mixed_kl_weight if cfg.kl_type == "mixed" else float(cfg.kl_type == "forward")
    by_beta = {cfg.jsd_beta: 1.0} if cfg.kl_type == "jensen_shannon" else {0: forward, 1: 1 - forward}
    divergence = sum(
        weight * GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, num_items_in_batch=num_tokens)
        for beta, weight in by_beta.items()
    )
    nll = torch.nn.functional.cross_entropy(student.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
    value = (1 - cfg.nll_weight) * divergence + cfg.nll_weight * nll
    return value.item(), torch.autograd.grad(value, output)[0]


def shard(x, fill, cp_rank, cp_size, tp_rank, tp_size):
    """Return a rank's part of a package: sequences with padding are cut zigzag over CP, logits' vocabulary over TP."""
    starts = SHAPE.cu_seqlens[1].tolist()
    packed = SHAPE.pack(x, fill)
    parts = [packed[:, start:stop] for start, stop in zip(starts, [*starts[1:], packed.size(1)], strict=True)]
    cut = torch.cat([zigzag_shard(part, cp_rank, cp_size, 1) for part in parts], dim=1)
    return cut.chunk(tp_size, dim=-1)[tp_rank] if x.dim() == 3 else cut


def sharded_cases(tp_size):
    """Compute every case on this rank's part, in one call of the pool. Tensor-parallel ranks are contiguous."""
    cp_size = dist.get_world_size() // tp_size
    cp_rank, tp_rank = divmod(dist.get_rank(), tp_size)
    tp_groups = [dist.new_group(list(range(c * tp_size, (c + 1) * tp_size))) for c in range(cp_size)]
    cp_groups = [dist.new_group(list(range(t, cp_size * tp_size, tp_size))) for t in range(tp_size)]
    results = []
    for case in PACKABLE:
        batch, output, counts = make(case)
        part = shard(output, math.nan, cp_rank, cp_size, tp_rank, tp_size).clone().requires_grad_()
        for key in case.outputs_in_batch:
            batch[key] = shard(batch[key], math.nan, cp_rank, cp_size, tp_rank, tp_size)
        loss = SequencePackingLossWrapper(build_loss(case.name, case.cfg), *SHAPE.cu_seqlens)
        value, metrics = loss(
            part, batch, *counts, tp_rank, tp_groups[cp_rank], cp_groups[tp_rank], valid_vocab_size=VOCAB
        )
        results.append((value.item(), metrics, torch.autograd.grad(value, part)[0]))
    return results


@pytest.mark.parametrize(("tp_size", "cp_size"), [(2, 1), (1, 2), (2, 2)])
def test_packed_shards_equal_one_process(ranks, tp_size, cp_size):
    per_rank = ranks.run(tp_size * cp_size, sharded_cases, tp_size)
    for case, results in zip(PACKABLE, zip(*per_rank, strict=True), strict=True):
        want_value, want_metrics, want_gradient = whole(case)
        assert want_value != 0 and want_gradient.abs().max() > 1e-4, f"{case}: too small to compare; use another seed"
        if case.name == "full_distillation":
            value, gradient = by_trl(case)
            assert want_value == pytest.approx(value, rel=1e-12), case
            torch.testing.assert_close(want_gradient, gradient, rtol=1e-10, atol=1e-14)
        for rank, (value, metrics, gradient) in enumerate(results):
            cp_rank, tp_rank = divmod(rank, tp_size)
            assert value == pytest.approx(want_value, rel=1e-12), case
            assert metrics == pytest.approx(want_metrics, rel=1e-12, abs=1e-13), case
            expected = shard(want_gradient, 0.0, cp_rank, cp_size, tp_rank, tp_size)
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def padded_lengths_that_cannot_be_cut():
    case = next(case for case in PACKABLE if case.name == "nll")
    shape = Shape((3, 5), 5, multiple=3)  # padded lengths of 3 and 6
    batch, output = random_batch(case, shape, torch.Generator().manual_seed(0))
    loss = SequencePackingLossWrapper(build_loss("nll"), *shape.cu_seqlens)
    dist.barrier()  # nothing below communicates: otherwise one rank could leave while the other still connects
    with pytest.raises(ValueError, match=r"\[0, 3, 9\]: over 2 context parallel ranks .* a multiple of 4"):
        loss(torch.zeros(1, 5, VOCAB), batch, 1, 1, context_parallel_group=dist.group.WORLD)


def test_padded_lengths_that_cannot_be_cut_are_refused(ranks):
    ranks.run(2, padded_lengths_that_cannot_be_cut)
