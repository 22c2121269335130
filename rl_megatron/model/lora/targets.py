"""Which linear layers of a model get an adapter, by their Hugging Face names. This module does not need torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import ALL_LINEAR, DEFAULT_ADAPTER, LoraConfig
from rl_megatron.model.families import family_of_model
from rl_megatron.model.families.qwen3_5 import add_attention_or_delta_rule
from rl_megatron.model.families.table import (
    ExpertNames,
    Layer,
    TableBuilder,
    WeightTable,
    add_experts,
    add_experts_norm,
    add_gated_mlp,
    add_normed_mlp,
    build_decoder_table,
)

_LINEAR = re.compile(r"(decoder\.layers\.\d+\.(?:.*\.)?linear_\w+)\.weight")
_WEIGHT = ".weight"
# Llama has no names for experts, so these are Qwen3's.
_EXPERT_NAMES = ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
_CONTAINER = "lora"
_IN_ADAPTER = re.compile(rf"\.{_CONTAINER}(?:-([\w-]+))?\.")
MAGNITUDE = "magnitude_vector"  # peft's name of the tensor that DoRA adds to A and B


@dataclass(frozen=True)
class Part:
    """A Hugging Face linear, which is a whole Megatron linear or some of its rows.

    Attributes:
        name: The name of the Hugging Face module.
        out_features: The size of its output.
        in_features: The size of its input.
        groups: The number of blocks of its rows in the Megatron linear, in which the blocks of all parts alternate.
        is_in_order: Whether its rows have the same order in Megatron. Otherwise it cannot have an adapter.
        has_adapter: Whether it gets an adapter.
    """

    name: str
    out_features: int
    in_features: int
    groups: int
    is_in_order: bool = True
    has_adapter: bool = False

    @property
    def key(self) -> str:
        """Return the last word of its name, such as `q_proj`."""
        return self.name.rpartition(".")[2]


def find_adapted_linears(config: LoraConfig, model: ModelConfig, rows: int) -> dict[str, tuple[Part, ...]]:
    """Return the Megatron linears that get adapters, each with all its parts in the order of its rows.

    `rows` is the number of rows of the embedding. Every layer must get an adapter.
    """
    linears = _find_linears(build_weight_table(model, rows))
    all_parts = [part for parts in linears.values() for part in parts]
    _refuse_other_order(config.target_modules, all_parts)
    chosen = _choose(config, [part.name for part in all_parts if part.is_in_order])
    adapted = {}
    for linear, parts in linears.items():
        marked = tuple(replace(part, has_adapter=part.name in chosen) for part in parts)
        if any(part.has_adapter for part in marked):
            adapted[linear] = marked
    _check_ranks(config, adapted)
    if config.use_dora:
        _refuse_experts(adapted)
    bare = sorted(set(range(model.num_layers)) - {parse_layer(linear) for linear in adapted})
    if bare:
        raise ConfigError(
            f"peft.target_modules={_format_modules(config.target_modules)} gives layer {bare[0]} no adapter, but every "
            "layer needs one; add a module of its attention, such as o_proj"
        )
    return adapted


def refuse_fused_parts(linears: Mapping[str, Sequence[Part]], tensor: int) -> None:
    """Refuse an adapter of a Hugging Face linear that is both gate and up (dense GLM-4).

    Tensor parallelism splits the two halves separately. Its degree `tensor` must be above 1.
    """
    for linear, parts in linears.items():
        if linear.endswith(".linear_fc1") and len(parts) == 1:
            raise ConfigError(
                f"peft.target_modules: {parts[0].name} is one module for gate and up, but parallel.tensor={tensor} "
                f"splits gate and up separately; leave it out with peft.exclude_modules=[{parts[0].key}], or set "
                "parallel.tensor=1"
            )


def count_local_elements(linear: str, parts: Iterable[Part], r: int, parallel: ParallelConfig) -> int:
    """Return the number of elements of a linear's A and B on one rank.

    For an expert's linear, this is the mean over expert-parallel ranks. `linear` is the linear's Megatron name, and `r`
    the rank of the adapters.
    """
    elements = sum(r * (rows + columns) for rows, columns in _list_local_sizes(linear, parts, parallel))
    return elements // parallel.expert if is_expert(linear) else elements


def count_local_magnitudes(linear: str, parts: Iterable[Part], parallel: ParallelConfig) -> int:
    """Return the number of a linear's magnitudes on one rank, one for each row of a part with an adapter."""
    return sum(rows for rows, _ in _list_local_sizes(linear, parts, parallel))


def _list_local_sizes(linear: str, parts: Iterable[Part], parallel: ParallelConfig) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and columns that one rank has of each part with an adapter."""
    name = linear.rpartition(".")[2]
    shards = parallel.expert_tensor if is_expert(linear) else parallel.tensor
    shards = 1 if name.endswith("_down_proj") else shards
    in_shards, out_shards = (shards, 1) if name in ("linear_proj", "linear_fc2") else (1, shards)
    for part in parts:
        if part.has_adapter:
            yield part.out_features // out_shards, part.in_features // in_shards


def is_expert(linear: str) -> bool:
    """Return whether a Megatron linear belongs to a routed expert."""
    return ".experts." in linear


def parse_layer(linear: str) -> int:
    """Return the layer of a Megatron linear, counted from 0."""
    return int(linear.split(".")[2])


def name_container(adapter: str) -> str:
    """Return the name of a layer's module that has all adapters with the name `adapter`."""
    return _CONTAINER if adapter == DEFAULT_ADAPTER else f"{_CONTAINER}-{adapter}"


def parse_adapter(key: str) -> str | None:
    """Return the name of the adapter whose tensor has this checkpoint key, or None for other tensors."""
    match = _IN_ADAPTER.search(key)
    return None if match is None else match[1] or DEFAULT_ADAPTER


def name_tensor_key(name: str, linears: Mapping[str, Iterable[Part]], adapter: str) -> str:
    """Return the checkpoint key of the adapter's tensor that is named `name` in peft's files."""
    module = name.rpartition(".lora_")[0]
    linear = next(linear for linear, parts in linears.items() if any(part.name == module for part in parts))
    return f"decoder.layers.{parse_layer(linear)}.{name_container(adapter)}.{name}"


def parse_peft_name(key: str) -> str:
    """Return the name, in peft's files, of the adapter's tensor with this checkpoint key."""
    return _IN_ADAPTER.split(key, maxsplit=1)[-1]


def name_tensor(module: str, letter: str) -> str:
    """Return the name of an adapter's tensor in peft, without peft's prefix for the base model.

    `module` is the Hugging Face name of the linear, and `letter` is "A", "B" or MAGNITUDE.
    """
    return f"{module}.lora_{letter}" if letter == MAGNITUDE else f"{module}.lora_{letter}.weight"


def list_adapter_shapes(linears: Mapping[str, Iterable[Part]], config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every tensor of the adapters, by its name in peft."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in (part for parts in linears.values() for part in parts if part.has_adapter):
        shapes[name_tensor(part.name, "A")] = (config.r, part.in_features)
        shapes[name_tensor(part.name, "B")] = (part.out_features, config.r)
        if config.use_dora:
            shapes[name_tensor(part.name, MAGNITUDE)] = (part.out_features,)
    return shapes


def build_weight_table(model: ModelConfig, rows: int) -> WeightTable:
    """Return the weight table of the model's family, or one with Llama's names if no family can express the model."""
    try:
        return family_of_model(model, rows).table(model, rows)
    except ConfigError:
        if model.kv_lora_rank is not None:
            raise
    return build_decoder_table(model, rows, add_attention_or_delta_rule, _add_mlp_or_experts)


def _add_mlp_or_experts(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    if model.num_experts is None or layer.number < model.first_dense_layers:
        add_normed_mlp(table, model, layer)
        return
    add_experts_norm(table, model, layer)
    add_experts(table, model, layer, _EXPERT_NAMES)
    if model.shared_expert_ffn_hidden_size is not None:
        theirs, ours = f"{layer.hf}mlp.shared_experts.", f"{layer.megatron}mlp.shared_experts."
        add_gated_mlp(table, theirs, ours, model.hidden_size, model.shared_expert_ffn_hidden_size)


def _find_linears(table: WeightTable) -> dict[str, list[Part]]:
    linears = {}
    for name, shape in table.shapes.items():
        match = _LINEAR.fullmatch(name)
        if match is None:
            continue
        by_row = sorted(table.by_name[name], key=lambda rows: rows.row)
        if by_row[0].slab is not None:
            continue  # peft adapts only linears, and stacked experts are not linears
        counts: dict[str, int] = {}
        starts: dict[str, list[int]] = defaultdict(list)
        for hf_name, blocks in groupby(by_row, key=lambda rows: rows.hf_name):
            counts[hf_name] = counts.get(hf_name, 0) + 1
            starts[hf_name] += [rows.hf_row for rows in blocks]
        linears[match[1]] = [
            Part(hf.removesuffix(_WEIGHT), table.hf_shapes[hf][0], shape[1], groups, starts[hf] == sorted(starts[hf]))
            for hf, groups in counts.items()
        ]
    return linears


def _choose(config: LoraConfig, names: list[str]) -> set[str]:
    if config.target_modules == ALL_LINEAR:
        targets = set(names)
    else:
        targets = _find_matching("target", config.target_modules, names)
    if config.exclude_modules is None:
        return targets
    return targets - _find_matching("exclude", config.exclude_modules, names)


def _find_matching(which: str, patterns: str | tuple[str, ...], names: list[str]) -> set[str]:
    """Return the names that match. As in peft, a string is a regular expression, and a list has suffixes of names."""
    key = f"peft.{which}_modules"
    matches: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if isinstance(patterns, str):
            try:
                matching = {name for name in names if re.fullmatch(pattern, name)}
            except re.error as error:
                raise ConfigError(f"{key}={pattern} is not a regular expression: {error}") from error
        else:
            matching = {name for name in names if name == pattern or name.endswith(f".{pattern}")}
        if not matching:
            modules = sorted({name.rpartition(".")[2] for name in names})
            hint = nearest(pattern, modules)
            if isinstance(patterns, str) and pattern in modules:
                hint = f"; a string is a regular expression of whole names, so write the list [{pattern}]"
            raise ConfigError(f"{key}: {pattern!r} matches no linear layer of the model{hint}")
        matches |= matching
    if not matches:
        raise ConfigError(f"{key}=[] names no module; set it to {ALL_LINEAR} or to names such as q_proj")
    return matches


def _refuse_other_order(patterns: str | tuple[str, ...], parts: Iterable[Part]) -> None:
    """Refuse a listed module whose rows are in another order in Megatron."""
    for part in parts:
        if not part.is_in_order and not isinstance(patterns, str) and part.key in patterns:
            raise ConfigError(
                f"peft.target_modules: {part.name} takes no adapter, because Megatron has its rows in another order; "
                f"leave {part.key} out"
            )


def _refuse_experts(linears: Mapping[str, Iterable[Part]]) -> None:
    adapted = [part for linear, parts in linears.items() if is_expert(linear) for part in parts if part.has_adapter]
    if adapted:
        raise ConfigError(
            f"peft.use_dora=true: {adapted[0].name} is a linear of an expert, and peft has no DoRA for experts; leave "
            "them out with peft.exclude_modules='.*experts.*', or set use_dora=false"
        )


def _check_ranks(config: LoraConfig, linears: Mapping[str, Iterable[Part]]) -> None:
    for part in (part for parts in linears.values() for part in parts if part.has_adapter):
        smallest = min(part.in_features, part.out_features)
        if config.r > smallest:
            raise ConfigError(
                f"peft.r={config.r} exceeds a dimension of {part.name}, whose weight has the shape "
                f"({part.out_features}, {part.in_features}); set peft.r to at most {smallest}, or exclude the module "
                "with peft.exclude_modules"
            )


def _format_modules(modules: str | tuple[str, ...]) -> str:
    return modules if isinstance(modules, str) else f"[{', '.join(modules)}]"
