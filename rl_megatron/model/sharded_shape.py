"""The parameters of each rank, counted without building the model.

All counts are exact. tests/unit/model/test_sharded_shape.py compares them with what a `MegatronPolicy` allocates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape, LatentShape, LayerKind, head_size
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.lora.modules import count_whole_elements, find_whole_tensors
from rl_megatron.model.lora.targets import (
    Part,
    count_local_elements,
    count_local_magnitudes,
    find_adapted_linears,
    is_expert,
    parse_layer,
)
from rl_megatron.topology.degrees import padded_vocab_size, validate

Head = Literal["lm", "score"]


def element_bytes(precision: str) -> int:
    """Return the bytes of a weight or an activation."""
    return 2 if precision == "bf16" else 4


def optimizer_bytes_per_element(precision: str) -> int:
    """Return the bytes of Adam's two moments in fp32 and, under bf16, of the fp32 copy of the weight."""
    return 12 if precision == "bf16" else 8


class Parameter(NamedTuple):
    """A parameter on one rank: the number of elements that the rank has, and whether it belongs to a routed expert.

    `is_shared` is true for an embedding that the first and the last pipeline stage share.
    """

    elements: int
    of_expert: bool = False
    is_shared: bool = False


@dataclass(frozen=True)
class Place:
    """The position of a rank in the layout.

    Attributes:
        stage: Its pipeline stage.
        data: Its index among the ranks that split the optimizer state of dense parameters (data · context).
        expert_data: Its index among the ranks that hold the same experts.
    """

    stage: int
    data: int
    expert_data: int


@dataclass(frozen=True)
class ShardedShape:
    """The shape of a model in a layout, which determines the number of parameters on each rank.

    Attributes:
        model: The model section.
        parallel: The parallel section.
        world_size: The number of ranks.
        vocab_size: The size of the vocabulary if `model.vocab_size` is null.
        head: "lm", or "score" for a reward model or a critic.
        lora: The section `peft` of the trained adapters, or None if the weights themselves are trained.
    """

    model: ModelConfig
    parallel: ParallelConfig
    world_size: int
    vocab_size: int
    head: Head = "lm"
    lora: LoraConfig | None = None

    @property
    def data(self) -> int:
        """Return the data-parallel degree."""
        return validate(self.parallel, self.world_size)

    @property
    def stage_ranks(self) -> int:
        """Return the number of ranks of a pipeline stage."""
        return self.world_size // self.parallel.pipeline

    @property
    def data_shards(self) -> int:
        """Return the number of ranks that split the optimizer state of dense parameters."""
        return self.stage_ranks // self.parallel.tensor

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks that hold the same experts and split their optimizer state."""
        return self.stage_ranks // (self.parallel.expert * self.parallel.expert_tensor)

    @property
    def has_replicas(self) -> bool:
        """Return whether several ranks hold the same weights. Otherwise no optimizer is distributed."""
        return max(self.data_shards, 1 if self.model.num_experts is None else self.expert_shards) > 1

    @property
    def vocab_shard(self) -> int:
        """Return the number of the embedding's rows on one rank, padding included."""
        tensor = self.parallel.tensor
        return padded_vocab_size(self.model.vocab_size or self.vocab_size, tensor) // tensor

    @property
    def ties_embeddings(self) -> bool:
        """Return whether the embedding is the head's matrix."""
        return self.model.tie_embeddings and self.head == "lm"

    def place(self, rank: int) -> Place:
        """Return the position of a rank."""
        stage, within = divmod(rank, self.stage_ranks)
        expert_data = within // (self.parallel.expert * self.parallel.expert_tensor)
        return Place(stage, within // self.parallel.tensor, expert_data)

    def layers(self, stage: int) -> list[range]:
        """Return the layers of each model chunk of a stage, counted from 0 over the whole model."""
        parallel, per_stage = self.parallel, self.parallel.virtual_pipeline
        first, last = parallel.first_stage_layers, parallel.last_stage_layers
        uneven = [count for count in (first, last) if count is not None]
        middle = parallel.pipeline - len(uneven)
        even = (self.model.num_layers - sum(uneven)) // middle // per_stage if middle else 0
        sizes = [even] * parallel.pipeline
        if first is not None:
            sizes[0] = first // per_stage
        if last is not None:
            sizes[-1] = last // per_stage
        starts = [model_chunk * sum(sizes) + sum(sizes[:stage]) for model_chunk in range(per_stage)]
        return [range(start, start + sizes[stage]) for start in starts]

    @lru_cache(maxsize=4096)  # noqa: B019  # shapes are few, and equal ones share the entry
    def layer_counts(self, stage: int) -> Counter[LayerKind]:
        """Return the number of layers of each kind that a stage has."""
        return Counter(LayerKind.from_model(self.model, layer) for layers in self.layers(stage) for layer in layers)

    def parameters(self, stage: int) -> list[list[Parameter]]:
        """Return the parameters of each model chunk of a stage, in the order of `named_parameters`."""
        return [
            [
                *self._list_before_layers(stage, model_chunk),
                *(
                    parameter
                    for layer in layers
                    for parameter in self._list_layer(LayerKind.from_model(self.model, layer))
                ),
                *self._list_after_layers(stage, model_chunk),
            ]
            for model_chunk, layers in enumerate(self.layers(stage))
        ]

    def elements(self, stage: int) -> tuple[int, int]:
        """Return the numbers of elements of dense parameters and of experts' parameters on a rank of a stage."""
        dense = experts = 0
        for kind, count in self.layer_counts(stage).items():
            parameters = self._list_layer(kind)
            experts += count * sum(p.elements for p in parameters if p.of_expert)
            dense += count * sum(p.elements for p in parameters if not p.of_expert)
        last = self.parallel.virtual_pipeline - 1
        dense += sum(p.elements for p in (*self._list_before_layers(stage, 0), *self._list_after_layers(stage, last)))
        return dense, experts

    @lru_cache(maxsize=4096)  # noqa: B019  # shapes are few, and equal ones share the entry
    def adapter_elements(self, stage: int) -> tuple[int, int]:
        """Return the numbers of elements of A and B on a rank of a stage: of dense linears, and of experts' linears."""
        if self.lora is None:
            return 0, 0
        counted = [0, 0]
        for linear, parts in self._list_adapted(self.lora, stage):
            counted[is_expert(linear)] += count_local_elements(linear, parts, self.lora.r, self.parallel)
        return counted[0], counted[1]

    @lru_cache(maxsize=4096)  # noqa: B019  # shapes are few, and equal ones share the entry
    def magnitude_elements(self, stage: int) -> int:
        """Return the number of DoRA's magnitudes on a rank of a stage. They are fp32 in any precision."""
        if self.lora is None or not self.lora.use_dora:
            return 0
        linears = self._list_adapted(self.lora, stage)
        return sum(count_local_magnitudes(linear, parts, self.parallel) for linear, parts in linears)

    def _list_adapted(self, lora: LoraConfig, stage: int) -> Iterator[tuple[str, tuple[Part, ...]]]:
        """Yield the linears of a stage that get adapters, with their parts."""
        layers = {layer for layers in self.layers(stage) for layer in layers}
        for linear, parts in find_adapted_linears(lora, self.model, self.model.vocab_size or self.vocab_size).items():
            if parse_layer(linear) in layers:
                yield linear, parts

    @lru_cache(maxsize=4096)  # noqa: B019  # shapes are few, and equal ones share the entry
    def whole_elements(self, stage: int) -> int:
        """Return how many elements a rank of a stage has of modules that are trained whole beside adapters."""
        if self.lora is None:
            return 0
        layers = {layer for layers in self.layers(stage) for layer in layers}
        tensors = find_whole_tensors(self.lora, self.model, self.model.vocab_size or self.vocab_size, self.head)
        ends = stage == 0, stage == self.parallel.pipeline - 1
        return count_whole_elements(tensors, layers, *ends, self.vocab_shard, self.model.hidden_size)

    def trained_elements(self, stage: int) -> tuple[int, int]:
        """Return the numbers of elements of dense and experts' parameters that a rank of a stage trains."""
        if self.lora is None:
            return self.elements(stage)
        dense, experts = self.adapter_elements(stage)
        dense += self.magnitude_elements(stage) + self.whole_elements(stage)
        return dense + self.model.hidden_size * (self.head == "score" and stage == self.parallel.pipeline - 1), experts

    @lru_cache(maxsize=4096)  # noqa: B019  # shapes are few, and equal ones share the entry
    def stages_of_kinds(self) -> tuple[int, ...]:
        """Return the first stage, the last stage, and one of each group of other stages with the same kinds of layers.

        It is the first of its group, which holds the most microbatches at once.
        """
        last, firsts = self.parallel.pipeline - 1, {}
        for stage in range(1, last):
            firsts.setdefault(
                (tuple(sorted(self.layer_counts(stage).items())), tuple(self.windows(stage).items())), stage
            )
        return tuple(sorted({0, *firsts.values(), last}))

    def windows(self, stage: int) -> Counter[int | None]:
        """Return the number of layers of a stage by their window, in tokens; None means no window.

        Layers with the gated delta rule do not count.
        """
        window, every = self.model.sliding_window, self.model.global_attention_every
        if window is None:
            counts = self.layer_counts(stage).items()
            return Counter({None: sum(count for kind, count in counts if not kind.has_delta_rule)})
        return Counter(
            None if every is not None and (layer + 1) % every == 0 else window
            for layers in self.layers(stage)
            for layer in layers
        )

    def _list_layer(self, kind: LayerKind) -> tuple[Parameter, ...]:
        parallel = self.parallel
        return list_layer_parameters(self.model, parallel.tensor, parallel.expert, parallel.expert_tensor, kind)

    def _list_before_layers(self, stage: int, model_chunk: int) -> list[Parameter]:
        """Return the embedding if this is the first model chunk, otherwise nothing."""
        if stage > 0 or model_chunk > 0:
            return []
        is_shared = self.ties_embeddings and self.parallel.pipeline > 1
        return [Parameter(self.vocab_shard * self.model.hidden_size, is_shared=is_shared)]

    def _list_after_layers(self, stage: int, model_chunk: int) -> list[Parameter]:
        """Return the final norm and the head if this is the last model chunk, otherwise nothing."""
        if stage < self.parallel.pipeline - 1 or model_chunk < self.parallel.virtual_pipeline - 1:
            return []
        hidden = self.model.hidden_size
        if self.head == "score":
            return [Parameter(hidden), Parameter(hidden)]
        if self.ties_embeddings and self.parallel.pipeline == 1:
            return [Parameter(hidden)]
        return [Parameter(hidden), Parameter(self.vocab_shard * hidden, is_shared=self.ties_embeddings)]


@lru_cache(maxsize=4096)
def list_layer_parameters(
    model: ModelConfig, tensor: int, expert: int, expert_tensor: int, kind: LayerKind
) -> tuple[Parameter, ...]:
    """Return the parameters of a layer on one rank, in the order of `named_parameters`."""
    hidden = model.hidden_size
    norm, after = [Parameter(hidden)], [Parameter(hidden)] * model.sandwich_norms
    if kind.has_delta_rule:
        attention = _list_delta_rule(model, tensor)
    else:
        has_latent = model.kv_lora_rank is not None
        attention = _list_latent_attention(model, tensor) if has_latent else _list_attention(model, tensor)
    if kind.has_experts:
        mlp = _list_experts(model, tensor, expert, expert_tensor)
    else:
        mlp = _list_mlp(model, model.ffn_hidden_size // tensor)
    return (*norm, *attention, *after, *norm, *mlp, *after)


def _list_attention(model: ModelConfig, tensor: int) -> list[Parameter]:
    size, hidden = head_size(model), model.hidden_size
    queries = size * model.num_attention_heads // tensor
    mixed = (1 + model.attention_output_gate) * queries + 2 * size * model.num_query_groups // tensor
    return [
        *[Parameter(model.num_attention_heads // tensor)] * model.attention_sinks,
        Parameter(queries * hidden),
        *[Parameter(hidden)] * model.linear_bias,
        Parameter(mixed * hidden),
        *[Parameter(mixed)] * model.qkv_bias,
        *[Parameter(size)] * (2 * model.qk_norm),
    ]


def _list_delta_rule(model: ModelConfig, tensor: int) -> list[Parameter]:
    shape, hidden = DeltaShape.from_model(model), model.hidden_size
    groups = shape.groups // tensor
    heads = groups * shape.values
    core = [groups * shape.convolved * shape.kernel, heads, heads]
    return [
        Parameter(elements)
        for elements in (groups * shape.projected * hidden, *core, shape.value, heads * shape.value * hidden)
    ]


def _list_latent_attention(model: ModelConfig, tensor: int) -> list[Parameter]:
    shape, hidden, heads = LatentShape.from_model(model), model.hidden_size, model.num_attention_heads // tensor
    if model.q_lora_rank is None:
        queries = [hidden * heads * shape.query]
    else:  # the down projection and its norm are whole on every rank
        queries = [model.q_lora_rank * hidden, model.q_lora_rank, model.q_lora_rank * heads * shape.query]
    keys = [(shape.latent + shape.rope) * hidden, shape.latent, shape.latent * heads * shape.key_and_value]
    return [Parameter(elements) for elements in (*queries, *keys, heads * shape.value * hidden)]


def _list_mlp(model: ModelConfig, width: int, of_expert: bool = False) -> list[Parameter]:
    hidden = model.hidden_size
    return [
        Parameter(2 * width * hidden, of_expert),
        *[Parameter(2 * width, of_expert)] * model.linear_bias,
        Parameter(width * hidden, of_expert),
        *[Parameter(hidden, of_expert)] * model.linear_bias,
    ]


def _list_experts(model: ModelConfig, tensor: int, expert: int, expert_tensor: int) -> list[Parameter]:
    hidden, experts = model.hidden_size, model.num_experts or 0
    width, shared = model.expert_ffn_hidden_size or model.ffn_hidden_size, model.shared_expert_ffn_hidden_size
    router = [Parameter(experts * hidden), *[Parameter(experts)] * model.linear_bias]
    expert_mlp = _list_mlp(model, width // expert_tensor, of_expert=True)
    routed = [*router, *expert_mlp * (experts // expert)]
    if shared is None:
        return routed
    return [*routed, *[Parameter(hidden)] * model.shared_expert_gate, *_list_mlp(model, shared // tensor)]
