"""Count the denominators of a step's global batch, and reduce the step's metrics over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.errors import RunFailed
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import Reduction
from rl_megatron.losses.streams import find_nan
from rl_megatron.topology.reductions import ALONE, RankReduction
from rl_megatron.topology.topology import Topology
from rl_megatron.topology.transfer import read_numbers, send


class NonFiniteLoss(RunFailed):
    """The error for a NaN or infinite loss or gradient norm, raised on every rank before a weight changes."""


@dataclass(frozen=True)
class Denominators:
    """The counts of the whole global batch that losses and metrics divide by.

    Attributes:
        sequences: Valid sequences, Σ sample_mask.
        tokens: Valid predicted tokens, Σ token_mask[:, 1:]·sample_mask.
        positions: All tokens, prompts included, of the sequences whose sample_mask is above 0.
    """

    sequences: Tensor
    tokens: Tensor
    positions: Tensor

    @classmethod
    def count(cls, batch: Mapping[str, Tensor], ranks: RankReduction = ALONE) -> Denominators:
        """Count the global batch, of which `batch` has this rank's sequences. Collective over `ranks`."""
        sample_mask, mask = batch["sample_mask"].double(), batch["token_mask"][:, 1:].double()
        tokens = (mask.sum(1) * sample_mask).sum()
        width = torch.full_like(sample_mask, batch["input_ids"].size(1))
        lengths = batch["input_lengths"].double() if "input_lengths" in batch else width
        positions = torch.where(sample_mask > 0, lengths, 0.0).sum()
        return cls(*ranks.sum(torch.stack([sample_mask.sum(), tokens, positions])).float().unbind())


def reduce_metrics(
    reports: list[dict[str, Tensor]],
    loss_fn: Loss,
    batches: Sequence[BatchedDataDict],
    topology: Topology,
    step_metrics: Mapping[str, Tensor],
) -> dict[str, float]:
    """Return on every rank the metrics of the last stage's microbatches, reduced as the loss declares.

    Metrics are reduced over microbatches, then over data-parallel ranks (context- and tensor-parallel ranks hold equal
    values), and sent to all pipeline stages, with at most one collective for each kind of reduction. A metric that only
    some microbatches return is reduced over those. The host waits for the device once.

    Args:
        reports: The metrics of each microbatch on the last stage, on the device; an empty list on other stages.
        loss_fn: The loss.
        batches: The microbatches.
        topology: The layout.
        step_metrics: Further metrics, equal on all ranks. NaN values are left out.

    Raises:
        ValueError: On every rank, if a microbatch returns a metric whose reduction is not declared.
        NonFiniteLoss: On every rank, if the loss is NaN or infinite. The message names the microbatch and the metrics.
    """
    device = topology.device
    reductions = dict(loss_fn.metric_reductions)
    reductions.setdefault("loss", Reduction.SUM)
    by_kind = {kind: sorted(name for name in reductions if reductions[name] is kind) for kind in Reduction}
    names = [name for kind in Reduction for name in by_kind[kind]]
    # A rank does not know the metrics of other ranks' microbatches. So every rank sends the same shape, which follows
    # from the declarations: for each name, a value; for each name, 1 if any microbatch has it, and otherwise 0; at the
    # end, 2 if any microbatch returns undeclared names, and otherwise 1.
    reduced = torch.zeros(2 * len(names) + 1, dtype=torch.float64, device=device)
    if topology.is_last_stage:
        parts = {kind: _reduce_microbatches(kind, by_kind[kind], reports) for kind in Reduction if by_kind[kind]}
        returned = {name for report in reports for name in report}
        flags = [*(name in returned for name in names), 1 if returned <= set(names) else 2]
        flags = send(torch.tensor(flags, dtype=torch.float64), device)
        parts[Reduction.MAX] = torch.cat([parts[Reduction.MAX], flags]) if Reduction.MAX in parts else flags
        reduced = torch.cat([_reduce_over_ranks(kind, part, topology.groups.dp) for kind, part in parts.items()])
    if topology.pipeline > 1:
        dist.broadcast(reduced, src=topology.last_stage_rank, group=topology.groups.pp)
    numbers = read_numbers(torch.cat([reduced, *(value.double().view(1) for value in step_metrics.values())]))
    values, present, undeclared = numbers[: len(names)], numbers[len(names) : 2 * len(names)], numbers[2 * len(names)]
    if undeclared == 2:
        everywhere: list = [None] * topology.world_size
        dist.all_gather_object(everywhere, {name for report in reports for name in report} - set(names))
        raise ValueError(
            f"{loss_fn.display_name} returned metrics {sorted(set().union(*everywhere))} whose reduction it does not "
            "declare; add them to metric_reductions"
        )
    result = {name: value for name, value, is_present in sorted(zip(names, values, present, strict=True)) if is_present}
    if not math.isfinite(result["loss"]):
        raise NonFiniteLoss(_describe_failure(reports, result, batches, loss_fn, topology))
    further = zip(step_metrics, numbers[2 * len(names) + 1 :], strict=True)
    return result | {name: value for name, value in further if not math.isnan(value)}


def _reduce_microbatches(kind: Reduction, names: list[str], reports: list[dict[str, Tensor]]) -> Tensor:
    """Reduce the metrics `names` of one kind over microbatches, and return their values [names].

    A missing metric contributes the reduction's identity.
    """
    missing = reports[0]["loss"].new_full((), kind.identity)
    stacked = torch.stack([torch.stack([report.get(name, missing) for name in names]) for report in reports])
    return {Reduction.SUM: stacked.sum, Reduction.MIN: stacked.amin, Reduction.MAX: stacked.amax}[kind](0)


def _describe_failure(
    reports: list[dict[str, Tensor]],
    result: dict[str, float],
    batches: Sequence[BatchedDataDict],
    loss_fn: Loss,
    topology: Topology,
) -> str:
    culprits = {
        index: find_nan(batches[index], {}, loss_fn.required_keys, loss_fn.next_token_keys)
        for index, report in enumerate(reports)
        if not torch.isfinite(report["loss"])
    }
    everywhere: list = [None] * topology.world_size
    dist.all_gather_object(everywhere, (topology.data_rank, culprits))
    failures = sorted({(rank, index, key or "") for rank, culprits in everywhere for index, key in culprits.items()})
    where = ", ".join(
        f"microbatch {index} of data-parallel rank {rank}" + (f", where {key} is NaN" if key else "")
        for rank, index, key in failures[:4]
    )
    values = ", ".join(f"{name}={value:.4g}" for name, value in result.items())
    return f"the loss is {result['loss']} (first seen in {where or 'the sum'}); metrics: {values}"


def combine_steps(reports: list[dict[str, float]], loss_fn: Loss) -> dict[str, float]:
    """Combine the metrics of several optimizer steps. Each metric is combined over the steps that have it.

    Metrics with the reduction MIN or MAX are combined by the same reduction, and all others by their mean.
    """
    reductions = loss_fn.metric_reductions
    combine: dict[Reduction | None, Callable[[list[float]], float]] = {Reduction.MIN: min, Reduction.MAX: max}
    return {
        name: combine.get(reductions.get(name), lambda values: sum(values) / len(values))(
            [report[name] for report in reports if name in report]
        )
        for name in dict.fromkeys(name for report in reports for name in report)
    }


def _reduce_over_ranks(kind: Reduction, values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce the values over the group in place, and return them."""
    operations = {Reduction.SUM: dist.ReduceOp.SUM, Reduction.MIN: dist.ReduceOp.MIN, Reduction.MAX: dist.ReduceOp.MAX}
    if group.size() > 1:
        dist.all_reduce(values, op=operations[kind], group=group)
    return values
