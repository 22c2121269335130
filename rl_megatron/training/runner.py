"""Compute gradients and metrics of microbatches with megatron-core's pipeline schedules.

Losses are not scaled here. They are already divided by counts of the global batch. So they only have to be summed: over
microbatches (here), over data-parallel ranks (by DDP) and over context-parallel ranks (each backpropagates its own
tokens).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.log import once, report_progress
from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats, vocab_parallel_top_k
from rl_megatron.losses.base import Loss
from rl_megatron.model.heads.deferred import DeferredHead, UncopiedHead
from rl_megatron.model.layers.attention import BIASES
from rl_megatron.model.layers.router import (
    balances_globally,
    begin_step,
    compute_expert_load,
    compute_replaced_share,
    counting,
    find_balancing_routers,
    forget_graphs,
    sum_balancing_loss,
)
from rl_megatron.model.layers.router_replay import find_expert_layers, reading_numbers
from rl_megatron.model.lora.dropout import seed_microbatch
from rl_megatron.timing import MEGATRON_TIMERS
from rl_megatron.topology.topology import Topology, keep_generators
from rl_megatron.topology.transfer import send
from rl_megatron.training.metrics import Denominators, reduce_metrics
from rl_megatron.training.model_input import ModelInput, PreparedStep, number_all_tokens
from rl_megatron.training.p2p import PlannedCommunicator

# A microbatch, its model input, and the seed of its dropout (None if nothing is dropped).
_Prepared = tuple[Microbatch, ModelInput, int | None]


@dataclass(frozen=True)
class FusedHead:
    """The setting that lets losses compute logits one token block at a time (`linear_logprobs`).

    Losses that need whole logits still get them.

    Attributes:
        block_tokens: The number of tokens in a block; None for the default of `linear_logprobs`.
    """

    block_tokens: int | None = None


@dataclass(frozen=True)
class Runner:
    """A runner of microbatches through this rank's model chunks.

    Attributes:
        vocab_size: The size of the tokenizer's vocabulary. Padding beyond it never enters a softmax.
        backend: The backend of the layers, as `choose_backend` returns it.
        fused_head: How losses read logits block by block; None if they read whole logits.
        has_dropout: Whether adapters apply dropout to their inputs in training.
    """

    model_chunks: list[torch.nn.Module]
    topology: Topology
    vocab_size: int
    backend: str
    fused_head: FusedHead | None
    has_dropout: bool

    def train_step(
        self,
        microbatches: list[Microbatch],
        loss_fn: Loss,
        denominators: Denominators,
        forward_only: bool = False,
        number: int = 0,
    ) -> dict[str, float]:
        """Add the gradient of the loss, summed over all microbatches of all ranks, to the main gradients.

        Args:
            microbatches: This data-parallel rank's microbatches, on the host; every rank has equally many.
            loss_fn: The loss.
            denominators: The global counts that the loss divides by.
            forward_only: Compute the loss and its metrics, but no gradient.
            number: The number of the optimizer step. This number and a microbatch's tokens seed the dropout. So all
                layouts with the same microbatches drop the same elements, also after a resume. Context parallelism is
                an exception.

        Returns:
            Every metric, reduced as declared, and equal on all ranks. "loss" is the value of `loss_fn` alone. With
            `model.router_aux_loss` above 0, the gradient also has the balancing loss, reported as "router_aux_loss".
            If recorded experts are replayed, "mismatch_routing" is the share of (token, layer) pairs for which the
            router would choose other experts.

        Raises:
            NonFiniteLoss: On every rank, if the loss is NaN or infinite. The message names the microbatch and metrics.
        """
        seeds = [] if forward_only else self._seed_dropout(microbatches, number)
        prepared, counts = send((self._prepare(microbatches, forward_only), denominators), self.topology.device)

        def compute_loss(batch: BatchedDataDict, output: Tensor | DeferredLogits, sharding: Sharding):
            streams = loss_fn.read_output(output, batch, sharding)
            loss, metrics = loss_fn.evaluate(batch, counts.sequences, counts.tokens, **streams)
            report = {name: _in_double(value, loss.device) for name, value in metrics.items()}
            report["loss"] = loss.detach().double()
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

        if not forward_only:
            if self._has_experts and balances_globally(get_model_config(self.model_chunks[0])):
                self._count_routed_tokens(prepared, seeds)
            begin_step(self.model_chunks, counts.positions)
        head = self._choose_head() if loss_fn.reads == "logprobs" else None
        if self.fused_head is not None and loss_fn.reads != "logprobs":
            once(f"{loss_fn.display_name} needs whole logits, so the fused head is off for this loss")
        with keep_generators(self.topology.device) if seeds else nullcontext():
            reports = self._run_schedule(prepared, compute_loss, forward_only, head, seeds=seeds)[: len(microbatches)]
        batches = [microbatch.batch for microbatch in microbatches]
        router_metrics = {} if forward_only else self._reduce_router_metrics(ROUTED_EXPERTS in batches[0])
        return reduce_metrics(reports, loss_fn, batches, self.topology, router_metrics)

    def _count_routed_tokens(self, prepared: PreparedStep, seeds: list[int]) -> None:
        """Let the routers count the tokens of each expert in the global batch, in a separate forward pass."""
        with (
            counting(self.model_chunks, self.topology.groups.tp_dp_cp),
            keep_generators(self.topology.device),
            torch.no_grad(),
        ):
            # Nothing reads the logits, so this head does not compute them.
            head = DeferredHead.find(self.model_chunks, None)
            self._run_schedule(prepared, lambda *output: None, forward_only=True, head=head, collect=True, seeds=seeds)

    def _reduce_router_metrics(self, replays: bool) -> dict[str, Tensor]:
        """Return the metrics of the step's routers, summed over all ranks, on the device. Collective."""
        world = dist.group.WORLD
        assert world is not None  # every rank of a topology is in it
        metrics, device = {}, self.topology.device
        config = get_model_config(self.model_chunks[0])
        if self._has_experts and config.moe_router_load_balancing_type != "none":  # a stage may have no router
            metrics["router_aux_loss"] = sum_balancing_loss(find_balancing_routers(self.model_chunks), world, device)
        if self._has_experts:
            metrics |= compute_expert_load(self.model_chunks, self.topology.groups.tp_dp_cp, world, device)
        if replays:
            metrics["mismatch_routing"] = compute_replaced_share(self.model_chunks, world, device)
        return metrics

    @torch.no_grad()
    def next_token_logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Return the logprobs [b, S−1] of each microbatch on the last pipeline stage, and [] on other stages."""

        def read(batch: BatchedDataDict, logits: Tensor | DeferredLogits, sharding: Sharding) -> Tensor:
            mask = batch["token_mask"] * batch["sample_mask"][:, None] if "token_mask" in batch else None
            temperature = batch.get("temperature", 1.0)
            return next_token_stats(
                logits, batch["input_ids"], sharding, temperature=temperature, mask=mask,
                most_counted=sharding.most_counted,
            ).logprobs  # fmt: skip

        return self._collect(microbatches, read, self._choose_head())

    @torch.no_grad()
    def scores(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Return the scores [b, S] fp32 of each microbatch on the last pipeline stage, and [] on other stages.

        Entry t is the score after token t. The model must have a score head.
        """

        def read(batch: BatchedDataDict, output: Tensor, sharding: Sharding) -> Tensor:
            scores = output.squeeze(-1).float()
            return sharding.layout(scores, tuple(batch["input_ids"].shape)).gather(scores)

        return self._collect(microbatches, read, head=None)

    @torch.no_grad()
    def topk_logits(self, microbatches: list[Microbatch], k: int) -> list[Tensor]:
        """Return the k largest logits of each microbatch, [b, S, k, 2] int32, on the last stage, and [] on others.

        Entry t is read after token t. The last dimension holds the bits of the logit (fp32) and its token id, so that
        both stay exact when they are sent between ranks.
        """

        def read(batch: BatchedDataDict, logits: Tensor, sharding: Sharding) -> Tensor:
            values, ids = vocab_parallel_top_k(logits, k, sharding.tp_group, valid_vocab_size=sharding.valid_vocab_size)
            pairs = torch.stack([values.view(torch.int32), ids.int()], dim=-1)
            return sharding.layout(pairs, tuple(batch["input_ids"].shape)).gather(pairs)

        return self._collect(microbatches, read, head=UncopiedHead.find(self.model_chunks))

    @torch.no_grad()
    def deferred_logits(self, microbatches: list[Microbatch]) -> list[DeferredLogits]:
        """Return the deferred logits of each microbatch on the last pipeline stage, and [] on other stages.

        They hold hidden states, sharded like the microbatch's other outputs, and this rank's part of the head's weight.
        """
        logits: list[DeferredLogits] = []

        def read(batch: BatchedDataDict, output: DeferredLogits, sharding: Sharding) -> None:
            logits.append(output)

        self._collect(microbatches, read, DeferredHead.find(self.model_chunks, None))
        return logits[: len(microbatches)]

    def _collect(
        self, microbatches: list[Microbatch], read: Callable, head: DeferredHead | UncopiedHead | None
    ) -> list[Tensor]:
        prepared = send(self._prepare(microbatches, forward_only=True), self.topology.device)
        return self._run_schedule(prepared, read, forward_only=True, head=head, collect=True)[: len(microbatches)]

    def _choose_head(self) -> DeferredHead | UncopiedHead | None:
        """Return the head for a reader that accepts logits in any memory layout, and block by block."""
        if self.fused_head is None:
            return UncopiedHead.find(self.model_chunks)
        return DeferredHead.find(self.model_chunks, self.fused_head.block_tokens)

    def _run_schedule(
        self, prepared: PreparedStep, read: Callable, forward_only: bool,
        head: DeferredHead | UncopiedHead | None, collect: bool = False, seeds: Sequence[int] = (),
    ) -> list:  # fmt: skip
        """Run the schedule of the pipeline, and return `read(batch, output, sharding)` of every microbatch.

        Only the last stage has an output; others return an empty list. `head` computes the output from what the model
        returns. Without a head, the output is the model's contiguous logits or scores.
        """
        topology, config, shapes = self.topology, get_model_config(self.model_chunks[0]), prepared.shapes
        config.variable_seq_lengths = len(set(shapes)) > 1
        config.timers = MEGATRON_TIMERS
        prepared_microbatches: list[_Prepared] = list(
            zip(prepared.microbatches, prepared.model_input, seeds or [None] * len(shapes), strict=True)
        )

        def forward_step(iterator: Iterator[_Prepared], model_chunk: torch.nn.Module):
            microbatch, model_input, seed = next(iterator)
            if seed is not None:
                seed_microbatch(seed, topology.device)
            padding = model_input.select_padding(model_chunk, topology)
            masked = {} if padding is None else {"padding_mask": padding}
            output = model_chunk(model_input.tokens, None, None, packed_seq_params=model_input.packing, **masked)
            return output, lambda output, non_loss_data=False: read(
                microbatch.batch, output if head is None else head.logits(output), model_input.sharding
            )

        pipelined = topology.pipeline > 1
        if topology.virtual_pipeline > 1:
            forward_backward = schedules.forward_backward_pipelining_with_interleaving
        elif pipelined:
            forward_backward = schedules.forward_backward_pipelining_without_interleaving
        else:
            forward_backward = schedules.forward_backward_no_pipelining
        with (
            torch.set_grad_enabled(not forward_only),
            nullcontext() if head is None else head.in_use(),
            reading_numbers(self.model_chunks, prepared.experts, prepared.counts)
            if prepared.experts is not None or prepared.counts is not None
            else nullcontext(),
        ):
            results = forward_backward(
                forward_step_func=forward_step,
                data_iterator=[
                    _report_begun(prepared_microbatches),
                    *(iter(prepared_microbatches) for _ in self.model_chunks[1:]),
                ],
                model=self.model_chunks,
                num_microbatches=len(shapes),
                seq_length=shapes[0][1],
                micro_batch_size=shapes[0][0],
                forward_only=forward_only,
                collect_non_loss_data=collect,
                p2p_communicator=PlannedCommunicator(topology, config, shapes) if pipelined else None,
                pg_collection=topology.groups,
            )
        forget_graphs(self.model_chunks)
        BIASES.clear()
        return results

    @property
    def _has_experts(self) -> bool:
        return get_model_config(self.model_chunks[0]).num_moe_experts is not None

    def _prepare(self, microbatches: list[Microbatch], forward_only: bool) -> PreparedStep:
        """Return the model's input for the microbatches, on the host."""
        counts_experts = not forward_only and self._has_experts
        replayed = find_expert_layers(self.model_chunks) if ROUTED_EXPERTS in microbatches[0].batch else []
        microbatches, topology = self._fill_up(microbatches), self.topology
        model_input = [
            ModelInput.build(microbatch, topology, self.vocab_size, self.backend, counts_experts, replayed)
            for microbatch in microbatches
        ]
        shapes = [microbatch.shape(topology) for microbatch in microbatches]
        return PreparedStep(microbatches, *number_all_tokens(model_input), shapes)

    def _seed_dropout(self, microbatches: list[Microbatch], number: int) -> list[int]:
        """Return the seed of each microbatch's dropout, or an empty list if nothing is dropped."""
        if not self.has_dropout:
            return []
        tokens = [microbatch.batch["input_ids"].contiguous().numpy() for microbatch in self._fill_up(microbatches)]
        return [zlib.crc32(ids.tobytes(), number) for ids in tokens]

    def _fill_up(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """Return as many microbatches as the schedule needs: with interleaving, a multiple of the number of stages.

        To fill up, the shortest microbatch is repeated with zero loss weight.
        """
        missing = -len(microbatches) % self.topology.pipeline if self.topology.virtual_pipeline > 1 else 0
        if not missing:
            return microbatches
        shortest = min(microbatches, key=lambda microbatch: microbatch.shape(self.topology))
        return microbatches + [shortest.with_zero_weight()] * missing


def _in_double(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a scalar on the device. A Python number fills a new tensor, because a copy would wait for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _report_begun(microbatches: list[_Prepared]) -> Iterator[_Prepared]:
    """Yield the microbatches, and report before each one how many came earlier."""
    for begun, microbatch in enumerate(microbatches):
        report_progress(begun, len(microbatches), "microbatches")
        yield microbatch
