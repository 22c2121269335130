"""Run a workload in the layout of these ranks, and compare the results with those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_megatron.batching.config import Batching
from rl_megatron.certify.workload import Workload, check_keys
from rl_megatron.model.build import Head
from rl_megatron.model.shards import gather_full
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.optimizer import complete_gradients, main_gradient

LOSS_TOLERANCE = 1e-6  # relative
GRADIENT_TOLERANCE = 1e-4  # per parameter, relative to its largest entry; the same for weights after a step
STREAM_TOLERANCE = 1e-5  # absolute, for every token's logprob or value
METRIC_TOLERANCE = 1e-4  # relative; for values below 1e-2, relative to 1e-2


@dataclass(frozen=True)
class Measurement:
    """The results of one objective. Gradients and weights are whole tensors, gathered on rank 0.

    Attributes:
        metrics: The metrics, including the loss.
        num_microbatches: The number of microbatches of a data-parallel rank.
        packing_efficiency: The share of token slots that hold a token.
        stream: The logprobs (or values) of all tokens, [B, S].
        gradients: The gradient of every parameter.
        weights: Every parameter after one optimizer step; empty except for the last objective of each head.
    """

    metrics: dict[str, float]
    num_microbatches: int
    packing_efficiency: float
    stream: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The error of one quantity in a layout, compared with one process.

    Attributes:
        quantity: The name of the quantity.
        error: The largest error.
        tolerance: The largest error that is accepted.
        where: The parameter, token or metric with the largest error, or the expected loss.
    """

    quantity: str
    error: float
    tolerance: float
    where: str

    @property
    def holds(self) -> bool:
        """Return whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def run_workload(workload: Workload, topology: Topology, batching: Mapping[str, Batching]) -> dict[str, Measurement]:
    """Return the measurement of every objective of the workload, each from the same weights. Collective."""
    batch = workload.batch()
    losses = {name: objective.build() for name, objective in workload.objectives.items()}
    for name, loss_fn in losses.items():
        check_keys(name, loss_fn, batch)
    policies: dict[Head, MegatronPolicy] = {}
    last_of_head = {objective.head: name for name, objective in workload.objectives.items()}
    measured = {}
    for name, objective in workload.objectives.items():
        head = objective.head
        if head not in policies:
            policies[head] = _build_policy(workload, topology, head)
        policy = policies[head]
        policy.batching = batching[name]
        planned = policy.plan(batch, losses[name])
        stream = policy.get_values(batch)["values"] if head == "score" else policy.get_logprobs(batch)["logprobs"]
        metrics = policy.accumulate_gradients(batch, losses[name])
        complete_gradients(policy.model.wrapped_model_chunks)
        gradients = gather_full(policy.model.model_chunks, value=main_gradient)
        weights: dict[str, Tensor] = {}
        if name == last_of_head[head]:
            report = policy.train(batch, losses[name], gbs=batch.size, on_policy=True)
            metrics |= {"grad_norm": report["grad_norm"]}
            policy.finish_training()
            weights = gather_full(policy.model.model_chunks)
        measured[name] = Measurement(metrics, len(planned.microbatches), planned.efficiency, stream, gradients, weights)
    for policy in policies.values():
        policy.shutdown()
    return measured


def _build_policy(workload: Workload, topology: Topology, head: Head) -> MegatronPolicy:
    return MegatronPolicy(
        workload.model, topology, vocab_size=workload.vocab_size, precision=workload.precision, seed=workload.seed,
        optimizer=workload.optimizer, head=head, fused_head=workload.fused_head,
        peft=workload.peft,
    )  # fmt: skip


def compare(layout: Measurement, one_process: Measurement) -> list[Difference]:
    """Return the differences of the loss, the logprobs, the gradients, the weights after a step and the metrics.

    Gradients, weights and metrics have one difference each: that of the parameter or metric with the largest error.
    """
    actual, expected = layout.metrics, one_process.metrics
    loss_error = _compute_relative_error(actual["loss"], expected["loss"])
    differences = [
        Difference("loss", loss_error, LOSS_TOLERANCE, f"a loss of {expected['loss']:.7g}"),
        _compare_streams(layout.stream, one_process.stream),
        _find_worst_parameter("gradient", layout.gradients, one_process.gradients),
    ]
    if one_process.weights:
        differences.append(_find_worst_parameter("weights after a step", layout.weights, one_process.weights))
    return [*differences, _find_worst_metric(actual, expected)]


def _compute_relative_error(actual: float, expected: float) -> float:
    return abs(actual - expected) / abs(expected) if expected else abs(actual)


def _compare_streams(actual: Tensor, expected: Tensor) -> Difference:
    errors = (actual - expected).abs()
    sequence, position = divmod(int(errors.argmax()), errors.size(1))
    return Difference("logprobs", errors.max().item(), STREAM_TOLERANCE, f"sequence {sequence}, token {position}")


def _find_worst_parameter(quantity: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Difference:
    """Return the difference of the parameter with the largest max |actual − expected| / max |expected|."""
    if actual.keys() != expected.keys():
        only = min(actual.keys() ^ expected.keys())
        return Difference(quantity, math.inf, GRADIENT_TOLERANCE, f"only one has {only}")
    errors = {name: _compute_parameter_error(actual[name], expected[name]) for name in expected}
    name = max(errors, key=lambda name: _nan_is_worst(errors[name]))
    return Difference(quantity, errors[name], GRADIENT_TOLERANCE, name)


def _compute_parameter_error(actual: Tensor, expected: Tensor) -> float:
    difference, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    return difference / scale if scale else difference


def _find_worst_metric(actual: Mapping[str, float], expected: Mapping[str, float]) -> Difference:
    if actual.keys() != expected.keys():
        only = min(actual.keys() ^ expected.keys())
        return Difference("metrics", math.inf, METRIC_TOLERANCE, f"only one has {only}")
    errors = {name: abs(actual[name] - expected[name]) / max(abs(expected[name]), 1e-2) for name in expected}
    name = max(errors, key=lambda name: _nan_is_worst(errors[name]))
    return Difference("metrics", errors[name], METRIC_TOLERANCE, name)


def _nan_is_worst(error: float) -> float:
    return math.inf if math.isnan(error) else error


def find_failures(differences: Mapping[str, list[Difference]]) -> Iterator[tuple[str, Difference]]:
    """Yield (objective, difference) for every difference that exceeds its tolerance, in order."""
    for name, of_objective in differences.items():
        yield from ((name, difference) for difference in of_objective if not difference.holds)
