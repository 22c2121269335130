"""Checkpoints that hold an adapter alone: what their manifest says of the base, and the adapter's whole tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from rl_megatron.checkpoint.directory import read_manifest
from rl_megatron.checkpoint.tensors import StoredTensor, model_tensors, read_parts
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.families.table import Rows, WeightTable
from rl_megatron.model.lora.dora import factors_of, squared_lengths
from rl_megatron.model.lora.layers import with_update
from rl_megatron.model.lora.modules import whole_tensors
from rl_megatron.model.lora.targets import (
    MAGNITUDE,
    Part,
    adapted_linears,
    adapter_shapes,
    tensor_key,
    tensor_name,
)
from rl_megatron.model.sharded_model import Base, ShardedModel
from rl_megatron.model.shards import HEAD, blocks_of, pieces

_TENSORS = ".distcp"  # the ending of the files that hold a checkpoint's tensors
_WEIGHT = ".weight"


def base_of(checkpoint: Path) -> Base:
    """Return the base that the checkpoint of a whole model is. Its digest is that of its files of tensors.

    Raises:
        ConfigError: It is not a checkpoint, or a file is missing.
    """
    entries = read_manifest(checkpoint)["files"]
    digested = {name: entry for name, entry in entries.items() if name.endswith(_TENSORS)}
    digest = hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).hexdigest()[:16]
    return Base(str(checkpoint.resolve()), digest)


def adapter_entries(model: ShardedModel) -> dict[str, Any]:
    """Return the manifest's entries of a model's adapters and their base; empty if it has none."""
    if model.lora is None:
        return {}
    base = {} if model.base is None else asdict(model.base)
    return {"peft": asdict(model.lora), "base": base}


def holds_adapter(manifest: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds an adapter alone."""
    return "peft" in manifest


def saved_lora(checkpoint: Path, manifest: Mapping[str, Any]) -> LoraConfig:
    """Return the section `peft` of a checkpoint's adapter.

    Raises:
        ConfigError: It has a key or value that this version does not know.
    """
    try:
        return TypeAdapter(LoraConfig).validate_python(manifest["peft"])
    except ValidationError as error:
        raise ConfigError(f"checkpoint {checkpoint}: its manifest's peft section is not valid: {error}") from error


def saved_base(checkpoint: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the path of the checkpoint that an adapter was trained on, after checking that it is the same one.

    Raises:
        ConfigError: There is no checkpoint at the recorded path, or it has another digest.
    """
    recorded = manifest["base"]
    if not recorded:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter alone, and its base was never saved; load the base first"
        )
    try:
        found = base_of(Path(recorded["path"]))
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter alone, and its base cannot be read: {error}"
        ) from error
    check_base(checkpoint, manifest, found)
    return Path(recorded["path"])


def check_base(checkpoint: Path, manifest: Mapping[str, Any], base: Base | None) -> None:
    """Refuse an adapter that was trained on another base than a saved one.

    Raises:
        ConfigError: The digests differ, or the adapter's base was never saved. The message has what is known of both.
    """
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


def check_same_adapter(checkpoint: Path, manifest: Mapping[str, Any], lora: LoraConfig) -> None:
    """Refuse an adapter whose shape or scale is not that of the section `peft`.

    Raises:
        ConfigError: A key differs.
    """
    saved, now = asdict(saved_lora(checkpoint, manifest)), asdict(lora)
    free = {"lora_dropout", "init_lora_weights"}
    differing = [key for key in now if key not in free and _plain(saved[key]) != _plain(now[key])]
    if differing:
        listed = ", ".join(f"peft.{key}: checkpoint {saved[key]}, run {now[key]}" for key in differing)
        raise ConfigError(
            f"checkpoint {checkpoint} holds another adapter ({listed}); give these keys the checkpoint's values, or "
            "export merged weights and start from those"
        )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter of a checkpoint with its whole tensors on the host.

    Attributes:
        config: The section `peft` that it was trained with.
        linears: The parts of every linear that has an adapter.
        tensors: Its tensors by the names that peft gives them, without the prefix for the base model.
        head: The score head that was trained with it, or None.
        whole: The modules that were trained whole, by the Hugging Face names of their tensors.
        keys: The checkpoint's key of each tensor of `whole`.
        factors: With DoRA, the factors [rows] fp32 of each weight by its Hugging Face name, once `with_factors` has
            computed them.
    """

    config: LoraConfig
    linears: dict[str, tuple[Part, ...]]
    tensors: dict[str, Tensor]
    head: Tensor | None = None
    whole: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)

    def with_factors(
        self, blocks: Iterable[tuple[Rows, tuple[int, ...], Tensor]], device: torch.device | None = None
    ) -> StoredAdapter:
        """Return the adapter with the factors of its magnitudes, which merging DoRA needs.

        Args:
            blocks: The blocks of the base's tensors, as `blocks_of` yields them.
            device: The ranks' device, if each of them has some of the blocks. The call is then collective.
        """
        rows = {part.name: part.out_features for parts in self.linears.values() for part in parts if part.has_adapter}
        total = torch.zeros(sum(rows.values()))
        squares = dict(zip(rows, total.split(list(rows.values())), strict=True))
        for of_hf, offset, block in blocks:
            module = of_hf.hf_name.removesuffix(_WEIGHT)
            if module in squares and block.dim() == 2:
                own = squares[module][offset[0] : offset[0] + block.size(0)]
                own += squared_lengths(block, *self._matrices(module, offset, block), self.config.scaling).cpu()
        if device is not None and dist.get_world_size() > 1:
            of_ranks = total.to(device)
            dist.all_reduce(of_ranks)
            total.copy_(of_ranks)
        factors = {}
        for module, of_weight in squares.items():
            magnitude = self.tensors[tensor_name(module, MAGNITUDE)]
            factors[f"{module}{_WEIGHT}"] = factors_of(magnitude, of_weight.sqrt())
        return replace(self, factors=factors)

    def _matrices(self, module: str, offset: tuple[int, ...], block: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of B and the columns of A of a block, on its device."""
        up, down = (self.tensors[tensor_name(module, letter)] for letter in "BA")
        rows, columns = up[offset[0] : offset[0] + block.size(0)], down[:, offset[1] : offset[1] + block.size(1)]
        return rows.to(block.device), columns.to(block.device)

    def merged(self, hf_name: str, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of a Hugging Face tensor of the base with the adapter merged.

        Args:
            hf_name: The tensor.
            offset: The index of the block's first element there.
            block: The block of the base.
        """
        if hf_name in self.whole:
            own = self.whole[hf_name][tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))]
            return own.to(block)
        module = hf_name.removesuffix(_WEIGHT)
        if tensor_name(module, "B") not in self.tensors or block.dim() != 2:
            return block
        whole = with_update(block, *self._matrices(module, offset, block), self.config.scaling)
        if self.config.use_dora:
            factors = self.factors[hf_name][offset[0] : offset[0] + block.size(0), None]
            whole *= factors.to(block.device)
        return whole.to(block.dtype)

    @torch.no_grad()
    def merge_into(self, model: ShardedModel, table: WeightTable) -> None:
        """Merge the adapter into the weights, and replace modules that were trained whole. Collective with DoRA."""
        held = list(pieces(model.model_chunks))
        adapter = self
        if self.config.use_dora:
            first = (piece for piece in held if piece.is_first_replica)
            blocks = (block for piece in first for block in blocks_of(piece, table))
            adapter = self.with_factors(blocks, model.topology.device)
        for piece in held:
            if piece.name == HEAD and model.head == "score" and self.head is not None:
                piece.tensor.copy_(self.head)
                continue
            for rows, offset, view in blocks_of(piece, table):
                whole = adapter.merged(rows.hf_name, offset, view)
                if whole is not view:
                    view.copy_(whole)


def read_adapter(checkpoint: Path, manifest: Mapping[str, Any], model: ModelConfig, rows: int) -> StoredAdapter:
    """Return the adapter of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        manifest: Its manifest.
        model: The model section of its base.
        rows: The rows of the embedding.

    Raises:
        ConfigError: A tensor is missing or has another shape.
    """
    config = saved_lora(checkpoint, manifest)
    linears = adapted_linears(config, model, rows)
    stored, tensors = model_tensors(checkpoint), {}
    for name, shape in adapter_shapes(linears, config).items():
        key = tensor_key(name, linears)
        if key not in stored or stored[key].shape != shape:
            raise ConfigError(f"checkpoint {checkpoint} lacks {key} of the shape {shape}, which its peft section needs")
        tensors[name] = _whole(stored[key])
    kind = manifest.get("head", "lm")
    head = _whole(stored[HEAD]) if kind == "score" else None
    whole, keys = {}, {}
    for key, tensor in whole_tensors(config, model, rows, kind).items():
        if key not in stored or stored[key].shape[1:] != tensor.shape[1:]:
            raise ConfigError(f"checkpoint {checkpoint} lacks {key}, which peft.modules_to_save of its manifest needs")
        whole[tensor.hf_name], keys[tensor.hf_name] = _whole(stored[key])[: tensor.shape[0]], key
    return StoredAdapter(config, linears, tensors, head, whole, keys)


def _whole(stored: StoredTensor) -> Tensor:
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for part, values in read_parts(stored):
        whole[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))] = values
    return whole


def keyed(adapter: StoredAdapter) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter by their keys in a checkpoint."""
    for name, tensor in adapter.tensors.items():
        yield tensor_key(name, adapter.linears), tensor
    for name, tensor in adapter.whole.items():
        yield adapter.keys[name], tensor
