"""Formulas for the floating-point operations of a rank: matrix products, attention for given lengths, and the head.

They are exact, and count like torch's FlopCounterMode: a multiplication and an addition are two operations, and causal
attention counts as if all scores were computed. The share of scores that kernels compute is counted separately. The
only assumption is that every rank gets the same number of tokens for its experts. tests/unit/model/test_flops.py
compares the counts with what a `MegatronPolicy` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape, LatentShape, LayerKind, head_size
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.logprobs.linear import default_block_tokens
from rl_megatron.model.microbatch_shape import NO_DELTA, MicrobatchShape, count_delta_flops
from rl_megatron.model.sharded_shape import Head, ShardedShape


@dataclass(frozen=True)
class ForwardFlops:
    """The operations of the forward pass of one microbatch on one rank.

    Attributes:
        linear: The linear layers of all transformer layers.
        attention: The scores of attention and their products with values.
        attention_backward: The operations of the backward pass of attention, which computes the scores again.
        head: The head.
        head_again: The part of the head that a backward pass computes again.
        computed_share: The share of `attention` that kernels compute; causal kernels skip later tokens.
        needed_share: The share of `attention` that the result depends on.
    """

    linear: int
    attention: int
    attention_backward: int
    head: int
    head_again: int
    computed_share: float
    needed_share: float

    @property
    def total(self) -> int:
        """Return the operations of a forward pass."""
        return self.linear + self.attention + self.head

    def with_backward(self, recompute: str) -> int:
        """Return the operations of a forward and a backward pass, including recomputation.

        `recompute` is the value of `model.recompute`.
        """
        again = {"none": 0, "selective": self.attention, "full": self.linear + self.attention}[recompute]
        return self.total + 2 * (self.linear + self.head) + self.attention_backward + again + self.head_again

    @property
    def computed(self) -> ForwardFlops:
        """Return the operations without the attention scores that kernels skip, for estimates of times."""
        share = self.computed_share
        return replace(
            self,
            attention=round(share * self.attention),
            attention_backward=round(share * self.attention_backward),
        )

    @property
    def of_model(self) -> float:
        """Return the operations that count for MFU in a forward and a backward pass.

        Recomputation and attention to later tokens do not count.
        """
        return 3 * (self.linear + self.needed_share * self.attention + self.head)


@lru_cache(maxsize=64)  # several estimates of a layout repeat the same call
def count_forward_flops(
    shape: ShardedShape,
    stage: int,
    microbatch: MicrobatchShape,
    *,
    fused_head: bool,
    all_tokens: bool = False,
    block_tokens: int | None = None,
    context_rank: int = 0,
) -> ForwardFlops:
    """Return the operations of a microbatch on a rank of a pipeline stage.

    Args:
        shape: The model in its layout.
        stage: The pipeline stage.
        microbatch: The microbatch.
        fused_head: `train.fused_head`, which skips tokens whose prediction is not read.
        all_tokens: Whether the predictions of all tokens are read, as for logprobs.
        block_tokens: The number of tokens of a block of the fused head, or None for the default on a GPU.
        context_rank: The context-parallel rank. The number of tokens that its fused head reads depends on it.
    """
    model, parallel = shape.model, shape.parallel
    counts = shape.layer_counts(stage).items()
    linear = sum(count * count_layer_flops(shape, kind, microbatch.tokens) for kind, count in counts)
    key_size, value_size = _get_head_sizes(model)
    windows, context = shape.windows(stage).items(), parallel.context
    pairs = sum(count * microbatch.pairs(context, window, context_rank) for window, count in windows)
    computed = sum(count * microbatch.computed_pairs(context, window) for window, count in windows)
    needed = sum(count * microbatch.needed_pairs(context, window) for window, count in windows)
    per_pair = 2 * model.num_attention_heads // parallel.tensor * (key_size + value_size)
    delta_layers = sum(count for kind, count in counts if kind.has_delta_rule)
    delta = microbatch.delta_rule(model, parallel.tensor * context).times(delta_layers) if delta_layers else NO_DELTA
    attention = per_pair * pairs + delta.forward
    head = again = 0
    if stage == parallel.pipeline - 1:
        shards = parallel.tensor if parallel.sequence else 1  # the ranks that sequence parallelism spreads tokens over
        read = _count_read_tokens(shape, microbatch, all_tokens, shards, context_rank) if fused_head else None
        head, again = _count_head_flops(shape, microbatch.tokens, read, block_tokens)
    return ForwardFlops(
        linear,
        attention,
        per_pair // (key_size + value_size) * pairs * (3 * key_size + 2 * value_size) + delta.backward,
        head,
        again,
        computed_share=(per_pair * computed + delta.forward) / attention if attention else 1.0,
        needed_share=(per_pair * needed + delta.needed) / attention if attention else 1.0,
    )


def count_model_flops(
    model: ModelConfig, vocab_size: int, head: Head, lengths: Sequence[int], tree: PrefixTree | None = None
) -> float:
    """Return the operations that count for MFU in a forward and a backward pass over whole sequences.

    Padding, recomputation and attention to later tokens do not count. The head counts at every token.

    Args:
        model: The model.
        vocab_size: The vocabulary's size if `model.vocab_size` is null.
        head: The model's head.
        lengths: The lengths of the sequences.
        tree: The tree of the sequences if they share tokens. Shared tokens count once.
    """
    shape = ShardedShape(model, ParallelConfig(), 1, vocab_size, head)
    alone = tuple(lengths) if tree is None else tuple(segment.length for segment in tree.segments)
    sequences = MicrobatchShape(alone, alone, max(lengths), prompt_tokens=0, is_packed=True, tree=tree)
    return count_forward_flops(shape, 0, sequences, fused_head=False).of_model


def count_layer_flops(shape: ShardedShape, kind: LayerKind, tokens: int) -> int:
    """Return the operations of a layer's matrix products in the forward pass, on one rank.

    `tokens` is the number of the microbatch's tokens over all ranks that share it.
    """
    model, parallel = shape.model, shape.parallel
    local = tokens // parallel.context
    # Sequence parallelism shards the tokens that are multiplied by weights that tensor parallelism does not split.
    between = local // parallel.tensor if parallel.sequence else local
    split, whole = _count_layer_weights(model, kind)
    return 2 * (local * split // parallel.tensor + between * whole)


def count_decoding_flops(shape: ShardedShape, stage: int, *, columns: float) -> float:
    """Return the operations, on a rank of a stage, for decoding one token that attends to `columns` cached tokens.

    Decoding splits neither tokens over context-parallel ranks nor hidden states over tensor-parallel ranks.
    """
    model, tensor = shape.model, shape.parallel.tensor
    attention = 2 * model.num_attention_heads // tensor * columns * sum(_get_head_sizes(model))
    total = 0.0
    for kind, count in shape.layer_counts(stage).items():
        split, whole = _count_layer_weights(model, kind)
        mixing = (
            count_delta_flops(DeltaShape.from_model(model), 1).forward / tensor if kind.has_delta_rule else attention
        )
        total += count * (mixing + 2 * (split / tensor + whole))
    return total + (2 * model.hidden_size * shape.vocab_shard if stage == shape.parallel.pipeline - 1 else 0)


def _count_layer_weights(model: ModelConfig, kind: LayerKind) -> tuple[int, int]:
    """Return how many elements of a layer's matrices one token is multiplied by.

    The first number counts matrices that tensor parallelism splits, and the second number all others.
    """
    split, whole = _count_delta_rule_weights(model) if kind.has_delta_rule else _count_attention_weights(model)
    if not kind.has_experts:
        return split + 3 * model.hidden_size * model.ffn_hidden_size, whole
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size
    split += 3 * model.hidden_size * (model.shared_expert_ffn_hidden_size or 0)
    whole += model.hidden_size * ((model.num_experts or 0) + model.shared_expert_gate)
    return split, whole + model.experts_per_token * 3 * model.hidden_size * width


def _count_attention_weights(model: ModelConfig) -> tuple[int, int]:
    """Return the number of elements of attention's matrices that tensor parallelism splits, and that of its others."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank is None:
        query_heads = (2 + model.attention_output_gate) * heads
        return hidden * head_size(model) * (query_heads + 2 * model.num_query_groups), 0
    shape = LatentShape.from_model(model)
    split = heads * (shape.latent * shape.key_and_value + shape.value * hidden)
    whole = hidden * (shape.latent + shape.rope)
    if model.q_lora_rank is None:
        return split + hidden * heads * shape.query, whole
    return split + model.q_lora_rank * heads * shape.query, whole + hidden * model.q_lora_rank


def _count_delta_rule_weights(model: ModelConfig) -> tuple[int, int]:
    """Return the number of elements of the delta rule's matrices, all split by tensor parallelism, and 0."""
    shape = DeltaShape.from_model(model)
    return model.hidden_size * shape.groups * (shape.projected + shape.values * shape.value), 0


def _get_head_sizes(model: ModelConfig) -> tuple[int, int]:
    """Return the size of a head's queries and keys, and the size of its values."""
    if model.kv_lora_rank is None:
        return head_size(model), head_size(model)
    shape = LatentShape.from_model(model)
    return shape.query, shape.value


def _count_head_flops(
    shape: ShardedShape, tokens: int, read: list[int] | None, block_tokens: int | None
) -> tuple[int, int]:
    """Return the operations of the head in the forward pass, and those that the backward pass repeats.

    `read` is the number of tokens that the fused head reads on each sequence-parallel rank, or None without the fused
    head.
    """
    hidden, local = shape.model.hidden_size, tokens // shape.parallel.context
    if shape.head == "score":
        return 2 * local * hidden, 0
    per_token = 2 * hidden * shape.vocab_shard
    if read is None:
        return local * per_token, 0
    places, shards = max(read), len(read)  # all ranks compute as many tokens as the rank with the most
    if not places:
        return 0, 0
    block = block_tokens or default_block_tokens(shape.vocab_shard, "cuda")
    blocks = -(-places * shards // max(shards, block))
    longest = -(-places // blocks)
    last = max(0, places - longest * (blocks - 1))  # backward begins with the last block, whose logits are kept
    return places * shards * per_token, (places - last) * shards * per_token


def _count_read_tokens(
    shape: ShardedShape, microbatch: MicrobatchShape, all_tokens: bool, shards: int, context_rank: int
) -> list[int]:
    """Return, for each sequence-parallel rank, the number of its tokens whose predictions are read."""
    context = shape.parallel.context
    sequences = [
        [(part, first, end) for part in _list_positions(length, context, context_rank)]
        for length, (first, end) in zip(
            microbatch.padded_lengths, microbatch.predicting(all_tokens=all_tokens), strict=True
        )
    ]
    if microbatch.is_packed:
        side_by_side = [[part for parts in sequences for part in parts]]
    else:
        side_by_side = sequences
    width = microbatch.tokens // context // len(side_by_side) // shards
    return [
        sum(_count_overlap(parts, (rank + 1) * width) - _count_overlap(parts, rank * width) for parts in side_by_side)
        for rank in range(shards)
    ]


def _count_overlap(parts: list[tuple[range, int, int]], limit: int) -> int:
    """Return how many of the first `limit` positions of all parts are in `range(first, end)` of their part.

    A part is (positions, first, end).
    """
    total = 0
    for part, first, end in parts:
        within = min(len(part), limit)
        total += max(0, min(end, part.start + within) - max(first, part.start))
        limit -= within
    return total


def _list_positions(length: int, context: int, context_rank: int) -> list[range]:
    """Return the positions of a sequence on a context-parallel rank: all, or two slices in zigzag order."""
    if context == 1:
        return [range(length)]
    size = length // (2 * context)
    return [range(i * size, (i + 1) * size) for i in (context_rank, 2 * context - 1 - context_rank)]
