"""What a step reports: global denominators before it, metrics reduced over all ranks after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.batch import first_nan
from rl_megatron.losses.interfaces import LossFunction, Reduction
from rl_megatron.topology.topology import Topology


class NonFiniteLoss(RuntimeError):
    """A loss turned NaN or infinite; raised on every rank before the optimizer moves a weight."""


@dataclass(frozen=True)
class Denominators:
    """Of the whole global batch: valid sequences and valid predicted tokens, by which the losses divide; and positions,
    all tokens of rows that weigh anything, prompts included."""

    sequences: Tensor
    tokens: Tensor
    positions: Tensor

    @classmethod
    def count(cls, batch: Mapping[str, Tensor]) -> Denominators:
        """Σ sample_mask, Σ token_mask[:, 1:]·sample_mask and Σ input_lengths over rows with a sample_mask above 0."""
        sample_mask = batch["sample_mask"].float()
        tokens = (batch["token_mask"][:, 1:].float() * sample_mask[:, None]).sum()
        width = torch.full_like(sample_mask, batch["input_ids"].size(1))
        lengths = batch["input_lengths"].to(width) if "input_lengths" in batch else width
        return cls(sample_mask.sum(), tokens, torch.where(sample_mask > 0, lengths, 0.0).sum())


def reduce_metrics(
    reports: list[dict[str, Tensor]], loss_fn: LossFunction, batches: Sequence[BatchedDataDict], topology: Topology
) -> dict[str, float]:
    """Each metric of the last stage's microbatches over microbatches, then data-parallel ranks (context- and
    tensor-parallel ranks hold equal values), then to all pipeline stages; at most one collective per kind of reduction.

    Raises: NonFiniteLoss on every rank, naming microbatch and metrics, where the loss is NaN or infinite.
    """
    device = topology.platform.device
    reductions = dict(getattr(loss_fn, "metric_reductions", {}))
    reductions.setdefault("loss", Reduction.SUM)
    if topology.is_last_stage:
        undeclared = sorted(set(reports[0]) - set(reductions))
        if undeclared:
            raise ValueError(
                f"{type(loss_fn).__name__} returned metrics {undeclared} whose reduction it does not declare; "
                "add them to metric_reductions"
            )
    names = sorted(reductions)
    values = torch.zeros(2, len(names), dtype=torch.float64, device=device)  # values, and whether they are there
    if topology.is_last_stage:
        for reduction in Reduction:
            mine = [i for i, n in enumerate(names) if reductions[n] is reduction and n in reports[0]]
            if mine:
                stacked = torch.stack([torch.stack([report[names[i]] for i in mine]) for report in reports])
                values[0, mine] = _across(reduction, stacked, topology.groups.dp)
                values[1, mine] = 1.0
    if topology.pipeline > 1:
        dist.broadcast(values, src=topology.last_stage_rank, group=topology.groups.pp)
    result = {name: value for name, value, there in zip(names, *values.tolist(), strict=True) if there}
    if not torch.isfinite(torch.tensor(result["loss"])):
        raise NonFiniteLoss(_describe_failure(reports, result, batches, loss_fn, topology))
    return result


def _describe_failure(
    reports: list[dict[str, Tensor]],
    result: dict[str, float],
    batches: Sequence[BatchedDataDict],
    loss_fn: LossFunction,
    topology: Topology,
) -> str:
    keys = getattr(loss_fn, "required_keys", ()), getattr(loss_fn, "next_token_keys", frozenset())
    bad = {
        index: first_nan(batches[index], {}, *keys)
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


def over_steps(reports: list[dict[str, float]], loss_fn: LossFunction) -> dict[str, float]:
    """Metrics of several optimizer steps as one: the least of minima, the greatest of maxima, the mean of the rest."""
    reductions = getattr(loss_fn, "metric_reductions", {})
    combine = {Reduction.MIN: min, Reduction.MAX: max}
    return {
        name: combine.get(reductions.get(name), lambda values: sum(values) / len(values))([r[name] for r in reports])
        for name in reports[0]
    }


def _across(reduction: Reduction, stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[microbatches, metrics] → [metrics], reduced over microbatches and over the group."""
    local, op = {
        Reduction.SUM: (stacked.sum(0), dist.ReduceOp.SUM),
        Reduction.MIN: (stacked.amin(0), dist.ReduceOp.MIN),
        Reduction.MAX: (stacked.amax(0), dist.ReduceOp.MAX),
    }[reduction]
    if group.size() > 1:
        dist.all_reduce(local, op=op, group=group)
    return local
