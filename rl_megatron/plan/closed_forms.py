"""Closed forms of the device memory of a rank. docs/sizing.md and docs/plan.md explain them.

Parameters, gradients and optimizer state are exact. Activations count only what the computation itself needs, and
assume that all experts get equally many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape, LatentShape, LayerKind, head_size
from rl_megatron.logprobs.linear import default_block_tokens
from rl_megatron.model.gradient_buffers import plan_gradient_buffers
from rl_megatron.model.layers.delta_rule import BLOCK
from rl_megatron.model.sharded_shape import ShardedShape, element_bytes, optimizer_bytes_per_element

GRADIENT_BYTES = 4  # gradients are summed in fp32


@dataclass(frozen=True)
class TrainingBytes:
    """The bytes of a model that is trained, on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.parameters + self.gradients + self.optimizer


def training_bytes(
    shape: ShardedShape, rank: int, *, precision: str, distributed: bool, overlap: bool = False
) -> TrainingBytes:
    """Return the exact bytes that a rank allocates for weights, gradients and optimizer state, without adapters.

    Args:
        shape: The model in its layout.
        rank: The rank, from 0 to the world size − 1.
        precision: "bf16" or "fp32".
        distributed: `optimizer.distributed`. If it is set and several ranks hold the same weights, weights and
            gradients are in aligned buffers.
        overlap: `optimizer.overlap`, which splits the buffers of the first stage into buckets.
    """
    rank_place = shape.place(rank)
    buffers = plan_gradient_buffers(shape, rank_place.stage, distributed=distributed, overlap=overlap)
    elements = sum(buffer.elements for buffer in buffers)
    if distributed and shape.has_replicas:
        optimizer_elements = sum(
            buffer.shard_elements(rank_place.expert_data if buffer.of_experts else rank_place.data)
            for buffer in buffers
        )
    else:
        optimizer_elements = elements
    return TrainingBytes(
        element_bytes(precision) * elements,
        GRADIENT_BYTES * elements,
        optimizer_bytes_per_element(precision) * optimizer_elements,
    )


def mean_training_bytes(shape: ShardedShape, stage: int, *, precision: str, distributed: bool) -> TrainingBytes:
    """Return a rank's bytes without alignment; the optimizer state is the mean over the ranks of the pipeline stage.

    With adapters, only trained modules have gradients and optimizer state. The function is fast enough for thousands of
    layouts. Unless the model is tiny, `training_bytes` exceeds the result by less than 1 %.

    Args:
        shape: The model in its layout.
        stage: The pipeline stage.
        precision: "bf16" or "fp32".
        distributed: `optimizer.distributed`.
    """
    dense, experts = shape.trained_elements(stage)
    shards, expert_shards = (shape.data_shards, shape.expert_shards) if distributed else (1, 1)
    # The last summand counts the frozen originals of modules that are trained whole beside adapters.
    whole = sum(shape.elements(stage)) + sum(shape.adapter_elements(stage)) + shape.whole_elements(stage)
    magnitudes = shape.magnitude_elements(stage)  # fp32 in any precision
    state = optimizer_bytes_per_element(precision) * ((dense - magnitudes) / shards + experts / expert_shards)
    return TrainingBytes(
        element_bytes(precision) * whole + element_bytes("fp32") * magnitudes,
        GRADIENT_BYTES * (dense + experts),
        round(state + optimizer_bytes_per_element("fp32") * magnitudes / shards),
    )


def attention_elements(model: ModelConfig, kind: LayerKind) -> int:
    """Return how many elements of a token's queries, keys, values and outputs backward needs, in all heads.

    The gated delta rule computes in fp32, so its elements count twice.
    """
    if kind.has_delta_rule:
        return _delta_rule_elements(DeltaShape.from_model(model))
    if model.kv_lora_rank is None:
        size = head_size(model)
        gates = 2 * model.attention_output_gate * size * model.num_attention_heads
        return (2 + model.qk_norm) * size * (model.num_attention_heads + model.num_query_groups) + gates
    shape = LatentShape.from_model(model)
    latents = 2 * (shape.latent + (model.q_lora_rank or 0)) + shape.rope  # before and after their norms
    return latents + model.num_attention_heads * 2 * (shape.query + shape.value)


def _delta_rule_elements(shape: DeltaShape) -> int:
    value_head_elements = 6 * shape.value + 4 * shape.key + 3 * BLOCK + shape.key * shape.value // BLOCK
    in_fp32 = 6 * shape.key + 2 * BLOCK + shape.values * value_head_elements
    return shape.groups * (shape.projected + (shape.kernel + 2) * shape.convolved + 2 * in_fp32)


def layer_activation_elements(model: ModelConfig, kind: LayerKind) -> int:
    """Return the elements that a layer keeps for the backward pass of one token, without recomputation.

    All tensor-parallel ranks together keep that many; under sequence parallelism, they split all of these elements.
    """
    outside = 4 * model.hidden_size + attention_elements(model, kind)
    if not kind.has_experts:
        return outside + 3 * model.ffn_hidden_size
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = model.experts_per_token * (2 * model.hidden_size + 3 * width)
    return outside + experts + 3 * (model.shared_expert_ffn_hidden_size or 0)


def reading_bytes(shape: ShardedShape, stage: int, *, tokens: int, precision: str) -> float:
    """Return the temporary bytes on a rank of a stage while the embedded engine reads prompts into its cache.

    Activations between attention and MLP are not split over ranks then. megatron-core keeps a layer's input and the
    embeddings until its functions return.

    Args:
        shape: The model in its layout.
        stage: The pipeline stage.
        tokens: The tokens of a forward pass.
        precision: "bf16" or "fp32".
    """
    model, tensor = shape.model, shape.parallel.tensor
    kinds = shape.layer_counts(stage)
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size
    expert_elements = model.experts_per_token * (4 * model.hidden_size + 2 * width)
    shared_elements = 3 * (model.shared_expert_ffn_hidden_size or 0) / tensor
    within = max(
        *(attention_elements(model, kind) / tensor for kind in kinds),
        *(
            expert_elements + shared_elements if kind.has_experts else 3 * model.ffn_hidden_size / tensor
            for kind in kinds
        ),
    )
    return element_bytes(precision) * tokens * (4 * model.hidden_size + within)


def activation_bytes(
    shape: ShardedShape, stage: int, *, tokens: int, precision: str, microbatches: int | None = None
) -> float:
    """Return the peak bytes of activations on a rank of a stage during a step.

    Args:
        shape: The model in its layout.
        stage: The pipeline stage.
        tokens: The tokens of a microbatch, before it is split over ranks.
        precision: "bf16" or "fp32".
        microbatches: The number of microbatches of an optimizer step; None means enough to fill the pipeline.
    """
    model, held = shape.model, _microbatches_in_flight(shape, stage, microbatches)
    bytes_by_kind = [
        (count, layer_activation_bytes(shape, kind, tokens=tokens, precision=precision))
        for kind, count in shape.layer_counts(stage).items()
    ]
    if model.recompute == "full":
        between = tokens / shape.parallel.context / (shape.parallel.tensor if shape.parallel.sequence else 1)
        kept = element_bytes(precision) * between * model.hidden_size * sum(count for count, _ in bytes_by_kind)
        return held * kept + max((size for _, size in bytes_by_kind), default=0.0)
    return held * sum(count * size for count, size in bytes_by_kind)


def backward_bytes(shape: ShardedShape, stage: int, *, tokens: int, precision: str) -> float:
    """Return the bytes of temporary tensors during the backward pass of an MLP.

    These are the recomputed activation, and the gradients of the gate and up projections.

    Args:
        shape: The model in its layout.
        stage: The pipeline stage.
        tokens: The tokens of a microbatch, before it is split over ranks.
        precision: "bf16" or "fp32".
    """
    model, parallel = shape.model, shape.parallel
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size
    widest = max(
        model.experts_per_token * width if kind.has_experts else model.ffn_hidden_size
        for kind in shape.layer_counts(stage)
    )
    return element_bytes(precision) * tokens / parallel.context / parallel.tensor * 3 * widest


def layer_activation_bytes(shape: ShardedShape, kind: LayerKind, *, tokens: int, precision: str) -> float:
    """Return the bytes that a layer keeps on one rank for a microbatch's backward pass, without recomputation.

    Args:
        shape: The model in its layout.
        kind: The kind of the layer.
        tokens: The tokens of a microbatch, before it is split over ranks.
        precision: "bf16" or "fp32".
    """
    model, parallel = shape.model, shape.parallel
    whole = 4 * model.hidden_size  # between attention and MLP; the rest is split over tensor-parallel ranks
    rest = layer_activation_elements(model, kind) - whole
    if kind.has_experts:  # ranks that split an expert gather its tokens
        rest += (parallel.expert_tensor - 1) * model.experts_per_token * model.hidden_size
    local = tokens / parallel.context
    between = local / (parallel.tensor if parallel.sequence else 1)
    elements = between * whole + local / parallel.tensor * rest
    if kind.has_delta_rule:
        return element_bytes(precision) * elements
    keys = tokens / parallel.tensor  # under context parallelism, a rank gathers the keys of whole sequences
    if parallel.context > 1:
        elements += keys * cached_elements(model)
    if model.sliding_window is not None or precision == "fp32":
        elements += keys * _repeated_elements(model)
    return element_bytes(precision) * elements


def _repeated_elements(model: ModelConfig) -> int:
    """Return the elements of a token's keys and values after repetition for each query head; 0 without grouped queries.

    GPUs need the repetition because the kernel for grouped queries supports neither windows nor fp32.
    """
    times = model.num_attention_heads // model.num_query_groups
    return times * cached_elements(model) if times > 1 else 0


def _microbatches_in_flight(shape: ShardedShape, stage: int, microbatches: int | None) -> float:
    """Return how many microbatches' activations a stage holds at once; 1 means the activations of all its layers.

    With p stages of v model chunks, the first stage holds 1 + (p − 1) / (p · v) times as many as without interleaving.
    """
    parallel = shape.parallel
    depth, per_stage = parallel.pipeline, parallel.virtual_pipeline
    if per_stage == 1:
        held = float(depth - stage)
    else:  # the passes of the interleaved warmup and the one that runs, each through 1/v of the layers
        held = (2 * (depth - stage - 1) + (per_stage - 1) * depth + 1) / per_stage
    return held if microbatches is None else min(held, float(microbatches))


def logits_bytes(shape: ShardedShape, *, tokens: int, precision: str, fused_head: bool) -> float:
    """Return the bytes of the logits of one microbatch on the last stage. Their gradient is written over them.

    Args:
        shape: The model in its layout.
        tokens: The tokens of a microbatch, before it is split over ranks.
        precision: "bf16" or "fp32".
        fused_head: `train.fused_head`, which computes logits for one token block at a time.
    """
    places = tokens / shape.parallel.context
    if fused_head:
        places = min(places, default_block_tokens(shape.vocab_shard, "cuda"))
    return element_bytes(precision) * places * shape.vocab_shard


def cache_bytes(shape: ShardedShape, stage: int, *, sequences: int, columns: int, precision: str) -> int:
    """Return the bytes of the embedded engine's cache on a rank of a stage: keys, values, and delta-rule states.

    Args:
        shape: The model in its layout.
        stage: The pipeline stage.
        sequences: The sequences that are decoded together.
        columns: The tokens of the longest prompt plus those of a completion.
        precision: "bf16" or "fp32".
    """
    slots, width = -(-sequences // 8) * 8 + 1, -(-columns // 32) * 32
    token = cached_elements(shape.model) * element_bytes(precision)
    layer_bytes = [
        count * (_state_bytes(DeltaShape.from_model(shape.model), precision) if kind.has_delta_rule else width * token)
        for kind, count in shape.layer_counts(stage).items()
    ]
    return slots * sum(layer_bytes) // shape.parallel.tensor


def _state_bytes(shape: DeltaShape, precision: str) -> int:
    """Return the bytes of a sequence's states in a layer with the gated delta rule; the recurrent state is in fp32."""
    memory = element_bytes("fp32") * shape.values * shape.key * shape.value
    return shape.groups * (memory + element_bytes(precision) * (shape.kernel - 1) * shape.convolved)


def cached_elements(model: ModelConfig) -> int:
    """Return the cached elements of a token in a layer: keys and values of all heads, also with latent attention."""
    if model.kv_lora_rank is None:
        return 2 * head_size(model) * model.num_query_groups
    head_shape = LatentShape.from_model(model)
    return (head_shape.query + head_shape.value) * model.num_attention_heads
