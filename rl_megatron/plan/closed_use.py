"""An estimate of what a rank uses in each phase, by closed forms alone: for the search and for `--closed-forms`.

Parameters, gradients, optimizer state and FLOPs are exact, up to alignment. Activations, collectives, operators, and
the bytes that operators read and write are estimates: docs/plan.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation.decoder import PROMPT_TOKENS
from rl_megatron.model.flops import ForwardFlops, count_decoding_flops, count_forward_flops
from rl_megatron.model.lora.targets import build_weight_table
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan import closed_forms
from rl_megatron.plan.phases import Collective, PhaseName, PhaseUse, RankKind, RankUse
from rl_megatron.plan.settings import BatchShape, Settings

# The numbers of operators, counted on the portable layers: of a layer's forward pass without its experts, of one
# expert, of a microbatch's loss and its gradient, and of an optimizer step.
_OPERATORS_PER_LAYER, _OPERATORS_PER_EXPERT, _OPERATORS_PER_LOSS, _OPERATORS_PER_OPTIMIZER = 14, 8, 300, 20
# How often a forward and a backward pass together read or write the bytes that a layer keeps for backward.
_PASSES_OVER_ACTIVATIONS = 14
_FORWARD_PASSES = 5  # how many of these accesses are in the forward pass
# Bytes that the optimizer reads and writes in bf16 training, as a multiple of the size of its state: the state is read
# and written, and gradient and weight are moved once.
_UPDATE_TRAFFIC = 2.5


def estimate_use(settings: Settings, stage: int) -> RankUse:
    """Estimate what a rank of a pipeline stage uses in each phase of a step."""
    stages = settings.shape.parallel.pipeline
    kind: RankKind = "last stage" if stage == stages - 1 else "middle stage" if stage else "first stage"
    phases = tuple(_Phases(settings, stage).list_all())
    if settings.servers is not None:
        phases = settings.servers.add_memory_to(phases)
    return RankUse(kind, stage * settings.shape.stage_ranks, phases)


class _Phases:
    """The phases of a step on one rank."""

    def __init__(self, settings: Settings, stage: int):
        self._settings, self._stage, self._shape = settings, stage, settings.shape
        parallel = self._shape.parallel
        self._kept = settings.count_static_bytes(stage)
        self._size = closed_forms.element_bytes(settings.precision)
        self._weights = self._size * sum(self._shape.elements(stage))
        self._is_last = stage == parallel.pipeline - 1
        self._kinds = self._shape.layer_counts(stage)
        self._layers = sum(self._kinds.values())
        self._expert_layers = sum(count for kind, count in self._kinds.items() if kind.has_experts)
        self._dense_layers = self._layers - self._expert_layers
        self._delta_layers = sum(count for kind, count in self._kinds.items() if kind.has_delta_rule)
        local_experts = (self._shape.model.num_experts or 0) // parallel.expert
        self._operators = (
            self._layers * _OPERATORS_PER_LAYER + self._expert_layers * local_experts * _OPERATORS_PER_EXPERT
        )

    def list_all(self) -> Iterator[PhaseUse]:
        """Yield the phases in their order."""
        settings, kept = self._settings, self._kept
        yield PhaseUse("build", kept, kept.total)
        if settings.bucket_bytes:
            yield self._with_offload(self._refit())
        if settings.completions:
            yield self._generate()
        policy, *critics = settings.models
        if settings.recomputes_logprobs:
            yield self._forward("logprobs", policy[0])
        if settings.reference is not None:
            yield self._forward("reference", policy[0])
        for critic in critics:
            yield self._forward("values", critic[0])
            yield self._train("train_critic", *critic)
        yield self._train("train", *policy)
        written = kept.parameters - (self._weights if settings.copies_on_device else 0)
        yield PhaseUse("save", kept, kept.total, host_bytes=kept.optimizer + written)

    def _train(self, name: PhaseName, shape: ShardedShape, distributed: bool) -> PhaseUse:
        settings, recomputes = self._settings, shape.model.recompute == "full"
        held = closed_forms.mean_training_bytes(
            shape, self._stage, precision=settings.precision, distributed=distributed
        )
        batch, steps = settings.batches.training, settings.batches.optimizer_steps
        activations = closed_forms.activation_bytes(
            shape, self._stage, tokens=settings.microbatch.tokens, precision=settings.precision,
            microbatches=settings.microbatches,
        )  # fmt: skip
        logits = self._logits_bytes(shape, batch)
        backward = closed_forms.backward_bytes(
            shape, self._stage, tokens=settings.microbatch.tokens, precision=settings.precision
        )
        activations += max(0.0, backward - logits)  # the logits are freed before the layers' backward pass
        count, passes = settings.mean_number(batch, steps), 4 if recomputes else 3
        return PhaseUse(
            name,
            replace(self._kept, activations=round(activations), logits=logits),
            self._kept.total,
            flops=round(
                settings.computed_share
                * self._flops(shape, batch, lambda flops: flops.with_backward(shape.model.recompute), all_tokens=False)
            ),
            kernels=count * (passes * self._operators + self._is_last * _OPERATORS_PER_LOSS)
            + steps * _OPERATORS_PER_OPTIMIZER,
            memory_bytes=round(
                settings.computed_share
                * (_PASSES_OVER_ACTIVATIONS + _FORWARD_PASSES * recomputes)
                * self._layers
                * self._bytes_of_layer(batch.tokens)
                + count * passes * held.parameters
                + steps * _UPDATE_TRAFFIC * held.optimizer
            ),
            collectives=(
                *self._list_layer_collectives(batch, count, forwards=2 if recomputes else 1, backwards=1),
                *self._list_gradient_collectives(shape, distributed),
            ),
        )

    def _forward(self, name: PhaseName, shape: ShardedShape) -> PhaseUse:
        settings, batch = self._settings, self._settings.batches.rollout
        count = settings.mean_number(batch)
        moves = settings.reference == "offload" and settings.shape.lora is None
        arriving = self._weights if name == "reference" and moves else 0
        return PhaseUse(
            name,
            replace(
                self._kept, parameters=self._kept.parameters + arriving,
                activations=round(self._bytes_of_layer(batch.largest.tokens)), logits=self._logits_bytes(shape, batch),
            ),
            self._kept.total,
            flops=round(
                settings.computed_share * self._flops(shape, batch, lambda flops: flops.total, all_tokens=True)
            ),
            kernels=count * self._operators,
            memory_bytes=round(
                settings.computed_share * _FORWARD_PASSES * self._layers * self._bytes_of_layer(batch.tokens)
                + count * self._weights
            ),
            collectives=tuple(self._list_layer_collectives(batch, count, forwards=1, backwards=0)),
            host_bytes=arriving,
        )  # fmt: skip

    def _generate(self) -> PhaseUse:
        """Return what the embedded engine uses to read the prompts and then to generate token by token."""
        settings, shape = self._settings, self._shape
        together, prompt, tensor = settings.decoded_together, settings.prompt_tokens, shape.parallel.tensor
        columns = prompt + settings.response_tokens
        cache = closed_forms.cache_bytes(
            shape, self._stage, sequences=together, columns=columns, precision=settings.precision
        )
        new = settings.mean_response_tokens
        passes, width = new * settings.completions / together, prompt + new / 2
        prompt_flops = prompt * count_decoding_flops(shape, self._stage, columns=prompt)
        token_flops = count_decoding_flops(shape, self._stage, columns=width)
        logits = 4 * together * shape.vocab_shard * 2 if self._is_last else 0  # fp32, and a copy to sample from
        texts = min(settings.prompts, together, max(1, PROMPT_TOKENS["cuda"] // max(1, prompt)))
        reading = closed_forms.reading_bytes(
            shape, self._stage, tokens=texts * (prompt - 1), precision=settings.precision
        )
        peak = replace(self._kept, kv_cache=cache, logits=logits)
        if reading > logits:
            peak = replace(self._kept, kv_cache=cache, activations=round(reading))
        hidden = together * shape.model.hidden_size * self._size
        exchanges = []
        if tensor > 1:
            exchanges.append(Collective("all_reduce", "tensor", tensor, hidden, round(passes * 2 * self._layers)))
        if self._expert_layers:
            exchanges += self._list_expert_collectives(hidden * shape.model.experts_per_token, round(passes), 1)
        return PhaseUse(
            "generate",
            peak,
            self._kept.total,
            flops=round(settings.prompts * prompt_flops + settings.completions * new * token_flops),
            kernels=round(passes * self._operators),
            memory_bytes=round(passes * (self._weights + cache * width / columns)),
            collectives=tuple(exchanges),
        )

    def _refit(self) -> PhaseUse:
        """Return what a weight sync uses: it fills its buckets while the policy's gradients are freed."""
        settings, dense_and_experts = self._settings, sum(self._shape.elements(self._stage))
        alone = replace(self._shape, parallel=ParallelConfig(), world_size=1)  # every rank fills buckets of all weights
        whole = sum(alone.elements(0)) * self._size
        largest = _largest_tensor(self._shape.model, alone.vocab_shard) * self._size  # this tensor has its own bucket
        buffers = min(whole, max(settings.bucket_bytes, largest))
        if not settings.sends_adapter:
            buffers *= min(2, -(-whole // settings.bucket_bytes))
        else:  # engines get the base model when they start, and its buffer is the largest
            whole = (sum(alone.adapter_elements(0)) + alone.whole_elements(0)) * self._size
        number = -(-whole // settings.bucket_bytes)
        sums = Collective("all_reduce", "world", self._shape.world_size, whole // number, number)
        gradients = self._kept.gradients - closed_forms.GRADIENT_BYTES * dense_and_experts
        peak = replace(self._kept, gradients=gradients, buffers=buffers)
        return PhaseUse("refit", peak, peak.total - buffers, memory_bytes=4 * whole, collectives=(sums,))

    def _with_offload(self, refit: PhaseUse) -> PhaseUse:
        """Return the use of a weight sync, with the optimizer state on the host if servers need the memory."""
        settings, (shape, distributed) = self._settings, self._settings.models[0]
        if settings.servers is None or not settings.servers.releases_memory:
            return refit
        moved = closed_forms.mean_training_bytes(
            shape, self._stage, precision=settings.precision, distributed=distributed
        ).optimizer
        peak = replace(refit.peak, optimizer=refit.peak.optimizer - moved)
        return replace(refit, peak=peak, after_bytes=refit.after_bytes - moved, host_bytes=refit.host_bytes + moved)

    def _list_layer_collectives(
        self, batch: BatchShape, count: int, *, forwards: int, backwards: int
    ) -> Iterator[Collective]:
        """Yield the layers' collectives for `count` microbatches with these numbers of forward and backward passes."""
        model, parallel = self._shape.model, self._shape.parallel
        tokens = self._settings.computed_share * batch.tokens / count  # the mean of a microbatch
        local = tokens / parallel.context
        between = local / parallel.tensor if parallel.sequence else local
        both, attentions = forwards + backwards, count * (self._layers - self._delta_layers)
        split_mlps = self._dense_layers + self._expert_layers * (model.shared_expert_ffn_hidden_size is not None)
        split = count * (self._layers + split_mlps)  # attention and MLPs whose matrices are split
        hidden = round(local * model.hidden_size * self._size)
        if parallel.tensor > 1 and parallel.sequence:  # the backward pass gathers each input once more
            yield Collective("all_gather", "tensor", parallel.tensor, hidden, split * (both + backwards))
            yield Collective("reduce_scatter", "tensor", parallel.tensor, hidden, split * both)
        elif parallel.tensor > 1:
            yield Collective("all_reduce", "tensor", parallel.tensor, hidden, split * both)
        if parallel.context > 1:
            keys = round(closed_forms.cached_elements(model) * tokens / parallel.tensor * self._size)
            yield Collective("all_gather", "context", parallel.context, keys, attentions * forwards)
            if backwards:
                yield Collective("reduce_scatter", "context", parallel.context, keys, attentions * backwards)
        if parallel.context > 1 and self._delta_layers:  # from slices of tokens to slices of head groups, and back
            shape, calls = DeltaShape.from_model(model), count * self._delta_layers * both
            for width in (shape.recurrent, shape.values * shape.value):
                sent = round(local * shape.groups * width / parallel.tensor * self._size)
                yield Collective("all_to_all", "context", parallel.context, sent, calls)
        if self._expert_layers:
            routed = round(between * model.experts_per_token * model.hidden_size * self._size)
            yield from self._list_expert_collectives(routed, count, both)
        if parallel.pipeline > 1:
            sent, per_stage = round(between * model.hidden_size * self._size), parallel.virtual_pipeline
            # A forward pass sends to the next stage, a backward pass to the one before. Recomputation sends nothing.
            earlier, later = per_stage - (self._stage == 0), per_stage - self._is_last
            yield Collective("send", "pipeline", parallel.pipeline, sent, count * (later + backwards * earlier))
            yield Collective("recv", "pipeline", parallel.pipeline, sent, count * (earlier + backwards * later))

    def _list_expert_collectives(self, routed: int, count: int, passes: int) -> Iterator[Collective]:
        """Yield the collectives that send tokens to experts and back, in `passes` passes of `count` microbatches.

        `routed` is the size in bytes of a rank's tokens in a microbatch, counted once for each of their experts.
        """
        parallel, calls = self._shape.parallel, count * self._expert_layers * passes
        if parallel.expert > 1:
            yield Collective("all_to_all", "expert", parallel.expert, routed, 2 * calls)
        if parallel.expert_tensor > 1:
            yield Collective("all_to_all", "expert", parallel.expert_tensor, routed * parallel.expert_tensor, 2 * calls)

    def _list_gradient_collectives(self, shape: ShardedShape, distributed: bool) -> Iterator[Collective]:
        """Yield the collectives of optimizer steps: gradients are summed, and updated weights are gathered."""
        steps = self._settings.batches.optimizer_steps
        shards = (shape.data_shards, shape.expert_shards)
        for elements, size in zip(shape.elements(self._stage), shards, strict=True):
            if size < 2 or not elements:
                continue
            gradients = closed_forms.GRADIENT_BYTES * elements
            if distributed:
                yield Collective("reduce_scatter", "data", size, gradients, steps)
                # megatron-core has an optimizer for dense weights and one for experts, and each gathers all weights.
                gathers = steps * (2 if self._expert_layers else 1)
                yield Collective("all_gather", "data", size, self._size * elements, gathers)
            else:
                yield Collective("all_reduce", "data", size, gradients, steps)

    def _bytes_of_layer(self, tokens: int) -> float:
        """Return the bytes that the stage's largest layer keeps for the backward pass of `tokens` tokens."""
        return max(
            closed_forms.layer_activation_bytes(self._shape, kind, tokens=tokens, precision=self._settings.precision)
            for kind in self._kinds
        )

    def _logits_bytes(self, shape: ShardedShape, batch: BatchShape) -> int:
        settings = self._settings
        if not self._is_last or shape.head == "score":
            return 0
        return round(
            closed_forms.logits_bytes(
                shape, tokens=batch.largest.tokens, precision=settings.precision, fused_head=settings.fused_head
            )
        )

    def _flops(
        self,
        shape: ShardedShape,
        batch: BatchShape,
        count_microbatch: Callable[[ForwardFlops], int],
        *,
        all_tokens: bool,
    ) -> int:
        """Return the operations of all microbatches of a batch, each counted by `count_microbatch`."""
        return sum(
            count
            * count_microbatch(
                count_forward_flops(
                    shape, self._stage, microbatch, fused_head=self._settings.fused_head, all_tokens=all_tokens
                )
            )
            for microbatch, count in batch.parts
        )


@lru_cache(maxsize=256)
def _largest_tensor(model: ModelConfig, vocab_size: int) -> int:
    """Return the elements of the largest Hugging Face tensor: an embedding, or the stacked experts of gpt-oss."""
    return max(math.prod(shape) for shape in build_weight_table(model, vocab_size).hf_shapes.values())
