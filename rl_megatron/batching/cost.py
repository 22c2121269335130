"""The cost of training on a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape, LatentShape, LayerKind, head_size


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence of l tokens with causal attention: cost(l) = per_token · l + per_pair · l².

    In FLOPs of one forward and backward pass:

        per_token = 6 · (matmul parameters that a token passes through)
        per_pair  = 6 · layers with attention · heads · (head_dim of keys + head_dim of values) / 2

    A matmul parameter takes 2 FLOPs per token in the forward pass (multiply and add), and 4 in the backward pass, which
    computes two gradients. Attention has two products, queries with keys and probabilities with values. Each takes
    2·l²·heads·head_dim FLOPs per layer in the forward pass (half as many if causal), and twice as many in the backward
    pass as in the forward pass.

    Plans depend only on the ratio of `per_token` and `per_pair`. The default cost is the number of tokens.

    Attributes:
        per_token: At least 0.
        per_pair: At least 0. `per_token` or `per_pair` is above 0.
    """

    per_token: float = 1.0
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        if min(self.per_token, self.per_pair) < 0 or self.per_token == self.per_pair == 0:
            raise ValueError(
                f"SequenceCost(per_token={self.per_token}, per_pair={self.per_pair}): neither may be negative, and one "
                f"must be above 0."
            )

    def __call__(self, length: int) -> float:
        return (self.per_token + self.per_pair * length) * length

    @classmethod
    def from_model(cls, model: ModelConfig, vocab_size: int) -> Self:
        """Return the cost in FLOPs of a decoder.

        It includes attention's projections, the three SwiGLU matrices (with a mixture of experts: the router and the
        experts that a token visits), and the output head, even if tied to the embedding. It ignores norms, biases, the
        embedding lookup, recomputation (`model.recompute`), and the savings of a sliding window. The gated delta rule
        adds to `per_token` alone.
        """
        attention, width = _count_attention(model)
        with_delta_rule = sum(LayerKind.from_model(model, layer).has_delta_rule for layer in range(model.num_layers))
        with_attention = model.num_layers - with_delta_rule
        mlp = 3 * model.hidden_size * model.ffn_hidden_size
        dense_layers = model.num_layers if model.num_experts is None else model.first_dense_layers
        layers = with_attention * attention + dense_layers * mlp
        if with_delta_rule:
            layers += with_delta_rule * _count_delta_rule(model)
        if model.num_experts is not None:
            visited = model.experts_per_token * (model.expert_ffn_hidden_size or model.ffn_hidden_size)
            visited += model.shared_expert_ffn_hidden_size or 0
            layers += (model.num_layers - dense_layers) * model.hidden_size * (3 * visited + model.num_experts)
        parameters = layers + vocab_size * model.hidden_size
        return cls(per_token=6.0 * parameters, per_pair=6.0 * with_attention * width)


def _count_delta_rule(model: ModelConfig) -> int:
    """Return the matmul parameters of a layer's gated delta rule, plus three times the elements of its memories.

    Each token uses a memory in three products: to predict its value, to write the correction, and to read.
    """
    shape = DeltaShape.from_model(model)
    projections = model.hidden_size * (shape.projected + shape.values * shape.value)
    return shape.groups * (projections + 3 * shape.values * shape.key * shape.value)


def _count_attention(model: ModelConfig) -> tuple[int, float]:
    """Return (parameters of a layer's projections, heads times the mean dimension of a head's keys and values)."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank is None:
        head_dim = head_size(model)
        projected_heads = (2 + model.attention_output_gate) * heads + 2 * model.num_query_groups
        return hidden * projected_heads * head_dim, heads * head_dim
    shape = LatentShape.from_model(model)
    if model.q_lora_rank is None:
        queries = hidden * heads * shape.query
    else:
        queries = model.q_lora_rank * (hidden + heads * shape.query)
    down = hidden * (shape.latent + shape.rope)
    up = shape.latent * heads * shape.key_and_value
    return queries + down + up + heads * shape.value * hidden, heads * (shape.query + shape.value) / 2
