"""The adapters of a checkpoint with their whole tensors on the host, and how they are merged into the base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.checkpoint.adapters import saved_adapters
from rl_megatron.checkpoint.tensors import StoredTensor, model_tensors, read_parts
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig, check_together
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
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.model.shards import HEAD, blocks_of, pieces

_WEIGHT = ".weight"


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter of a checkpoint with its whole tensors on the host.

    Attributes:
        config: The section `peft` that it was trained with.
        linears: The parts of every linear that has an adapter.
        tensors: Its tensors by the names that peft gives them, without the prefix for the base model.
        whole: The modules that were trained whole, by the Hugging Face names of their tensors.
        keys: The checkpoint's key of each tensor of `whole`.
        factors: With DoRA, the factors [rows] fp32 of each weight by its Hugging Face name, once `with_factors` has
            computed them.
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
        """Return a block of a Hugging Face tensor with the adapter merged, in fp32; see `StoredAdapters.merged`."""
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
        return whole

    def keyed(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's tensors by their keys in a checkpoint."""
        for name, tensor in self.tensors.items():
            yield tensor_key(name, self.linears, self.config.adapter_name), tensor
        for name, tensor in self.whole.items():
            yield self.keys[name], tensor


@dataclass(frozen=True)
class StoredAdapters:
    """All adapters of a checkpoint.

    Attributes:
        adapters: The adapters, with the one that was trained last first.
        head: The score head that was trained with them, or None.
    """

    adapters: tuple[StoredAdapter, ...]
    head: Tensor | None = None

    @property
    def by_name(self) -> dict[str, StoredAdapter]:
        """Return the adapters by name."""
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
        """Return the adapters with the factors of their magnitudes; see `StoredAdapter.with_factors`."""
        (alone,) = self.adapters  # one with magnitudes has no others beside it
        return replace(self, adapters=(alone.with_factors(blocks, device),))

    def merged(self, hf_name: str, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of a Hugging Face tensor of the base with all adapters merged. It is rounded once.

        Args:
            hf_name: The tensor.
            offset: The index of the block's first element there.
            block: The block of the base.
        """
        whole = block
        for adapter in self.adapters:
            whole = adapter.merged(hf_name, offset, whole)
        return whole.to(block.dtype)

    @torch.no_grad()
    def merge_into(self, model: ShardedModel, table: WeightTable) -> None:
        """Merge the adapters into the weights, and replace modules that were trained whole. Collective with DoRA."""
        held = list(pieces(model.model_chunks))
        adapters = self
        if self.use_dora:
            first = (piece for piece in held if piece.is_first_replica)
            blocks = (block for piece in first for block in blocks_of(piece, table))
            adapters = self.with_factors(blocks, model.topology.device)
        for piece in held:
            if piece.name == HEAD and model.head == "score" and self.head is not None:
                piece.tensor.copy_(self.head)
                continue
            for rows, offset, view in blocks_of(piece, table):
                whole = adapters.merged(rows.hf_name, offset, view)
                if whole is not view:
                    view.copy_(whole)


def read_adapters(checkpoint: Path, manifest: Mapping[str, Any], model: ModelConfig, rows: int) -> StoredAdapters:
    """Return the adapters of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        manifest: Its manifest.
        model: The model section of its base.
        rows: The rows of the embedding.

    Raises:
        ConfigError: A tensor is missing or has another shape.
    """
    configs = list(saved_adapters(checkpoint, manifest).values())
    check_together(configs)
    stored, kind = model_tensors(checkpoint), manifest.get("head", "lm")
    adapters = [_read(checkpoint, stored, config, model, rows, kind) for config in configs]
    return StoredAdapters(tuple(adapters), _whole(stored[HEAD]) if kind == "score" else None)


def _read(
    checkpoint: Path, stored: Mapping[str, StoredTensor], config: LoraConfig, model: ModelConfig, rows: int, kind: str
) -> StoredAdapter:
    linears, tensors = adapted_linears(config, model, rows), {}
    for name, shape in adapter_shapes(linears, config).items():
        key = tensor_key(name, linears, config.adapter_name)
        if key not in stored or stored[key].shape != shape:
            raise ConfigError(f"checkpoint {checkpoint} lacks {key} of the shape {shape}, which its peft section needs")
        tensors[name] = _whole(stored[key])
    whole, keys = {}, {}
    for key, tensor in whole_tensors(config, model, rows, kind).items():
        if key not in stored or stored[key].shape[1:] != tensor.shape[1:]:
            raise ConfigError(f"checkpoint {checkpoint} lacks {key}, which peft.modules_to_save of its manifest needs")
        whole[tensor.hf_name], keys[tensor.hf_name] = _whole(stored[key])[: tensor.shape[0]], key
    return StoredAdapter(config, linears, tensors, whole, keys)


def _whole(stored: StoredTensor) -> Tensor:
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for part, values in read_parts(stored):
        whole[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))] = values
    return whole
