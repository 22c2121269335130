"""Count a step's global denominators before it, and reduce its metrics over all ranks after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import Reduction
from rl_megatron.losses.streams import first_nan
from rl_megatron.topology.topology import Topology


class NonFiniteLoss(RuntimeError):
    """A loss turned NaN or infinite; raised on every rank before the optimizer moves a weight."""


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
    def count(cls, batch: Mapping[str, Tensor]) -> Denominators:
        """Count the sequences, predicted tokens and positions of a global batch."""
        sample_mask = batch["sample_mask"].float()
        tokens = (batch["token_mask"][:, 1:].float() * sample_mask[:, None]).sum()
        width = torch.full_like(sample_mask, batch["input_ids"].size(1))
        lengths = batch["input_lengths"].to(width) if "input_lengths" in batch else width
        return cls(sample_mask.sum(), tokens, torch.where(sample_mask > 0, lengths, 0.0).sum())


def reduce_metrics(
    reports: list[dict[str, Tensor]], loss_fn: Loss, batches: Sequence[BatchedDataDict], topology: Topology
) -> dict[str, float]:
    """Return each metric of the last stage's microbatches, reduced as the loss declares, on every rank.

    It is reduced over microbatches, then over data-parallel ranks (context- and tensor-parallel ranks hold equal
    values), and sent to all pipeline stages, with at most one collective for each kind of reduction. A metric that only
    some microbatches return is reduced over those.

    Raises:
        ValueError: On every rank, if a microbatch returns a metric whose reduction is not declared.
        NonFiniteLoss: On every rank, if the loss is NaN or infinite. The message names the microbatch and the metrics.
    """
    device = topology.device
    reductions = dict(loss_fn.metric_reductions)
    reductions.setdefault("loss", Reduction.SUM)
    names = sorted(reductions)
    # Only its own rank knows what a microbatch returns. So every rank sends the same shape, which follows from the
    # declarations: a value for each name, whether any microbatch has it, and whether any returns undeclared names.
    kinds = [reductions[name] for name in names] + [Reduction.MAX] * (len(names) + 1)
    reduced = torch.zeros(len(kinds), dtype=torch.float64, device=device)
    if topology.is_last_stage:
        vectors = torch.stack([_vector(report, names, reductions) for report in reports])
        for kind in Reduction:
            mine = [i for i, k in enumerate(kinds) if k is kind]
            if mine:
                reduced[mine] = _across(kind, vectors[:, mine], topology.groups.dp)
    if topology.pipeline > 1:
        dist.broadcast(reduced, src=topology.last_stage_rank, group=topology.groups.pp)
    *known, undeclared = reduced.tolist()
    if undeclared:
        raise ValueError(_describe_undeclared(reports, names, loss_fn, topology))
    values, there = known[: len(names)], known[len(names) :]
    result = {name: value for name, value, is_there in zip(names, values, there, strict=True) if is_there}
    if not torch.isfinite(torch.tensor(result["loss"])):
        raise NonFiniteLoss(_describe_failure(reports, result, batches, loss_fn, topology))
    return result


def _vector(report: dict[str, Tensor], names: list[str], reductions: Mapping[str, Reduction]) -> Tensor:
    """Return [2·names + 1] of one microbatch: its values (or identities), which it has, and whether it has others."""
    loss = report["loss"]
    values = [report[name] if name in report else loss.new_tensor(reductions[name].identity) for name in names]
    flags = [float(name in report) for name in names] + [float(not report.keys() <= set(names))]
    return torch.cat([torch.stack(values), loss.new_tensor(flags)])


def _describe_undeclared(reports: list[dict[str, Tensor]], names: list[str], loss_fn: Loss, topology: Topology) -> str:
    everywhere: list = [None] * topology.world_size
    dist.all_gather_object(everywhere, {name for report in reports for name in report} - set(names))
    return (
        f"{loss_fn.display_name} returned metrics {sorted(set().union(*everywhere))} whose reduction it does not "
        "declare; add them to metric_reductions"
    )


def _describe_failure(
    reports: list[dict[str, Tensor]],
    result: dict[str, float],
    batches: Sequence[BatchedDataDict],
    loss_fn: Loss,
    topology: Topology,
) -> str:
    bad = {
        index: first_nan(batches[index], {}, loss_fn.required_keys, loss_fn.next_token_keys)
        for index, report in enumerate(reports)
        if not torch.isfinite(report["loss"])
    }
    everywhere: list = [None] * topology.world_size
    dist.all_gather_object(everywhere, (topology.data_rank, bad))
    places = sorted({(rank, index, culprit or "") for rank, found in everywhere for index, culprit in found.items()})
    where = ", ".join(
        f"microbatch {index} of data-parallel rank {rank}" + (f", where {culprit} is NaN" if culprit else "")
        for rank, index, culprit in places[:4]
    )
    values = ", ".join(f"{name}={value:.4g}" for name, value in result.items())
    return f"the loss is {result['loss']} (first seen in {where or 'the sum'}); metrics: {values}"


def over_steps(reports: list[dict[str, float]], loss_fn: Loss) -> dict[str, float]:
    """Combine the metrics of several optimizer steps, each over the steps that have it.

    The combination is the minimum of minima, the maximum of maxima, and the mean of all other metrics.
    """
    reductions = loss_fn.metric_reductions
    combine: dict[Reduction | None, Callable[[list[float]], float]] = {Reduction.MIN: min, Reduction.MAX: max}
    return {
        name: combine.get(reductions.get(name), lambda values: sum(values) / len(values))(
            [report[name] for report in reports if name in report]
        )
        for name in dict.fromkeys(name for report in reports for name in report)
    }


def _across(reduction: Reduction, stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [metrics] from [microbatches, metrics], reduced over microbatches and over the group."""
    local, op = {
        Reduction.SUM: (stacked.sum(0), dist.ReduceOp.SUM),
        Reduction.MIN: (stacked.amin(0), dist.ReduceOp.MIN),
        Reduction.MAX: (stacked.amax(0), dist.ReduceOp.MAX),
    }[reduction]
    if group.size() > 1:
        dist.all_reduce(local, op=op, group=group)
    return local
