"""Measuring a workload in the layout of these ranks, and comparing two measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from rl_megatron.batching.config import Batching
from rl_megatron.certify.workload import Workload, check_keys
from rl_megatron.model.build import Head
from rl_megatron.model.shards import gather_full
from rl_megatron.policy.megatron_policy import MegatronPolicy
from rl_megatron.policy.optimizer import complete_gradients, main_gradient
from rl_megatron.topology.topology import Topology

LOSS_TOLERANCE = 1e-6  # relative
GRADIENT_TOLERANCE = 1e-4  # of each parameter, relative to its largest entry; the same for weights after a step
STREAM_TOLERANCE = 1e-5  # of any token's logprob or score, absolute
METRIC_TOLERANCE = 1e-4  # relative, and absolute below 1e-2


@dataclass(frozen=True)
class Measurement:
    """Of one objective, in fp32: its metrics, the loss among them; how many microbatches a data-parallel rank had, and
    which share of their token slots held tokens; and on rank 0, whole: the logprobs (or values) of all tokens, every
    parameter's gradient and, of the last objective of each head, every parameter after one step of the optimizer."""

    metrics: dict[str, float]
    num_microbatches: int
    packing_efficiency: float
    stream: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far a quantity in some layout is from one process, and where it is farthest."""

    quantity: str
    error: float
    tolerance: float
    where: str

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance  # NaN does not


def run_workload(workload: Workload, topology: Topology, batching: Mapping[str, Batching]) -> dict[str, Measurement]:
    """Every objective of the workload, by name, in microbatches as `batching` has them for it; all from the same
    weights. Collective.

    Raises: ConfigError where the batch lacks what a loss reads, or a degree does not fit the model.
    """
    batch = workload.batch()
    losses = {name: objective.build() for name, objective in workload.objectives.items()}
    for name, loss_fn in losses.items():
        check_keys(name, loss_fn, batch)
    policies: dict[Head, MegatronPolicy] = {}
    last_of_head = {objective.head: name for name, objective in workload.objectives.items()}
    found = {}
    for name, objective in workload.objectives.items():
        head = objective.head
        if head not in policies:
            policies[head] = _policy(workload, topology, head)
        policy = policies[head]
        policy.batching = batching[name]
        planned = policy.plan(batch, losses[name])
        stream = policy.get_values(batch)["values"] if head == "score" else policy.get_logprobs(batch)["logprobs"]
        metrics = policy.accumulate_gradients(batch, losses[name])
        complete_gradients(policy.model.wrapped_model_chunks)
        gradients = gather_full(policy.model.model_chunks, value=main_gradient)
        weights: dict[str, Tensor] = {}
        if name == last_of_head[head]:
            report = policy.train(batch, losses[name], gbs=batch.size)
            metrics |= {"grad_norm": report["grad_norm"]}
            policy.finish_training()
            weights = gather_full(policy.model.model_chunks)
        found[name] = Measurement(metrics, len(planned.microbatches), planned.efficiency, stream, gradients, weights)
    for policy in policies.values():
        policy.shutdown()
    return found


def _policy(workload: Workload, topology: Topology, head: Head) -> MegatronPolicy:
    return MegatronPolicy(
        workload.model, topology, vocab_size=workload.vocab_size, seed=workload.seed, optimizer=workload.optimizer,
        head=head, fused_head=workload.fused_head,
    )  # fmt: skip


def compare(layout: Measurement, one_process: Measurement) -> list[Difference]:
    """The loss, the logprobs, every parameter's gradient, the weights after a step and every metric."""
    found, wanted = layout.metrics, one_process.metrics
    differences = [
        Difference("loss", _relative(found["loss"], wanted["loss"]), LOSS_TOLERANCE, f"a loss of {wanted['loss']:.7g}"),
        _stream_difference(layout.stream, one_process.stream),
        _worst("gradient", layout.gradients, one_process.gradients),
    ]
    if one_process.weights:
        differences.append(_worst("weights after a step", layout.weights, one_process.weights))
    return [*differences, _worst_metric(found, wanted)]


def _relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted) if wanted else abs(found)


def _stream_difference(found: Tensor, wanted: Tensor) -> Difference:
    errors = (found - wanted).abs()
    sequence, position = divmod(int(errors.argmax()), errors.size(1))
    return Difference("logprobs", errors.max().item(), STREAM_TOLERANCE, f"row {sequence}, token {position}")


def _worst(quantity: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Difference:
    """max |found − wanted| / max |wanted| of each parameter, and the worst of them."""
    if found.keys() != wanted.keys():
        return Difference(quantity, math.inf, GRADIENT_TOLERANCE, f"only one has {min(found.keys() ^ wanted.keys())}")
    errors = {name: _parameter_error(found[name], wanted[name]) for name in wanted}
    name = max(errors, key=lambda name: _nan_is_worst(errors[name]))
    return Difference(quantity, errors[name], GRADIENT_TOLERANCE, name)


def _parameter_error(found: Tensor, wanted: Tensor) -> float:
    difference, scale = (found - wanted).abs().max().item(), wanted.abs().max().item()
    return difference / scale if scale else difference


def _worst_metric(found: Mapping[str, float], wanted: Mapping[str, float]) -> Difference:
    if found.keys() != wanted.keys():
        return Difference("metrics", math.inf, METRIC_TOLERANCE, f"only one has {min(found.keys() ^ wanted.keys())}")
    errors = {name: abs(found[name] - wanted[name]) / max(abs(wanted[name]), 1e-2) for name in wanted}
    name = max(errors, key=lambda name: _nan_is_worst(errors[name]))
    return Difference("metrics", errors[name], METRIC_TOLERANCE, name)


def _nan_is_worst(error: float) -> float:
    return math.inf if math.isnan(error) else error


def fails(differences: Mapping[str, list[Difference]]) -> Iterator[tuple[str, Difference]]:
    """(objective, difference) of all that do not hold, in order."""
    for name, found in differences.items():
        yield from ((name, difference) for difference in found if not difference.holds)
