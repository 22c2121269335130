"""An optimizer step whose loss or gradient is not finite changes nothing on any rank, and training goes on after it."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron import log
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
    trained = TrainingState(policy.model, policy.optimizer, policy.scheduler).list_trained_tensors()
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


class NaNWhereMarked(NLLLoss):
    """A loss that is NaN for a batch with a marked sequence."""

    def evaluate(self, data, *args, **inputs):
        loss, metrics = super().evaluate(data, *args, **inputs)
        return loss + data["marked"].sum(), metrics


def take_steps(allowed: int, kinds: list[str]) -> tuple[list[dict], list[str], str]:
    """Return the reports of "good", "bad" and "empty" steps, the warnings, and the error that ends them.

    Sequences of one call are steps of one sequence each, separated by commas.
    """
    policy, warnings, reports = build_policy({}, max_skipped_steps=allowed), [], []
    with mock.patch.object(log.LOGGER, "warning", lambda text, error: warnings.append(text % error)):
        for call in kinds:
            steps = call.split(",")
            batch = random_batch(4, 16, 0).select_indices([0] * len(steps))
            batch["marked"] = torch.tensor([math.nan if kind == "bad" else 0.0 for kind in steps])
            batch["token_mask"] *= torch.tensor([[float(kind != "empty")] for kind in steps])
            try:
                reports.append(policy.train(batch, NaNWhereMarked(), gbs=1))
            except NonFiniteLoss as error:
                return reports, warnings, str(error)
    return reports, warnings, ""


@pytest.mark.fast
def test_only_an_update_begins_a_new_row_of_skipped_steps(ranks):
    kinds = ["bad", "good", "bad", "empty", "bad", "bad"]
    reports, warnings, error = ranks.run(1, take_steps, 2, kinds)[0]
    assert [report["num_updates"] for report in reports] == [0, 1, 0, 0, 0]
    assert [report["skipped_steps"] for report in reports] == [1, 0, 1, 0, 1]
    assert reports[0].keys() == {"lr", "updated", "skipped_steps", "num_updates"}
    assert len(warnings) == 3 and all("an optimizer step is skipped" in text and "nan" in text for text in warnings)
    assert "2 optimizer steps before were skipped" in error and "train.max_nonfinite_steps" in error


@pytest.mark.fast
def test_skipped_steps_are_counted_over_a_call_if_any_may_be(ranks):
    (report,), _, error = ranks.run(1, take_steps, 1, ["good,bad,good"])[0]
    assert (report["num_updates"], report["skipped_steps"], error) == (2, 1, "")
    (report,), warnings, error = ranks.run(1, take_steps, 0, ["good", "bad"])[0]
    assert report["num_updates"] == 1 and "skipped_steps" not in report
    assert not warnings and "the loss is nan" in error and "skipped" not in error
