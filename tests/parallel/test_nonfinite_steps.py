"""An optimizer step whose loss or gradient is not finite changes nothing on any rank, and training goes on after it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch.distributed as dist

from rl_megatron.checkpoint.training_state import TrainingState
from rl_megatron.losses import NLLLoss
from rl_megatron.training.metrics import NonFiniteLoss
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, OPTIMIZER, build_policy
from tests.parallel.test_layouts import random_batch

OVERLAP = dataclasses.replace(DISTRIBUTED_OPTIMIZER, overlap=True)
ALLOWED = 2


class NaNLossHere(NLLLoss):
    """A loss that is NaN for every batch."""

    def evaluate(self, *args, **inputs):
        loss, metrics = super().evaluate(*args, **inputs)
        return loss * math.nan, metrics


class GradientsOfRank1:
    """While it is entered, one weight's gradient is `factor` times too large on rank 1 alone."""

    def __init__(self, policy, factor: float):
        self._policy, self._factor = policy, factor

    def __enter__(self):
        weight = next(parameter for chunk in self._policy.model.model_chunks for parameter in chunk.parameters())
        factor = self._factor if dist.get_rank() == 1 else 1.0
        self._handle = weight.register_hook(lambda gradient: gradient * factor)

    def __exit__(self, *_):
        self._handle.remove()


def state(policy) -> list[bytes]:
    """Return the bytes of this rank's weights, main weights and moments, and the schedule's step."""
    policy.finish_training()
    trained = TrainingState(policy.model, policy.optimizer, policy.scheduler).trained_tensors()
    tensors = [tensor.detach().float().cpu() for tensor in trained]
    return [tensor.numpy().tobytes() for tensor in tensors] + [str(policy.scheduler.num_steps).encode()]


def train_with_bad_steps(parallel: dict, optimizer, precision: str) -> tuple[list[dict], list[bool], bool, str]:
    """Return the reports of bad steps, whether each changed a byte, whether training then went on as without, an error.

    A NaN loss, an infinite and a NaN gradient come between two good steps.
    """
    policies = [build_policy(parallel, optimizer=optimizer, precision=precision, max_skipped_steps=n)
                for n in (0, ALLOWED)]  # fmt: skip
    undisturbed, policy = policies
    good, bad, last = (random_batch(8, 16, seed) for seed in range(3))
    for each in policies:
        each.train(good, NLLLoss(), gbs=8)
    reports, changed, before = [], [], state(policy)
    for factor in (None, math.inf, math.nan):
        if factor is None:
            reports.append(policy.train(bad, NaNLossHere(), gbs=8))
        else:
            with GradientsOfRank1(policy, factor):
                reports.append(policy.train(bad, NLLLoss(), gbs=8))
        changed.append(state(policy) != before)
        if factor is not None:
            continue
        for each in policies:  # a good step in between, so that at most two bad ones come in a row
            each.train(last, NLLLoss(), gbs=8)
        before = state(policy)
    for each in policies:
        each.train(good, NLLLoss(), gbs=8)
    goes_on = state(policy) == state(undisturbed)
    for _ in range(ALLOWED):
        policy.train(bad, NaNLossHere(), gbs=8)
    with pytest.raises(NonFiniteLoss) as error:
        policy.train(bad, NaNLossHere(), gbs=8)
    return reports, changed, goes_on, str(error.value)


@pytest.mark.parametrize(
    ("parallel", "optimizer", "precision"),
    [({"tensor": 2}, OPTIMIZER, "fp32"), ({}, OPTIMIZER, "fp32"), ({}, OVERLAP, "fp32"), ({}, OVERLAP, "bf16")],
    ids=["tensor", "data", "data with overlap", "data in bf16"],
)
def test_a_step_that_is_not_finite_changes_no_bit_and_is_skipped_on_all_ranks(ranks, parallel, optimizer, precision):
    for reports, changed, goes_on, message in ranks.run(2, train_with_bad_steps, parallel, optimizer, precision):
        assert [report["skipped_steps"] for report in reports] == [1, 1, 1]
        assert all(report["num_updates"] == 0 and "loss" not in report for report in reports)
        assert changed == [False] * 3
        assert goes_on, "the steps after skipped ones are those without them"
        assert "the loss is nan" in message and "2 optimizer steps before were skipped" in message


def norms(clip_grad: float) -> tuple[float, float, float]:
    """Return both gradient norms of a report, and the norm of what the optimizer was given."""
    policy = build_policy({"tensor": 2}, optimizer=dataclasses.replace(OPTIMIZER, clip_grad=clip_grad))
    report = policy.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)
    return report["grad_norm"], report["grad_norm_clipped"], float(policy.optimizer.get_grad_norm())


@pytest.mark.parametrize("clip_grad", [0.0, 0.01, 1e6])
def test_the_norm_after_clipping_is_the_one_that_the_optimizer_got(ranks, clip_grad):
    for before, after, applied in ranks.run(2, norms, clip_grad):
        assert after == pytest.approx(applied, rel=1e-5)
        assert after == (pytest.approx(0.01, rel=1e-3) if clip_grad == 0.01 else before)
        assert before > 0.01
