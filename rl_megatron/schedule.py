"""Microbatches → gradients and metrics, on megatron-core's pipeline schedules.

This is the only place where a loss meets the layout, and no place scales it: losses arrive divided by global counts
that were known before the first forward, each microbatch contributes its part, and the parts add up over microbatches
(here), over data-parallel ranks (DDP sums) and over context-parallel ranks (each backpropagates its own tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.logprobs import LogprobStats, Sharding, next_token_stats
from rl_megatron.losses.batch import first_nan
from rl_megatron.losses.interfaces import Loss, LossFunction, Reduction
from rl_megatron.topology.context_parallel import zigzag_shard
from rl_megatron.topology.topology import Topology


class NonFiniteLoss(RuntimeError):
    """A loss turned NaN or infinite; raised on every rank before the optimizer moves a weight."""


@dataclass(frozen=True)
class Denominators:
    """Valid sequences and valid predicted tokens of the whole global batch: what the losses divide by."""

    sequences: Tensor
    tokens: Tensor

    @classmethod
    def count(cls, batch: Mapping[str, Tensor]) -> Denominators:
        """Σ sample_mask and Σ token_mask[:, 1:]·sample_mask of a whole global batch."""
        sample_mask = batch["sample_mask"].float()
        return cls(sample_mask.sum(), (batch["token_mask"][:, 1:].float() * sample_mask[:, None]).sum())


@dataclass(frozen=True)
class Runner:
    """Runs a model's chunks over microbatches on this rank's place in the topology."""

    chunks: list[torch.nn.Module]
    topology: Topology
    vocab_size: int  # of the tokenizer; the padded rows past it never enter a softmax

    def train_step(
        self,
        microbatches: list[BatchedDataDict],
        loss_fn: LossFunction,
        denominators: Denominators,
        forward_only: bool = False,
    ) -> dict[str, float]:
        """Adds the gradient of Σ over all microbatches of all ranks of `loss_fn` to the chunks' main gradients.

        `microbatches`: this data-parallel rank's part, equally many and equally shaped on every rank, rows whole (not
        cut over context-parallel ranks). Returns every metric, reduced as it declares, the same on all ranks; "loss"
        is the loss whose gradient was taken.

        Raises: NonFiniteLoss on every rank, naming microbatch and metrics, where the loss is NaN or infinite.
        """
        step = partial(self._loss_of, loss_fn=loss_fn, denominators=denominators)
        reports = self._run(microbatches, step, forward_only=forward_only)[: len(microbatches)]
        return self._reduce(reports, loss_fn, microbatches)

    @torch.no_grad()
    def next_token_logprobs(self, microbatches: list[BatchedDataDict]) -> Tensor | None:
        """[B, S−1], the rows of `microbatches` one after the other, on the last pipeline stage; None on others."""
        return self._collect(microbatches, lambda batch, logits: self._stats_of(batch, logits).logprobs)

    @torch.no_grad()
    def scores(self, microbatches: list[BatchedDataDict]) -> Tensor | None:
        """[B, S] fp32 of a model with a score head, entry t read after token t; stages as `next_token_logprobs`."""

        def of(batch: BatchedDataDict, output: Tensor) -> Tensor:
            scores = output.squeeze(-1).float()
            return self._sharding.layout(scores, tuple(batch["input_ids"].shape)).gather(scores)

        return self._collect(microbatches, of)

    def _collect(self, microbatches: list[BatchedDataDict], of: Callable) -> Tensor | None:
        collected = self._run(microbatches, of, forward_only=True, collect=True)[: len(microbatches)]
        return torch.cat(collected) if collected else None

    @property
    def _sharding(self) -> Sharding:
        return Sharding(self.topology.groups.tp, self.topology.groups.cp, self.vocab_size)

    def _run(self, microbatches: list, on_output: Callable, forward_only: bool, collect: bool = False) -> list:
        topology, config = self.topology, get_model_config(self.chunks[0])
        rows, length = microbatches[0]["input_ids"].shape
        microbatches = self._filled_up(microbatches)

        def forward_step(iterator: Iterator[BatchedDataDict], chunk: torch.nn.Module):
            batch = next(iterator)
            tokens = self._local_tokens(batch["input_ids"])
            output = chunk(tokens, None, None)
            return output, lambda output, non_loss_data=False: on_output(batch, output)

        pipelined = topology.pipeline > 1
        if topology.virtual_pipeline > 1:
            forward_backward = schedules.forward_backward_pipelining_with_interleaving
        elif pipelined:
            forward_backward = schedules.forward_backward_pipelining_without_interleaving
        else:
            forward_backward = schedules.forward_backward_no_pipelining
        with torch.set_grad_enabled(not forward_only):
            return forward_backward(
                forward_step_func=forward_step,
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(microbatches),
                seq_length=self._padded_length(length),
                micro_batch_size=rows,
                forward_only=forward_only,
                collect_non_loss_data=collect,
                p2p_communicator=P2PCommunicator(topology.groups.pp, config) if pipelined else None,
                pg_collection=topology.groups,
            )

    def _filled_up(self, microbatches: list[BatchedDataDict]) -> list[BatchedDataDict]:
        """The interleaved schedule takes multiples of the pipeline degree: zero-weight copies make up the number."""
        if self.topology.virtual_pipeline == 1:
            return microbatches
        missing = -len(microbatches) % self.topology.pipeline
        if not missing:
            return microbatches
        filler = BatchedDataDict(dict(microbatches[0]))
        for mask in ("sample_mask", "token_mask"):
            if mask in filler:
                filler[mask] = torch.zeros_like(filler[mask])
        return microbatches + [filler] * missing

    def _padded_length(self, length: int) -> int:
        multiple = self.topology.sequence_multiple
        return -(-length // multiple) * multiple

    def _local_tokens(self, input_ids: Tensor) -> Tensor:
        padding = self._padded_length(input_ids.size(1)) - input_ids.size(1)
        padded = torch.nn.functional.pad(input_ids, (0, padding))
        return zigzag_shard(padded, self.topology.context_rank, self.topology.context, dim=1)

    def _stats_of(self, batch: BatchedDataDict, logits: Tensor) -> LogprobStats:
        mask = batch["token_mask"] * batch["sample_mask"][:, None] if "token_mask" in batch else None
        temperature = batch.get("temperature", 1.0)
        return next_token_stats(logits, batch["input_ids"], self._sharding, temperature=temperature, mask=mask)

    def _loss_of(self, batch: BatchedDataDict, output: Tensor, *, loss_fn: LossFunction, denominators: Denominators):
        counts = {"global_valid_seqs": denominators.sequences, "global_valid_toks": denominators.tokens}
        if isinstance(loss_fn, Loss) and type(loss_fn).__call__ is Loss.__call__:
            loss, metrics = loss_fn.on_output(output, batch, **counts, sharding=self._sharding)
        elif isinstance(loss_fn, Loss):  # a call of its own, which may add to what `evaluate` says
            groups = {
                "vocab_parallel_group": self.topology.groups.tp, "context_parallel_group": self.topology.groups.cp,
            }  # fmt: skip
            loss, metrics = loss_fn(output, data=batch, **counts, **groups, valid_vocab_size=self.vocab_size)
        else:  # anything that follows the protocol: it takes logprobs
            logprobs = self._stats_of(batch, output).logprobs
            loss, metrics = loss_fn(data=batch, **counts, next_token_logprobs=logprobs)
        report = {name: torch.as_tensor(value, device=loss.device).detach().double() for name, value in metrics.items()}
        report["loss"] = loss.detach().double()
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

    def _reduce(
        self, reports: list[dict[str, Tensor]], loss_fn: LossFunction, microbatches: list[BatchedDataDict]
    ) -> dict[str, float]:
        """Over microbatches, then data-parallel ranks (context- and tensor-parallel ranks hold equal values), then to
        all pipeline stages; at most one collective per kind of reduction."""
        topology, device = self.topology, self.topology.platform.device
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
            raise NonFiniteLoss(self._describe_failure(reports, result, microbatches, loss_fn))
        return result

    def _describe_failure(
        self,
        reports: list[dict[str, Tensor]],
        result: dict[str, float],
        microbatches: list[BatchedDataDict],
        loss_fn: LossFunction,
    ) -> str:
        keys = getattr(loss_fn, "required_keys", ()), getattr(loss_fn, "next_token_keys", frozenset())
        bad = {
            index: first_nan(microbatches[index], {}, *keys)
            for index, report in enumerate(reports)
            if not torch.isfinite(report["loss"])
        }
        everywhere: list = [None] * self.topology.world_size
        dist.all_gather_object(everywhere, (self.topology.data_rank, bad))
        places = sorted(
            {(rank, index, culprit or "") for rank, found in everywhere for index, culprit in found.items()}
        )
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
