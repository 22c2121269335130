"""The cost of training on a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape, LatentShape, LayerKind, head_size


@dataclass(frozen=True)
class SequenceCost:
    """The cost of a sequence of l tokens on its own in causal attention: cost(l) = per_token · l + per_pair · l².

    In FLOPs of one forward and backward pass:

        per_token = 6 · (matmul parameters that a token passes through)
        per_pair  = 6 · layers with attention · heads · (head_dim of keys + head_dim of values) / 2

    A matmul parameter takes a multiplication and an addition in the forward pass, and as many again for either gradient
    in the backward pass: 2 + 4. Attention multiplies queries with keys and probabilities with values: per layer 2·l²
    heads·head_dim each, of which a causal kernel computes half; and three times that with the backward pass.

    Only the ratio of the two matters to a plan. The default counts tokens.

    Attributes:
        per_token: At least 0.
        per_pair: At least 0; one of the two is above 0.
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

        It counts attention's projections, the three matrices of SwiGLU (of a mixture of experts: the router's and those
        of the experts that a token visits) and the output head, which is a matmul even if it is the embedding. It
        ignores norms, biases, the embedding's look-up, what `model.recompute` computes again, and what a sliding window
        saves. The gated delta rule handles each token on its own.
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
    """Return the matmul parameters of a layer's gated delta rule, and the elements of its memories three times.

    A token passes through each memory three times: it is corrected for what it holds, written to it and read from it.
    """
    shape = DeltaShape.from_model(model)
    projections = model.hidden_size * (shape.projected + shape.values * shape.value)
    return shape.groups * (projections + 3 * shape.values * shape.key * shape.value)


def _count_attention(model: ModelConfig) -> tuple[int, float]:
    """Return (parameters of a layer's projections, width of its heads: the mean of keys' and values')."""
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
