"""Weight tables: which rows of a Hugging Face tensor are which rows of a Megatron tensor.

The two formats differ only in the order of whole rows: Megatron interleaves query, key and value by group, stacks gate
above up, pads the vocabulary and stacks experts. A table only moves rows. The conversion is therefore exact bit for bit
in both directions, and works shard by shard. A table can be checked before any weights are read, because each row of
either format must occur exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import head_size, num_experts

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slab:
    """A part of one expert in a Hugging Face tensor that stacks all experts, [E, in, out] or [E, out] (gpt-oss).

    That tensor has each expert's matrix transposed, so the rows of the part are columns there. Columns of gate and up
    may alternate.

    Attributes:
        first: The part's first column in the expert's matrix.
        step: The distance between the part's columns: 2 if gate and up alternate, otherwise 1.
        count: The number of the part's columns.
    """

    expert: int
    first: int
    step: int
    count: int

    @property
    def start(self) -> int:
        """Return the index of the part's first row among the rows of all parts of the tensor."""
        return (self.expert * self.step + self.first) * self.count

    def rows(self, expert: Tensor) -> Tensor:
        """Return the part's rows [count, in] or [count], as a view of `expert`, [in, out] or [out]."""
        part = expert[..., self.first :: self.step]
        return part.T if part.dim() == 2 else part


@dataclass(frozen=True)
class Rows:
    """A block of rows that a Hugging Face tensor and a Megatron tensor share. The rows of a vector are its elements.

    Attributes:
        hf_name: The Hugging Face tensor.
        hf_row: The block's first row in the Hugging Face tensor, or in its slab.
        name: The Megatron tensor.
        row: The block's first row in the Megatron tensor.
        count: The number of rows.
        slab: The part of the Hugging Face tensor that has the rows, or None if the tensor does not stack experts.
    """

    hf_name: str
    hf_row: int
    name: str
    row: int
    count: int
    slab: Slab | None = None

    @property
    def hf_number(self) -> int:
        """Return the index of the first row among all rows of the Hugging Face tensor."""
        return self.hf_row + (0 if self.slab is None else self.slab.start)


@dataclass(frozen=True)
class WeightTable:
    """All tensors of a model in both formats, and the rows that they share.

    Attributes:
        hf_shapes: The shape of each Hugging Face tensor, in the order of the model's layers.
        shapes: The shape of each Megatron tensor, in the same order. Names are those of `model.shards.pieces`, which
            are the same for portable modules and Transformer Engine's. The model's embedding and head have padding rows
            beyond these shapes.
        rows: The blocks of rows that the tensors share.
        fp32: The Hugging Face tensors that stay in fp32, whatever the dtype of the others is.
    """

    hf_shapes: dict[str, Shape]
    shapes: dict[str, Shape]
    rows: tuple[Rows, ...]
    fp32: frozenset[str] = frozenset()

    def numbered_shape(self, hf_name: str) -> Shape:
        """Return the shape of a Hugging Face tensor as rows: [E, in, out] are E·out rows of `in` columns."""
        shape = self.hf_shapes[hf_name]
        if self.by_hf_name[hf_name][0].slab is None:
            return shape
        return (shape[0] * shape[-1], *shape[1:-1])

    def with_first_rows(self, names: Iterable[str], count: int) -> WeightTable:
        """Return the table with only `count` rows of these Megatron tensors, each equal to one Hugging Face tensor."""
        firsts = {name: self.by_name[name][0] for name in names}
        cut = {first.hf_name: name for name, first in firsts.items()}
        return replace(
            self,
            hf_shapes={name: (count, *shape[1:]) if name in cut else shape for name, shape in self.hf_shapes.items()},
            shapes={name: (count, *shape[1:]) if name in firsts else shape for name, shape in self.shapes.items()},
            rows=tuple(replace(rows, count=count) if rows.name in firsts else rows for rows in self.rows),
        )

    @cached_property
    def by_hf_name(self) -> dict[str, list[Rows]]:
        """Return the blocks of rows of each Hugging Face tensor."""
        return _group((rows.hf_name, rows) for rows in self.rows)

    @cached_property
    def by_name(self) -> dict[str, list[Rows]]:
        """Return the blocks of rows of each Megatron tensor."""
        return _group((rows.name, rows) for rows in self.rows)


def _group(pairs: Iterable[tuple[str, Rows]]) -> dict[str, list[Rows]]:
    grouped = defaultdict(list)
    for name, rows in pairs:
        grouped[name].append(rows)
    return dict(grouped)


@dataclass
class TableBuilder:
    """A builder of a weight table. Tensors are added one by one, and `build` checks and returns the table."""

    _hf_shapes: dict[str, Shape] = field(default_factory=dict)
    _shapes: dict[str, Shape] = field(default_factory=dict)
    _rows: list[Rows] = field(default_factory=list)
    _fp32: set[str] = field(default_factory=set)

    def add(self, hf_name: str, name: str, *shape: int, fp32: bool = False) -> None:
        """Add a tensor that has the same rows in both formats, under two names.

        With `fp32`, the Hugging Face tensor stays in fp32, whatever the dtype of the others is.
        """
        self.add_stacked(name, {hf_name: shape[0]}, *shape[1:])
        if fp32:
            self._fp32.add(hf_name)

    def add_stacked(self, name: str, parts: dict[str, int], *columns: int) -> None:
        """Add a Megatron tensor that stacks Hugging Face tensors vertically.

        `parts` has the number of rows of each Hugging Face tensor, from top to bottom. `columns` are the other sizes.
        """
        start = 0
        for hf_name, count in parts.items():
            self._hf_shapes[hf_name] = (count, *columns)
            self._rows.append(Rows(hf_name, 0, name, start, count))
            start += count
        self._shapes[name] = (start, *columns)

    def add_interleaved(self, name: str, blocks: Iterable[tuple[str, int]], groups: int, *columns: int) -> None:
        """Add a Megatron tensor in which blocks of Hugging Face tensors alternate, group by group.

        Args:
            name: The Megatron tensor.
            blocks: (Hugging Face tensor, number of rows) of each block of a group, in order. A Hugging Face tensor with
                several blocks has the first block of every group, then the second block of every group, and so on.
            groups: The number of groups.
            *columns: The sizes of the other dimensions.
        """
        blocks = list(blocks)
        stride, start, placed = sum(count for _, count in blocks), 0, defaultdict(int)
        self._shapes[name] = (groups * stride, *columns)
        for hf_name, count in blocks:
            first = placed[hf_name]
            self._rows += [Rows(hf_name, first + g * count, name, g * stride + start, count) for g in range(groups)]
            placed[hf_name] += groups * count
            start += count
        self._hf_shapes |= {hf_name: (rows, *columns) for hf_name, rows in placed.items()}

    def add_slabs(self, hf_name: str, name: str, expert: int, *shape: int, step: int = 1) -> None:
        """Add one expert's Megatron tensor. Its rows are columns of a Hugging Face tensor that stacks all experts.

        Args:
            hf_name: The Hugging Face name.
            name: The Megatron name.
            expert: The expert.
            *shape: The shape of the Hugging Face tensor, [E, in, out] or [E, out].
            step: The number of parts, such as gate and up, whose columns alternate in the Hugging Face tensor. The
                Megatron tensor has the parts one below the other.
        """
        self._hf_shapes[hf_name] = shape
        count = shape[-1] // step
        self._shapes[name] = (shape[-1], *shape[1:-1])
        self._rows += [
            Rows(hf_name, 0, name, part * count, count, Slab(expert, part, step, count)) for part in range(step)
        ]

    def build(self) -> WeightTable:
        """Return the table, after checking that every row of both formats occurs exactly once."""
        table = WeightTable(self._hf_shapes, self._shapes, tuple(self._rows), frozenset(self._fp32))
        numbered = {name: table.numbered_shape(name) for name in table.hf_shapes}
        for shapes, blocks, first in (
            (numbered, table.by_hf_name, lambda rows: rows.hf_number),
            (table.shapes, table.by_name, lambda rows: rows.row),
        ):
            for name, shape in shapes.items():
                end = 0
                for rows in sorted(blocks[name], key=first):
                    if first(rows) != end:
                        raise ValueError(f"row {min(end, first(rows))} of {name} occurs twice, or not at all")
                    end += rows.count
                if end != shape[0]:
                    raise ValueError(f"{name} has {shape[0]} rows, but the table has {end} of them")
        return table


class Layer(NamedTuple):
    """A decoder layer: its number, and the prefixes of its tensors' names in Hugging Face and in Megatron."""

    number: int
    hf: str
    megatron: str

    @classmethod
    def from_number(cls, number: int) -> Layer:
        """Return the layer of this number."""
        return cls(number, f"model.layers.{number}.", f"decoder.layers.{number}.")


AddLayerPart = Callable[[TableBuilder, ModelConfig, Layer], None]
"""A function that adds a part of one layer to the table."""


# --- The parts that decoders share. `hf` and `megatron` are prefixes of names, such as "model.layers.0.". ---


def add_embeddings(table: TableBuilder, model: ModelConfig, vocab_size: int) -> None:
    """Add the embedding, the final norm and, if it is not tied to the embedding, the head."""
    hidden = model.hidden_size
    table.add("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab_size, hidden)
    table.add("model.norm.weight", "decoder.final_layernorm.weight", hidden)
    if not model.tie_embeddings:
        table.add("lm_head.weight", "output_layer.weight", vocab_size, hidden)


def add_attention(table: TableBuilder, model: ModelConfig, hf: str, megatron: str) -> None:
    """Add the tensors of attention. Megatron interleaves queries, keys and values by group."""
    hidden, head_dim, groups = model.hidden_size, head_size(model), model.num_query_groups
    hf, megatron = f"{hf}self_attn.", f"{megatron}self_attention."
    queries = (1 + model.attention_output_gate) * model.num_attention_heads // groups * head_dim
    sizes = {"q_proj": queries, "k_proj": head_dim, "v_proj": head_dim}
    weights = [(f"{hf}{part}.weight", rows) for part, rows in sizes.items()]
    table.add_interleaved(f"{megatron}linear_qkv.weight", weights, groups, hidden)
    if model.qkv_bias:
        biases = [(f"{hf}{part}.bias", rows) for part, rows in sizes.items()]
        table.add_interleaved(f"{megatron}linear_qkv.bias", biases, groups)
    if model.qk_norm:
        table.add(f"{hf}q_norm.weight", f"{megatron}q_layernorm.weight", head_dim)
        table.add(f"{hf}k_norm.weight", f"{megatron}k_layernorm.weight", head_dim)
    table.add(f"{hf}o_proj.weight", f"{megatron}linear_proj.weight", hidden, model.num_attention_heads * head_dim)
    if model.linear_bias:
        table.add(f"{hf}o_proj.bias", f"{megatron}linear_proj.bias", hidden)
    if model.attention_sinks:
        table.add(f"{hf}sinks", f"{megatron}core_attention.softmax_offset", model.num_attention_heads)


def add_normed_attention(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    """Add the norm before the attention, and the attention."""
    _, hf, megatron = layer
    # Megatron's names are those of Transformer Engine, in which a norm belongs to the linear that follows it.
    norm = f"{megatron}self_attention.linear_qkv.layer_norm_weight"
    table.add(f"{hf}input_layernorm.weight", norm, model.hidden_size)
    add_attention(table, model, hf, megatron)


def add_gated_mlp(table: TableBuilder, hf: str, megatron: str, hidden: int, ffn: int) -> None:
    """Add the MLP down(act(gate·x) · up·x). Megatron stacks gate above up."""
    gate_and_up = {f"{hf}gate_proj.weight": ffn, f"{hf}up_proj.weight": ffn}
    table.add_stacked(f"{megatron}linear_fc1.weight", gate_and_up, hidden)
    table.add(f"{hf}down_proj.weight", f"{megatron}linear_fc2.weight", hidden, ffn)


def build_decoder_table(model: ModelConfig, vocab_size: int, *parts: AddLayerPart) -> WeightTable:
    """Return the table of a decoder: for each layer what `parts` add, in their order, and the embeddings."""
    table = TableBuilder()
    for number in range(model.num_layers):
        for add in parts:
            add(table, model, Layer.from_number(number))
    add_embeddings(table, model, vocab_size)
    return table.build()


def dense_decoder(model: ModelConfig, vocab_size: int) -> WeightTable:
    """Return the table of a dense decoder with Llama's names: Llama, Mistral, Qwen2 or Qwen3."""
    return build_decoder_table(model, vocab_size, add_normed_attention, add_normed_mlp)


def add_normed_mlp(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    """Add the norm before the MLP, and the MLP."""
    _, hf, megatron = layer
    hidden = model.hidden_size
    table.add(f"{hf}post_attention_layernorm.weight", f"{megatron}mlp.linear_fc1.layer_norm_weight", hidden)
    add_gated_mlp(table, f"{hf}mlp.", f"{megatron}mlp.", hidden, model.ffn_hidden_size)


@dataclass(frozen=True)
class ExpertNames:
    """A family's names for the parts of a mixture of experts: router, experts and the three linears of an expert."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


def add_experts_norm(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    """Add the norm before the experts. A router and several linears follow it, so Megatron gives it its own name."""
    _, hf, megatron = layer
    table.add(f"{hf}post_attention_layernorm.weight", f"{megatron}pre_mlp_layernorm.weight", model.hidden_size)


def add_experts(table: TableBuilder, model: ModelConfig, layer: Layer, names: ExpertNames) -> None:
    """Add the router and each single expert. Megatron names are those of `model.shards.pieces`."""
    _, hf, megatron = layer
    hidden, ffn = model.hidden_size, model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = num_experts(model)
    table.add(f"{hf}{names.router}.weight", f"{megatron}mlp.router.weight", experts, hidden)
    for index in range(experts):
        theirs, ours = f"{hf}{names.experts}.{index}.", f"{megatron}mlp.experts.{index}."
        gate_and_up = {f"{theirs}{names.gate}.weight": ffn, f"{theirs}{names.up}.weight": ffn}
        table.add_stacked(f"{ours}linear_fc1.weight", gate_and_up, hidden)
        table.add(f"{theirs}{names.down}.weight", f"{ours}linear_fc2.weight", hidden, ffn)


def build_mixture_table(model: ModelConfig, vocab_size: int, names: ExpertNames) -> WeightTable:
    """Return the table of a decoder with experts in every layer and otherwise Llama's names: Mixtral and Qwen3-MoE."""
    experts = partial(add_experts, names=names)
    return build_decoder_table(model, vocab_size, add_normed_attention, add_experts_norm, experts)
