"""Training of a draft model on shards: with its policy, padded or packed, and in the aligned form.

The draft has a vocabulary of its own, or the policy's.
"""

import math

import pytest
import torch
import torch.distributed as dist

from rl_megatron.losses import DraftCrossEntropyLossFn, DraftLossWrapper, SequencePackingLossWrapper, build_loss
from tests.contract.loss_cases import VOCAB, policy_batch
from tests.parallel.test_losses import shard as shard_padded
from tests.parallel.test_packing import PADDED_VOCAB, SHAPE, shard

# The policy's 13 ids are padded to 14 columns. The draft has 5 of these ids, from both shards, padded to 6 columns.
IDS = torch.tensor([8, 1, 12, 0, 5])
D2T = IDS - torch.arange(5)
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


def make():
    """Return (logits of the policy, logits of the draft, batch, counts) of six sequences with SHAPE's lengths."""
    generator = torch.Generator().manual_seed(3)
    batch = policy_batch(generator)
    batch = {key: value if value.dim() == 1 else torch.cat([value, value[:, :3]], 1) for key, value in batch.items()}
    batch["token_mask"] *= torch.arange(SHAPE.width) < torch.tensor(SHAPE.lengths)[:, None]
    policy = torch.randn(6, SHAPE.width, PADDED_VOCAB, generator=generator, dtype=torch.float64)
    draft = torch.randn(6, SHAPE.width, 6, generator=generator, dtype=torch.float64)
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    assert mask.sum() > 8
    return policy, draft, batch, (batch["sample_mask"].sum(), mask.sum())


def both(loss, policy, draft, batch, counts, *groups):
    """Return (value, metrics, gradients); the logits of each model are a buffer that its gradient overwrites."""
    policy, draft = (x.clone().requires_grad_() * 1 for x in (policy, draft))
    value, metrics = loss(policy, {**batch, "student_logits": draft}, *counts, *groups, valid_vocab_size=VOCAB)
    return value.item(), metrics, torch.autograd.grad(value, (policy, draft))


def composed():
    """Return a policy loss together with the draft's loss."""
    return DraftLossWrapper(build_loss("clipped_pg", {"entropy_coeff": 0.1}), 0.3, d2t=D2T)


def together(tp_size, packed):
    """Compute the policy's and the draft's loss on this rank's shards."""
    cp_size = dist.get_world_size() // tp_size
    cp_rank, tp_rank = divmod(dist.get_rank(), tp_size)
    tp_groups = [dist.new_group(list(range(c * tp_size, (c + 1) * tp_size))) for c in range(cp_size)]
    cp_groups = [dist.new_group(list(range(t, cp_size * tp_size, tp_size))) for t in range(tp_size)]
    policy, draft, batch, counts = make()
    policy, draft = (cut(x, packed, cp_rank, cp_size, tp_rank, tp_size) for x in (policy, draft))
    loss = SequencePackingLossWrapper(composed(), *SHAPE.cu_seqlens) if packed else composed()
    return both(loss, policy, draft, batch, counts, tp_rank, tp_groups[cp_rank], cp_groups[tp_rank])


def cut(x, packed, *place, fill=math.nan):
    """Return a rank's part, either packed or with each sequence padded to 12 positions."""
    if packed:
        return shard(x, fill, *place)
    return shard_padded(torch.nn.functional.pad(x, (0, 0, 0, 12 - x.size(1)), value=fill), *place)


@pytest.mark.parametrize(
    ("tp_size", "cp_size", "packed"),
    [(2, 1, False), (1, 2, False), (1, 3, False), (2, 2, False), (2, 1, True), (1, 2, True), (2, 2, True)],
)
def test_policy_and_draft_sharded_equal_one_process(ranks, tp_size, cp_size, packed):
    want_value, want_metrics, want_gradients = both(composed(), *make())
    for rank, (value, metrics, gradients) in enumerate(ranks.run(tp_size * cp_size, together, tp_size, packed)):
        cp_rank, tp_rank = divmod(rank, tp_size)
        assert value == pytest.approx(want_value, rel=1e-12)
        assert metrics == pytest.approx(want_metrics, rel=1e-12, abs=1e-13)
        for got, want in zip(gradients, want_gradients, strict=True):
            expected = cut(want, packed, cp_rank, cp_size, tp_rank, tp_size, fill=0.0)
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)
            assert want.abs().max() > 1e-4


def aligned(student, teacher, batch, mask, group, in_constructor, **options):
    student = student.clone().requires_grad_()
    loss = DraftCrossEntropyLossFn(**options, **({"vocab_parallel_group": group} if in_constructor else {}))
    value, _ = loss(
        data=batch, global_valid_seqs=1, global_valid_toks=10, teacher_logits=teacher, student_logits=student,
        mask=mask, valid_vocab_size=VOCAB, **({} if in_constructor else {"vocab_parallel_group": group}),
    )  # fmt: skip
    return value.item(), torch.autograd.grad(value, student)[0]


def aligned_shards(in_constructor, own_vocabulary):
    """Check this rank's loss and gradient against those of whole logits."""
    policy, draft, batch, _ = make()
    options = {"d2t": D2T} if own_vocabulary else {}
    student = draft if own_vocabulary else policy.flip(0)
    want, want_gradient = aligned(student, policy, batch, batch["token_mask"], None, in_constructor, **options)
    rank, size = dist.get_rank(), dist.get_world_size()
    student, policy, want_gradient = (x.chunk(size, dim=-1)[rank] for x in (student, policy, want_gradient))
    got, gradient = aligned(student, policy, batch, batch["token_mask"], dist.group.WORLD, in_constructor, **options)
    assert got == pytest.approx(want, rel=1e-12) and want > 0.1
    torch.testing.assert_close(gradient, want_gradient, **TOLERANCE)


@pytest.mark.parametrize("own_vocabulary", [False, True])
@pytest.mark.parametrize("in_constructor", [False, True])
def test_the_aligned_form_over_vocabulary_shards(ranks, in_constructor, own_vocabulary):
    ranks.run(2, aligned_shards, in_constructor, own_vocabulary)
