"""Weight tables: which rows of a Hugging Face tensor are which rows of a Megatron tensor.

Every difference between the two layouts (query, key and value interleaved by group; gate above up; a padded
vocabulary; experts apart or stacked) is a matter of whole rows. A table that moves rows and does nothing else converts
bit for bit in both directions, shard by shard, and can be checked before a byte is read: each row of either side occurs
once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from rl_megatron.config.model_shape import head_size, num_experts
from rl_megatron.config.schema import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """`count` rows of the Hugging Face tensor `hf_name`, from row `hf_row` on, are those of the Megatron tensor `name`
    from `row` on. The elements of a vector are its rows."""

    hf_name: str
    hf_row: int
    name: str
    row: int
    count: int


@dataclass(frozen=True)
class WeightTable:
    """All tensors of a model, on both sides.

    hf_shapes, shapes: names and shapes, in the order of the model's layers. Megatron names are those of
        `model.shards.pieces`, which are the same for portable modules and Transformer Engine's; its embedding and head
        have padding rows beyond these shapes.
    fp32: the Hugging Face tensors that stay in fp32 whatever the dtype of the others.
    """

    hf_shapes: dict[str, Shape]
    shapes: dict[str, Shape]
    rows: tuple[Rows, ...]
    fp32: frozenset[str] = frozenset()

    @cached_property
    def of_hf(self) -> dict[str, list[Rows]]:
        """The rows of each Hugging Face tensor."""
        return _grouped((rows.hf_name, rows) for rows in self.rows)

    @cached_property
    def of_megatron(self) -> dict[str, list[Rows]]:
        """The rows of each Megatron tensor."""
        return _grouped((rows.name, rows) for rows in self.rows)


def _grouped(pairs: Iterable[tuple[str, Rows]]) -> dict[str, list[Rows]]:
    grouped = defaultdict(list)
    for name, rows in pairs:
        grouped[name].append(rows)
    return dict(grouped)


@dataclass
class TableBuilder:
    """Adds tensors one by one; `build()` gives the table once every row of both sides has its place."""

    _hf_shapes: dict[str, Shape] = field(default_factory=dict)
    _shapes: dict[str, Shape] = field(default_factory=dict)
    _rows: list[Rows] = field(default_factory=list)
    _fp32: set[str] = field(default_factory=set)

    def same(self, hf_name: str, name: str, *shape: int, fp32: bool = False) -> None:
        """One tensor under two names."""
        self.stacked(name, {hf_name: shape[0]}, *shape[1:])
        if fp32:
            self._fp32.add(hf_name)

    def stacked(self, name: str, parts: dict[str, int], *columns: int) -> None:
        """Hugging Face tensors of so many rows each, one below the other."""
        start = 0
        for hf_name, count in parts.items():
            self._hf_shapes[hf_name] = (count, *columns)
            self._rows.append(Rows(hf_name, 0, name, start, count))
            start += count
        self._shapes[name] = (start, *columns)

    def interleaved(self, name: str, parts: dict[str, int], groups: int, *columns: int) -> None:
        """Hugging Face tensors, of so many rows in each group, taking turns group by group."""
        stride = sum(parts.values())
        self._shapes[name] = (groups * stride, *columns)
        start = 0
        for hf_name, count in parts.items():
            self._hf_shapes[hf_name] = (groups * count, *columns)
            self._rows += [Rows(hf_name, g * count, name, g * stride + start, count) for g in range(groups)]
            start += count

    def build(self) -> WeightTable:
        table = WeightTable(self._hf_shapes, self._shapes, tuple(self._rows), frozenset(self._fp32))
        for shapes, of, first in (
            (table.hf_shapes, table.of_hf, lambda rows: rows.hf_row),
            (table.shapes, table.of_megatron, lambda rows: rows.row),
        ):
            for name, shape in shapes.items():
                end = 0
                for rows in sorted(of[name], key=first):
                    if first(rows) != end:
                        raise ValueError(f"row {min(end, first(rows))} of {name} occurs twice, or not at all")
                    end += rows.count
                if end != shape[0]:
                    raise ValueError(f"{name} has {shape[0]} rows, and {end} of them have a place")
        return table


# --- the parts that decoders share; `hf` and `megatron` are prefixes such as "model.layers.0." ---


def embeddings(table: TableBuilder, model: ModelConfig, vocab_size: int) -> None:
    """The embedding, the final norm and, where it is not the embedding, the head."""
    hidden = model.hidden_size
    table.same("model.embed_tokens.weight", "embedding.word_embeddings.weight", vocab_size, hidden)
    table.same("model.norm.weight", "decoder.final_layernorm.weight", hidden)
    if not model.tie_embeddings:
        table.same("lm_head.weight", "output_layer.weight", vocab_size, hidden)


def attention(table: TableBuilder, model: ModelConfig, hf: str, megatron: str) -> None:
    """The norm before attention; queries, keys and values, which Megatron keeps group by group; the output."""
    hidden, head_dim, groups = model.hidden_size, head_size(model), model.num_query_groups
    hf, megatron = f"{hf}self_attn.", f"{megatron}self_attention."
    queries = model.num_attention_heads // groups * head_dim
    sizes = {"q_proj": queries, "k_proj": head_dim, "v_proj": head_dim}
    weights = {f"{hf}{part}.weight": rows for part, rows in sizes.items()}
    table.interleaved(f"{megatron}linear_qkv.weight", weights, groups, hidden)
    if model.qkv_bias:
        biases = {f"{hf}{part}.bias": rows for part, rows in sizes.items()}
        table.interleaved(f"{megatron}linear_qkv.bias", biases, groups)
    if model.qk_norm:
        table.same(f"{hf}q_norm.weight", f"{megatron}q_layernorm.weight", head_dim)
        table.same(f"{hf}k_norm.weight", f"{megatron}k_layernorm.weight", head_dim)
    table.same(f"{hf}o_proj.weight", f"{megatron}linear_proj.weight", hidden, model.num_attention_heads * head_dim)


def gated_mlp(table: TableBuilder, hf: str, megatron: str, hidden: int, ffn: int) -> None:
    """down(act(gate·x) · up·x); Megatron keeps gate above up."""
    gate_and_up = {f"{hf}gate_proj.weight": ffn, f"{hf}up_proj.weight": ffn}
    table.stacked(f"{megatron}linear_fc1.weight", gate_and_up, hidden)
    table.same(f"{hf}down_proj.weight", f"{megatron}linear_fc2.weight", hidden, ffn)


def dense_decoder(model: ModelConfig, vocab_size: int) -> WeightTable:
    """LLaMA's names: of Llama, Mistral, Qwen2 and Qwen3."""
    table, hidden = TableBuilder(), model.hidden_size
    for layer in range(model.num_layers):
        hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        # Megatron's names are Transformer Engine's, where a norm belongs to the linear that follows it.
        table.same(f"{hf}input_layernorm.weight", f"{megatron}self_attention.linear_qkv.layer_norm_weight", hidden)
        attention(table, model, hf, megatron)
        table.same(f"{hf}post_attention_layernorm.weight", f"{megatron}mlp.linear_fc1.layer_norm_weight", hidden)
        gated_mlp(table, f"{hf}mlp.", f"{megatron}mlp.", hidden, model.ffn_hidden_size)
    embeddings(table, model, vocab_size)
    return table.build()


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of a mixture within a layer: router, experts, an expert's three linears."""

    router: str
    experts: str
    gate: str
    up: str
    down: str


def mixture_of_experts(table: TableBuilder, model: ModelConfig, names: ExpertNames, hf: str, megatron: str) -> None:
    """Add the router, and each expert on its own, as `model.shards.pieces` names them."""
    hidden, ffn = model.hidden_size, model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = num_experts(model)
    table.same(f"{hf}{names.router}.weight", f"{megatron}mlp.router.weight", experts, hidden)
    for index in range(experts):
        theirs, ours = f"{hf}{names.experts}.{index}.", f"{megatron}mlp.experts.{index}."
        gate_and_up = {f"{theirs}{names.gate}.weight": ffn, f"{theirs}{names.up}.weight": ffn}
        table.stacked(f"{ours}linear_fc1.weight", gate_and_up, hidden)
        table.same(f"{theirs}{names.down}.weight", f"{ours}linear_fc2.weight", hidden, ffn)


def mixture_decoder(model: ModelConfig, vocab_size: int, names: ExpertNames) -> WeightTable:
    """A mixture of experts in every layer, the rest as LLaMA: of Mixtral and Qwen3-MoE."""
    table, hidden = TableBuilder(), model.hidden_size
    for layer in range(model.num_layers):
        hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        table.same(f"{hf}input_layernorm.weight", f"{megatron}self_attention.linear_qkv.layer_norm_weight", hidden)
        attention(table, model, hf, megatron)
        # No one linear follows this norm, so that it keeps its own name.
        table.same(f"{hf}post_attention_layernorm.weight", f"{megatron}pre_mlp_layernorm.weight", hidden)
        mixture_of_experts(table, model, names, hf, megatron)
    embeddings(table, model, vocab_size)
    return table.build()
