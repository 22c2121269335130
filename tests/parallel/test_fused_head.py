"""Policies with `train.fused_head` and `optimizer.overlap`: behaviour that the grid does not test."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from rl_megatron import log
from rl_megatron.batching.config import Batching
from rl_megatron.certify.workload import SMALL_FUSED_HEAD, build_batch_of_all_kinds
from rl_megatron.config.errors import ConfigError
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.logprobs import token_blocks
from rl_megatron.losses import ClippedPGLossFn, NLLLoss
from rl_megatron.model.build import unwrap
from rl_megatron.training import optimizer as optimizer_module
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, MODEL, OPTIMIZER, VOCAB_SIZE, build_policy, weights

OVERLAPPED = replace(DISTRIBUTED_OPTIMIZER, overlap=True)


class OwnCall(NLLLoss):
    """A loss that reads the logits in its own `__call__`."""

    def __call__(self, output, *args, **kwargs):
        assert output.dim() == 3
        return super().__call__(output, *args, **kwargs)


def without_whole_logits(parallel):
    """Train and compute logprobs while the head's `forward` raises; then restore it and generate, which needs it."""
    policy = build_policy(parallel, fused_head=SMALL_FUSED_HEAD)
    batch = build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    head = unwrap(policy.model.model_chunks[-1]).output_layer
    own_class = type(head)
    head.__class__ = type("Forbidden", (own_class,), {"forward": mock.Mock(side_effect=AssertionError("whole logits"))})
    policy.train(batch, ClippedPGLossFn({}), gbs=12)
    policy.get_logprobs(batch)
    head.__class__ = own_class
    assert "forward" not in vars(head)
    rollouts = generate(EmbeddedEngine(policy), [[1, 2, 3]], Sampling(4, 1.0, 0, 1.0, ()), seed=0)
    found = policy.get_logprobs(rollouts)["logprobs"]
    torch.testing.assert_close(found * rollouts["token_mask"], rollouts["generation_logprobs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "parallel"), [(1, {}), (2, {"tensor": 2, "sequence": True})], ids=["one", "tp2-sp"])
def test_whole_logits_never_exist(ranks, size, parallel):
    ranks.run(size, without_whole_logits, parallel)


def reading_whole_logits():
    """Train with a loss that reads whole logits; check the warning, and that the fused head changes no number."""
    batch, messages = build_batch_of_all_kinds(VOCAB_SIZE, seed=1), []
    with mock.patch.object(log.LOGGER, "warning", messages.append):
        fused = build_policy({}, fused_head=SMALL_FUSED_HEAD)
        reports = [policy.train(batch, OwnCall(), gbs=12) for policy in (fused, fused, build_policy({}))]
    assert reports[0] == reports[2]
    assert [message for message in messages if "OwnCall" in message] == [
        "OwnCall needs whole logits, so the fused head is off for this loss"
    ]


def test_a_loss_with_its_own_call_gets_whole_logits_and_one_warning(ranks):
    ranks.run(1, reading_whole_logits)


class LayoutOfLogits(NLLLoss):
    """Records whether the memory of the logits [B, S, V] is that of the head's output, [S, B, V]."""

    reads = "logprobs"

    def read_output(self, output, data, sharding):
        self.as_made = output.size(0) > 1 and output.transpose(0, 1).is_contiguous()
        return super().read_output(output, data, sharding)


def layouts_of_logits():
    policy, batch, loss_fn = build_policy({}), build_batch_of_all_kinds(VOCAB_SIZE, seed=1), LayoutOfLogits()
    policy.train(batch, loss_fn, gbs=12)
    assert "forward" not in vars(unwrap(policy.model.model_chunks[-1]).output_layer)
    return loss_fn.as_made


def test_whole_logits_are_not_copied_before_the_loss_reads_them(ranks):
    assert ranks.run(1, layouts_of_logits) == [True]


def refused_load(directory):
    """Return the weights after a step that leaves them scattered and a checkpoint that cannot be loaded."""
    policy = build_policy({}, MODEL, OVERLAPPED)
    policy.train(build_batch_of_all_kinds(VOCAB_SIZE, seed=1), NLLLoss(), gbs=12)
    with pytest.raises(ConfigError):
        policy.load_checkpoint(directory)
    return {name: weight.detach().clone() for name, weight in unwrap(policy.model.model_chunks[0]).named_parameters()}


def test_after_a_refused_checkpoint_all_ranks_have_the_same_weights(ranks, tmp_path):
    one, other = ranks.run(2, refused_load, str(tmp_path / "nowhere"))
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


def two_steps_in_small_buckets(*arguments):
    small = partial(DistributedDataParallelConfig, bucket_size=2000)
    with mock.patch.object(optimizer_module, "DistributedDataParallelConfig", small):
        return two_steps(*arguments)


def two_steps(parallel, optimizer, fused_head, precision):
    """Return the losses of two steps, and the logprobs and the weights after them."""
    policy = build_policy(parallel, MODEL, optimizer, precision=precision, fused_head=fused_head)
    batch = build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    reports = [policy.train(batch, NLLLoss(), gbs=6) for _ in range(2)]
    logprobs = policy.get_logprobs(batch)["logprobs"]
    return [report["loss"] for report in reports], logprobs, weights(policy)


@pytest.mark.parametrize("fused_head", [None, SMALL_FUSED_HEAD], ids=["whole", "fused"])
@pytest.mark.parametrize("optimizer", [OVERLAPPED, replace(OPTIMIZER, overlap=True)], ids=["distributed", "plain"])
def test_overlapped_gathers_and_sums_change_nothing(ranks, optimizer, fused_head):
    losses, logprobs, after = ranks.reference(two_steps, {}, OPTIMIZER, None, "fp32")
    found = ranks.run(4, two_steps_in_small_buckets, {"tensor": 2}, optimizer, fused_head, "fp32")[0]
    assert found[0] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(found[1], logprobs, rtol=1e-5, atol=1e-5)
    for name, weight in after.items():
        torch.testing.assert_close(found[2][name], weight, rtol=1e-4, atol=1e-5)


def test_the_fused_head_in_bf16_is_as_close_to_fp32_as_whole_logits(ranks):
    _, exact, _ = ranks.reference(two_steps, {}, OPTIMIZER, None, "fp32")
    whole, fused = (
        ranks.run(2, two_steps, {"tensor": 2}, OPTIMIZER, fused_head, "bf16")[0][1]
        for fused_head in (None, SMALL_FUSED_HEAD)
    )
    assert (fused - exact).abs().mean() <= 1.2 * (whole - exact).abs().mean()


def counts_of_blocks(parallel, batching):
    """Return (the number of tokens that the host counted, the largest true number) of each call of the fused head."""
    found, from_counts = [], token_blocks.BlockPlan.from_counts

    def recorded(counts, shards, block_tokens, most_counted=None):
        found.append((most_counted, int(counts.view(shards, -1).sum(dim=1).max())))
        return from_counts(counts, shards, block_tokens, most_counted)

    policy = build_policy(parallel, fused_head=SMALL_FUSED_HEAD, batching=batching)
    batch = build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    with mock.patch.object(token_blocks.BlockPlan, "from_counts", recorded):
        policy.train(batch, ClippedPGLossFn({}), gbs=12)
        policy.get_logprobs(batch)
    return found


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize(
    ("size", "parallel"),
    [(1, {}), (2, {"tensor": 2, "sequence": True}), (4, {"tensor": 2, "sequence": True, "context": 2})],
    ids=["one", "tp2-sp", "tp2-sp-cp2"],
)
def test_the_host_counts_the_tokens_of_the_fused_head(ranks, size, parallel, kind):
    """Otherwise the host would wait for the device in every microbatch."""
    for found in ranks.run(size, counts_of_blocks, parallel, Batching(kind, sequences=4, tokens=80)):
        assert len(found) > 2 and all(counted == wanted for counted, wanted in found)
