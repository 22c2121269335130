"""The adapters of a checkpoint: their entries in the manifest, their base, their tensors, and how they are merged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from rl_megatron.checkpoint.directory import list_adapter_sections, read_manifest
from rl_megatron.checkpoint.tensors import StoredTensor, find_model_tensors, read_parts
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig, check_together
from rl_megatron.model.families.table import Rows, WeightTable
from rl_megatron.model.lora.dora import compute_factors, compute_squared_lengths
from rl_megatron.model.lora.layers import add_update
from rl_megatron.model.lora.modules import find_whole_tensors
from rl_megatron.model.lora.targets import (
    MAGNITUDE,
    Part,
    find_adapted_linears,
    list_adapter_shapes,
    name_tensor,
    name_tensor_key,
)
from rl_megatron.model.sharded_model import Base, ShardedModel
from rl_megatron.model.shards import HEAD, pieces, split_piece

_WEIGHT = ".weight"
_TENSORS = ".distcp"  # the ending of the files that hold a checkpoint's tensors


def identify_base(checkpoint: Path) -> Base:
    """Return what identifies a whole model's checkpoint as a base: its path, and a digest over its tensor files."""
    entries = read_manifest(checkpoint)["files"]
    digested = {name: entry for name, entry in entries.items() if name.endswith(_TENSORS)}
    digest = hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).hexdigest()[:16]
    return Base(str(checkpoint.resolve()), digest)


def describe_model_adapters(model: ShardedModel) -> dict[str, object]:
    """Return the manifest entries of a model's adapters and their base; they are empty if it has no adapter."""
    if model.lora is None:
        return {}
    return describe_adapters([model.lora, *model.frozen_adapters], model.base)


def describe_adapters(adapters: Sequence[LoraConfig], base: Base | None) -> dict[str, Any]:
    """Return the manifest's entries of adapters and of their base. The first adapter is the trained one."""
    trained, *frozen = map(asdict, adapters)
    entries = {"peft": trained, **({"frozen_adapters": frozen} if frozen else {})}
    return entries | {"base": {} if base is None else asdict(base)}


def holds_adapter(manifest: Mapping[str, object]) -> bool:
    """Return whether a checkpoint holds adapters without their base."""
    return "peft" in manifest


def read_adapter_configs(checkpoint: Path, manifest: Mapping[str, object]) -> dict[str, LoraConfig]:
    """Return the section `peft` of each adapter of a checkpoint by adapter name, the most recently trained first."""
    try:
        sections = TypeAdapter(tuple[LoraConfig, ...]).validate_python(list_adapter_sections(manifest))
    except ValidationError as error:
        raise ConfigError(f"checkpoint {checkpoint}: its manifest's peft section is not valid: {error}") from error
    return {section.adapter_name: section for section in sections}


def find_base(checkpoint: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the path of the checkpoint that an adapter was trained on, after checking its recorded digest."""
    recorded = manifest["base"]
    if not recorded:
        raise ConfigError(
            f"checkpoint {checkpoint} holds only an adapter, whose base was never saved; load the base first"
        )
    try:
        base = identify_base(Path(recorded["path"]))
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint {checkpoint} holds only an adapter, whose base cannot be read: {error}"
        ) from error
    check_base(checkpoint, manifest, base)
    return Path(recorded["path"])


def check_base(checkpoint: Path, manifest: Mapping[str, Any], base: Base | None) -> None:
    """Refuse an adapter that was not trained on `base`. A `base` of None accepts every adapter."""
    recorded = manifest["base"]
    if base is None:
        return
    if not recorded:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter of a base that was never saved, and the base here is "
            f"{base.path}; an adapter fits only the base that it was trained on"
        )
    if recorded["digest"] != base.digest:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter of {recorded['path']} with the digest {recorded['digest']}; the "
            f"base here, {base.path}, has {base.digest}; an adapter fits only the base that it was trained on"
        )


def check_frozen_adapters(checkpoint: Path, saved: Sequence[LoraConfig], model: ShardedModel) -> None:
    """Refuse a checkpoint whose frozen adapters, `saved`, differ from those that `model` has already, if any."""
    if model.frozen_adapters and set(model.frozen_adapters) != set(saved):
        listed = " (policy) and ".join(
            ", ".join(sorted(lora.adapter_name for lora in adapters)) or "none"
            for adapters in (model.frozen_adapters, saved)
        )
        raise ConfigError(
            f"checkpoint {checkpoint} holds other frozen adapters than the policy has from an earlier one: {listed} "
            "(checkpoint); load it into a new policy"
        )


def check_same_adapter(checkpoint: Path, saved: LoraConfig, lora: LoraConfig) -> None:
    """Refuse a saved adapter whose section `peft` differs from the run's in more than dropout and initialization."""
    saved_keys, now = asdict(saved), asdict(lora)
    free = {"lora_dropout", "init_lora_weights"}
    differing = [key for key in now if key not in free and _sort_list(saved_keys[key]) != _sort_list(now[key])]
    if differing:
        listed = ", ".join(f"peft.{key}: checkpoint {saved_keys[key]}, run {now[key]}" for key in differing)
        raise ConfigError(
            f"checkpoint {checkpoint} holds another adapter named {lora.adapter_name} ({listed}); give these keys the "
            "checkpoint's values, give the new adapter another name with peft.adapter_name, or export merged weights "
            "and start from those"
        )


def _sort_list(value: object) -> object:
    return sorted(value) if isinstance(value, list | tuple) else value


# --- the tensors ---


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter of a checkpoint, with its unsharded tensors on the host.

    Attributes:
        config: The section `peft` that it was trained with.
        linears: The parts of every linear that has an adapter, by the linear's Megatron name.
        tensors: The adapter's tensors by the names that peft gives them, without the prefix for the base model.
        whole: The tensors of modules that were trained whole, by their Hugging Face names.
        keys: The checkpoint's key of each tensor of `whole`.
        factors: DoRA's factors [rows] fp32 of each weight, by the weight's Hugging Face name; `with_factors` computes
            them.
    """

    config: LoraConfig
    linears: dict[str, tuple[Part, ...]]
    tensors: dict[str, Tensor]
    whole: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)

    def with_factors(
        self, blocks: Iterable[tuple[Rows, tuple[int, ...], Tensor]], device: torch.device | None = None
    ) -> StoredAdapter:
        """Return the adapter with DoRA's `factors`, which merging needs.

        `blocks` are blocks of the base's tensors, as `split_piece` yields them. If a `device` is given, each rank
        passes some of the blocks, and the call is collective.
        """
        rows = {part.name: part.out_features for parts in self.linears.values() for part in parts if part.has_adapter}
        total = torch.zeros(sum(rows.values()))
        squares = dict(zip(rows, total.split(list(rows.values())), strict=True))
        for hf_rows, offset, block in blocks:
            module = hf_rows.hf_name.removesuffix(_WEIGHT)
            if module in squares and block.dim() == 2:
                matrices = self._select_matrices(module, offset, block)
                block_squares = compute_squared_lengths(block, *matrices, self.config.scaling).cpu()
                squares[module][offset[0] : offset[0] + block.size(0)] += block_squares
        if device is not None and dist.get_world_size() > 1:
            summed = total.to(device)
            dist.all_reduce(summed)
            total.copy_(summed)
        factors = {}
        for module, weight_squares in squares.items():
            magnitude = self.tensors[name_tensor(module, MAGNITUDE)]
            factors[f"{module}{_WEIGHT}"] = compute_factors(magnitude, weight_squares.sqrt())
        return replace(self, factors=factors)

    def _select_matrices(self, module: str, offset: tuple[int, ...], block: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of B and the columns of A that belong to a block, on the block's device."""
        up, down = (self.tensors[name_tensor(module, letter)] for letter in "BA")
        rows, columns = up[offset[0] : offset[0] + block.size(0)], down[:, offset[1] : offset[1] + block.size(1)]
        return rows.to(block.device), columns.to(block.device)

    def merge_block(self, hf_name: str, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of a Hugging Face tensor with the adapter merged. It is in fp32 if s·B·A was added."""
        if hf_name in self.whole:
            index = tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))
            return self.whole[hf_name][index].to(block)
        module = hf_name.removesuffix(_WEIGHT)
        if name_tensor(module, "B") not in self.tensors or block.dim() != 2:
            return block
        whole = add_update(block, *self._select_matrices(module, offset, block), self.config.scaling)
        if self.config.use_dora:
            factors = self.factors[hf_name][offset[0] : offset[0] + block.size(0), None]
            whole *= factors.to(block.device)
        return whole

    def list_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (key in a checkpoint, tensor) for each of the adapter's tensors."""
        for name, tensor in self.tensors.items():
            yield name_tensor_key(name, self.linears, self.config.adapter_name), tensor
        for name, tensor in self.whole.items():
            yield self.keys[name], tensor


@dataclass(frozen=True)
class StoredAdapters:
    """All adapters of a checkpoint, the most recently trained one first."""

    adapters: tuple[StoredAdapter, ...]
    head: Tensor | None = None  # the score head that was trained with them, if any

    @property
    def by_name(self) -> dict[str, StoredAdapter]:
        return {adapter.config.adapter_name: adapter for adapter in self.adapters}

    @property
    def linears(self) -> set[str]:
        """Return the Megatron names of the linears that have an adapter."""
        return {linear for adapter in self.adapters for linear in adapter.linears}

    @property
    def use_dora(self) -> bool:
        """Return whether merging needs `with_factors`."""
        return any(adapter.config.use_dora for adapter in self.adapters)

    def with_factors(
        self, blocks: Iterable[tuple[Rows, tuple[int, ...], Tensor]], device: torch.device | None = None
    ) -> StoredAdapters:
        """Return the adapters with DoRA's `factors`; see `StoredAdapter.with_factors`."""
        (alone,) = self.adapters  # an adapter with DoRA is the only one
        return replace(self, adapters=(alone.with_factors(blocks, device),))

    def merge_block(self, hf_name: str, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of a Hugging Face tensor of the base with all adapters merged. The sum is rounded once.

        `offset` is the index of the block's first element in the tensor.
        """
        whole = block
        for adapter in self.adapters:
            whole = adapter.merge_block(hf_name, offset, whole)
        return whole.to(block.dtype)

    @torch.no_grad()
    def merge_into(self, model: ShardedModel, table: WeightTable) -> None:
        """Merge the adapters into the weights, and replace modules trained whole. Collective if `use_dora`."""
        held = list(pieces(model.model_chunks))
        adapters = self
        if self.use_dora:
            first = (piece for piece in held if piece.is_first_replica)
            blocks = (block for piece in first for block in split_piece(piece, table))
            adapters = self.with_factors(blocks, model.topology.device)
        for piece in held:
            if piece.name == HEAD and model.head == "score" and self.head is not None:
                piece.tensor.copy_(self.head)
                continue
            for rows, offset, view in split_piece(piece, table):
                whole = adapters.merge_block(rows.hf_name, offset, view)
                if whole is not view:
                    view.copy_(whole)


def read_adapters(checkpoint: Path, manifest: Mapping[str, Any], model: ModelConfig, rows: int) -> StoredAdapters:
    """Return the adapters of a checkpoint.

    `model` is the model section of their base, and `rows` is the number of rows of the embedding.
    """
    configs = list(read_adapter_configs(checkpoint, manifest).values())
    check_together(configs)
    stored, kind = find_model_tensors(checkpoint), manifest.get("head", "lm")
    adapters = [_read(checkpoint, stored, config, model, rows, kind) for config in configs]
    return StoredAdapters(tuple(adapters), _read_whole(stored[HEAD]) if kind == "score" else None)


def _read(
    checkpoint: Path, stored: Mapping[str, StoredTensor], config: LoraConfig, model: ModelConfig, rows: int, kind: str
) -> StoredAdapter:
    linears, tensors = find_adapted_linears(config, model, rows), {}
    for name, shape in list_adapter_shapes(linears, config).items():
        key = name_tensor_key(name, linears, config.adapter_name)
        if key not in stored or stored[key].shape != shape:
            raise ConfigError(f"checkpoint {checkpoint} lacks {key} of the shape {shape}, which its peft section needs")
        tensors[name] = _read_whole(stored[key])
    whole, keys = {}, {}
    for key, tensor in find_whole_tensors(config, model, rows, kind).items():
        if key not in stored or stored[key].shape[1:] != tensor.shape[1:]:
            raise ConfigError(f"checkpoint {checkpoint} lacks {key}, which peft.modules_to_save of its manifest needs")
        whole[tensor.hf_name], keys[tensor.hf_name] = _read_whole(stored[key])[: tensor.shape[0]], key
    return StoredAdapter(config, linears, tensors, whole, keys)


def _read_whole(stored: StoredTensor) -> Tensor:
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for part, values in read_parts(stored):
        whole[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))] = values
    return whole
