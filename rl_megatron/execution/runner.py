"""Microbatches → gradients and metrics, on megatron-core's pipeline schedules.

This is the only place where a loss meets the layout, and no place scales it: losses arrive divided by global counts
that were known before the first forward, each microbatch contributes its part, and the parts add up over microbatches
(here), over data-parallel ranks (DDP sums) and over context-parallel ranks (each backpropagates its own tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution.metrics import Denominators, reduce_metrics
from rl_megatron.execution.microbatch import ModelInput
from rl_megatron.execution.p2p import PlannedCommunicator
from rl_megatron.log import once, report_progress
from rl_megatron.logprobs import DeferredLogits, LogprobStats, Sharding, next_token_stats, vocab_parallel_top_k
from rl_megatron.losses.base import Loss
from rl_megatron.model.heads.deferred import DeferredHead, UncopiedHead
from rl_megatron.model.layers.router import balancing_loss, balancing_routers, begin_step, forget_graphs, moving_routers
from rl_megatron.topology.topology import Topology


@dataclass(frozen=True)
class FusedHead:
    """That losses read logits a chunk of tokens at a time (`linear_logprobs`), of so many tokens (None: its default).
    Losses that read whole logits are given them."""

    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Runner:
    """Runs a model's chunks over microbatches on this rank's place in the topology."""

    chunks: list[torch.nn.Module]
    topology: Topology
    vocab_size: int  # of the tokenizer; the padded rows past it never enter a softmax
    backend: str  # of the layers, as `choose_backend` says
    fused_head: FusedHead | None = None

    def train_step(
        self,
        microbatches: list[Microbatch],
        loss_fn: Loss,
        denominators: Denominators,
        forward_only: bool = False,
    ) -> dict[str, float]:
        """Add the gradient of Σ over all microbatches of all ranks of `loss_fn` to the chunks' main gradients.

        Args:
            microbatches: this data-parallel rank's part, equally many on every rank.

        Returns:
            Every metric, reduced as it declares, the same on all ranks; "loss" is the loss whose gradient was taken, to
            which that of "router_aux_loss" was added if a mixture of experts has one.

        Raises:
            NonFiniteLoss: on every rank: the loss is NaN or infinite; names microbatch and metrics.
        """
        step = partial(self._loss_of, loss_fn=loss_fn, denominators=denominators)
        routers = [] if forward_only else balancing_routers(self.chunks)
        if not forward_only:
            begin_step(self.chunks, denominators.positions)
        head = self._head() if loss_fn.reads_deferred_logits else None
        if self.fused_head is not None and head is None:
            once(f"{loss_fn.display_name} reads whole logits: the fused head is off for it")
        reports = self._run(microbatches, step, forward_only, head)[: len(microbatches)]
        report = reduce_metrics(reports, loss_fn, [microbatch.batch for microbatch in microbatches], self.topology)
        if routers:
            world = dist.group.WORLD
            assert world is not None  # every rank of a topology is in it
            report["router_aux_loss"] = balancing_loss(routers, world, self.topology.device)
        return report

    @torch.no_grad()
    def next_token_logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """[b, S−1] of each microbatch, on the last pipeline stage; nothing on others."""

        def of(batch: BatchedDataDict, logits: Tensor | DeferredLogits, sharding: Sharding) -> Tensor:
            return _stats(batch, logits, sharding).logprobs

        return self._collect(microbatches, of, self._head())

    @torch.no_grad()
    def scores(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """[b, S] fp32 of each microbatch, entry t read after token t, of a model with a score head; stages as
        `next_token_logprobs`."""

        def of(batch: BatchedDataDict, output: Tensor, sharding: Sharding) -> Tensor:
            scores = output.squeeze(-1).float()
            return sharding.layout(scores, tuple(batch["input_ids"].shape)).gather(scores)

        return self._collect(microbatches, of, head=None)

    @torch.no_grad()
    def topk_logits(self, microbatches: list[Microbatch], k: int) -> list[Tensor]:
        """[b, S, k, 2] int32 of each microbatch, entry t read after token t: the bits of the k largest logits (fp32)
        and their ids, together and exact however they travel; stages as `next_token_logprobs`."""

        def of(batch: BatchedDataDict, logits: Tensor, sharding: Sharding) -> Tensor:
            values, ids = vocab_parallel_top_k(logits, k, sharding.tp_group, valid_vocab_size=sharding.valid_vocab_size)
            pairs = torch.stack([values.view(torch.int32), ids.int()], dim=-1)
            return sharding.layout(pairs, tuple(batch["input_ids"].shape)).gather(pairs)

        return self._collect(microbatches, of, head=UncopiedHead.of(self.chunks))

    def _collect(
        self, microbatches: list[Microbatch], of: Callable, head: DeferredHead | UncopiedHead | None
    ) -> list[Tensor]:
        return self._run(microbatches, of, forward_only=True, head=head, collect=True)[: len(microbatches)]

    def _head(self) -> DeferredHead | UncopiedHead | None:
        """How logits reach readers that take them in any memory layout, or deferred."""
        if self.fused_head is None:
            return UncopiedHead.of(self.chunks)
        return DeferredHead.of(self.chunks, self.fused_head.chunk_tokens)

    def _run(
        self, microbatches: list[Microbatch], on_output: Callable, forward_only: bool,
        head: DeferredHead | UncopiedHead | None, collect: bool = False,
    ) -> list:  # fmt: skip
        """`on_output(batch, output, sharding)` of every microbatch, on the last stage; the output is what `head` makes
        of the model's, or without one contiguous logits or scores."""
        topology, config = self.topology, get_model_config(self.chunks[0])
        microbatches = self._filled_up(microbatches)
        shapes = [microbatch.shape(topology) for microbatch in microbatches]
        config.variable_seq_lengths = len(set(shapes)) > 1
        balances_experts = not forward_only and bool(balancing_routers(self.chunks) or moving_routers(self.chunks))

        prepared = [  # once for all chunks
            (microbatch, ModelInput.build(microbatch, topology, self.vocab_size, self.backend, balances_experts))
            for microbatch in microbatches
        ]

        def forward_step(iterator: Iterator[tuple[Microbatch, ModelInput]], chunk: torch.nn.Module):
            microbatch, given = next(iterator)
            masked = {} if given.padding is None else {"padding_mask": given.padding_of(chunk, topology)}
            output = chunk(given.tokens, None, None, packed_seq_params=given.packing, **masked)
            return output, lambda output, non_loss_data=False: on_output(
                microbatch.batch, output if head is None else head.logits(output), given.sharding
            )

        pipelined = topology.pipeline > 1
        if topology.virtual_pipeline > 1:
            forward_backward = schedules.forward_backward_pipelining_with_interleaving
        elif pipelined:
            forward_backward = schedules.forward_backward_pipelining_without_interleaving
        else:
            forward_backward = schedules.forward_backward_no_pipelining
        with torch.set_grad_enabled(not forward_only), nullcontext() if head is None else head.in_use():
            results = forward_backward(
                forward_step_func=forward_step,
                data_iterator=[_reported(prepared), *(iter(prepared) for _ in self.chunks[1:])],
                model=self.chunks,
                num_microbatches=len(microbatches),
                seq_length=shapes[0][1],
                micro_batch_size=shapes[0][0],
                forward_only=forward_only,
                collect_non_loss_data=collect,
                p2p_communicator=PlannedCommunicator(topology, config, shapes) if pipelined else None,
                pg_collection=topology.groups,
            )
        forget_graphs(self.chunks)
        return results

    def _filled_up(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The interleaved schedule takes multiples of the pipeline degree: the shortest microbatch, without weight,
        makes up the number."""
        missing = -len(microbatches) % self.topology.pipeline if self.topology.virtual_pipeline > 1 else 0
        if not missing:
            return microbatches
        shortest = min(microbatches, key=lambda microbatch: microbatch.shape(self.topology))
        return microbatches + [shortest.with_zero_weight()] * missing

    def _loss_of(
        self,
        batch: BatchedDataDict,
        output: Tensor | DeferredLogits,
        sharding: Sharding,
        *,
        loss_fn: Loss,
        denominators: Denominators,
    ):
        loss, metrics = loss_fn.on_output(output, batch, denominators.sequences, denominators.tokens, sharding)
        report = {name: torch.as_tensor(value, device=loss.device).detach().double() for name, value in metrics.items()}
        report["loss"] = loss.detach().double()
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), report


def _reported(prepared: list[tuple[Microbatch, ModelInput]]) -> Iterator[tuple[Microbatch, ModelInput]]:
    """Yield the microbatches, and report before each how many were begun."""
    for begun, item in enumerate(prepared):
        report_progress(begun, len(prepared), "microbatches")
        yield item


def _stats(batch: BatchedDataDict, logits: Tensor | DeferredLogits, sharding: Sharding) -> LogprobStats:
    mask = batch["token_mask"] * batch["sample_mask"][:, None] if "token_mask" in batch else None
    temperature = batch.get("temperature", 1.0)
    return next_token_stats(logits, batch["input_ids"], sharding, temperature=temperature, mask=mask)
