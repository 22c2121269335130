"""The adapters of a transformer layer's linears, sharded like the linears.

A linear y = W·x of Megatron may stack several linears of Hugging Face, such as queries, keys and values. Each of these
has its own A and B, as in peft. Ranks exchange the product A·x, because it has only r numbers per token:

    column-parallel   A is whole on every rank, B has the rank's rows. Under sequence parallelism A·x is gathered.
    row-parallel      A has the rank's columns, B is whole. The ranks' A·x are summed, or reduced and scattered.
    whole             A and B are whole on every rank.

An expert's linears are split over expert-tensor-parallel ranks. megatron-core gathers the expert's tokens on each of
these ranks before the first linear. After the last linear it sums the ranks' outputs, and in backward their gradients
of the tokens. Each rank's adapter therefore contributes an equal share: of its output (last linear) or of its input's
gradient (first linear).
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear

from rl_megatron.config.peft import DEFAULT_ADAPTER, LoraConfig
from rl_megatron.model.lora.dropout import dropout, get_microbatch_seed
from rl_megatron.model.lora.targets import Part, name_tensor
from rl_megatron.topology.topology import Topology

_COLUMN, _ROW, _WHOLE = "column", "row", "whole"


class LinearAdapter(torch.nn.Module):
    """The adapters of one Megatron linear: A and B of each part that has an adapter.

    Attributes:
        parts: All parts of the linear, in the order of its rows.
        scaling: The factor s of B·A·x.
        is_on: Whether the adapter takes part in the forward pass.
        is_frozen: Whether it stays unchanged while adapters of another name are trained.
    """

    _letters: tuple[str, ...] = ("A", "B")  # the names of each part's tensors

    def __init__(
        self,
        config: LoraConfig,
        parts: Sequence[Part],
        module: torch.nn.Module,
        megatron: TransformerConfig,
        topology: Topology,
        seed: int,
    ):
        """Build the adapter of `module`. Its initial weights depend only on `seed` and names."""
        super().__init__()
        self.parts, self.scaling = tuple(parts), config.scaling
        self.is_on, self.is_frozen = True, False
        self._dropout, self._seed = config.lora_dropout, seed
        self._is_expert = bool(getattr(module, "is_expert", False))
        self._kind = _choose_kind(module)
        self.sequence_parallel = megatron.sequence_parallel and not self._is_expert
        self._topology = topology
        self._group = topology.groups.expt_tp if self._is_expert else topology.groups.tp
        self._shards = 1 if self._kind == _WHOLE else self._group.size()
        for part in self._adapted:
            for letter, shape in self._shapes(part, config.r).items():
                dtype = megatron.params_dtype if letter in "AB" else torch.float32
                weight = torch.empty(shape, dtype=dtype, device=topology.device)
                parameter = torch.nn.Parameter(weight)
                self.register_parameter(f"{part.key}_{letter}", parameter)
                self._mark(parameter, letter)
                self.fill(parameter, part, letter, config, seed)

    def reset(self, config: LoraConfig, seed: int) -> None:
        """Set all tensors to the initial values of an adapter with these settings, in place."""
        for part in self._adapted:
            for letter in self._letters:
                self.fill(self._weight(part, letter), part, letter, config, seed)

    def _shapes(self, part: Part, r: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's tensors of a part."""
        in_shards = self._shards if self._kind == _ROW else 1
        return {"A": (r, part.in_features // in_shards), "B": (part.out_features // self._out_shards, r)}

    @property
    def _adapted(self) -> Iterator[Part]:
        return (part for part in self.parts if part.has_adapter)

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the linear's output on this rank plus that of the adapter. `x` is the input of both."""
        return output + self(self._drop(x))

    def _drop(self, x: Tensor) -> Tensor:
        if not (self._dropout and self.training):
            return x
        names = ",".join(part.name for part in self.parts)  # they include the layer's number
        # Context-parallel ranks have different tokens.
        seed = f"{self._seed} {names} {get_microbatch_seed(x.device)} {self._topology.groups.cp.rank()}"
        return dropout(x, self._dropout, zlib.crc32(seed.encode()), *self._locate_input())

    def _locate_input(self) -> tuple[int, int, int]:
        """Return (axis, number of shards, this rank's shard) of the linear's input over tensor-parallel ranks."""
        if self._kind == _ROW:
            return -1, self._group.size(), self._group.rank()
        group = self._topology.groups.tp
        return (0, group.size(), group.rank()) if self.sequence_parallel else (0, 1, 0)

    def forward(self, x: Tensor) -> Tensor:
        """Return s·B·A·x in the layout of the linear's output. `x` is an input of the linear on this rank."""
        share = 1.0 / self._shards
        if self._is_expert and self._kind == _COLUMN and self._shards > 1:
            x = _Scaled.apply(x, 1.0, share)
        adapted = list(self._adapted)
        downs: list[Tensor] = [self._weight(part, "A") for part in adapted]
        inner = self._exchange(linear(x, downs[0] if len(downs) == 1 else torch.cat(downs))) * self.scaling
        inners = iter(inner.chunk(len(downs), dim=-1))
        outputs = [
            linear(next(inners), self._weight(part, "B"))
            if part.has_adapter
            else inner.new_zeros(*inner.shape[:-1], part.out_features // self._out_shards)
            for part in self.parts
        ]
        if self._is_expert and self._kind == _ROW and self._shards > 1:
            outputs = [_Scaled.apply(output, share, 1.0) for output in outputs]
        return self._stack(outputs)

    def _stack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return one tensor whose last axis has the values of all parts in the order of the linear's rows."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self._groups, -1)) for part in parts], dim=-1).flatten(-2)

    @property
    def _groups(self) -> int:
        """Return the number of blocks into which this rank's rows of each part are split."""
        return self.parts[0].groups // self._out_shards or 1

    @property
    def _out_shards(self) -> int:
        return self._shards if self._kind == _COLUMN else 1

    def _weight(self, part: Part, letter: str) -> torch.nn.Parameter:
        return self.get_parameter(f"{part.key}_{letter}")

    def _exchange(self, inner: Tensor) -> Tensor:
        """Return A·x of the tokens that this rank's B multiplies, summed over all columns of A."""
        group = self._group
        if self._shards == 1:
            return inner
        if self._kind == _COLUMN:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(inner, group=group)
            return copy_to_tensor_model_parallel_region(inner, group=group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=group)
        return reduce_from_tensor_model_parallel_region(inner, group=group)

    def _is_sharded(self, letter: str) -> bool:
        return self._shards > 1 and self._kind == (_ROW if letter == "A" else _COLUMN)

    def _mark(self, parameter: torch.nn.Parameter, letter: str) -> None:
        """Mark the parameter, so that megatron-core sums its gradient over the right ranks."""
        mark: Any = parameter
        if self._is_expert:
            mark.allreduce = False
        if self._is_sharded(letter):
            set_tensor_model_parallel_attributes(parameter, True, int(letter == "A"), 1)
        elif not self._is_expert:  # under sequence parallelism, each rank has the gradient of its own tokens
            mark.sequence_parallel = self.sequence_parallel

    @torch.no_grad()
    def fill(self, parameter: torch.nn.Parameter, part: Part, letter: str, config: LoraConfig, seed: int) -> None:
        """Draw A from U(−1/√in, 1/√in), as peft does, and set B and magnitudes to 0.

        With `init_lora_weights=false`, B is drawn from U(−1/√r, 1/√r).
        """
        if letter not in "AB" or (letter == "B" and config.init_lora_weights):
            parameter.zero_()
            return
        name, shape = name_tensor(part.name, letter), (config.r, part.in_features)
        if letter == "B":
            shape = (part.out_features, config.r)
        if config.adapter_name != DEFAULT_ADAPTER:  # adapters with different names start from different numbers
            name = f"{config.adapter_name}/{name}"
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(shape[1])
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        axis, start = int(letter == "A"), self._get_start(parameter, letter)
        parameter.copy_(whole.narrow(axis, start, parameter.size(axis)))

    def _get_start(self, parameter: Tensor, letter: str) -> int:
        """Return the index, in the whole tensor, of the first column (A) or row (others) of a local tensor."""
        return self._group.rank() * parameter.size(int(letter == "A")) if self._is_sharded(letter) else 0

    def merge_block(self, part: Part, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of one part's weight with the adapter merged, in fp32.

        Args:
            part: The part, which has an adapter.
            offset: The block's first row and column in the part's whole weight. This rank has the block's rows of B and
                its columns of A.
            block: [rows, columns] The block without the adapter.
        """
        down, up = self._weight(part, "A"), self._weight(part, "B")
        row, column = offset[0] - self._get_start(up, "B"), offset[1] - self._get_start(down, "A")
        return add_update(block, up[row : row + block.size(0)], down[:, column : column + block.size(1)], self.scaling)

    def list_entries(self, prefix: str) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield each tensor's name in this module's state, and its place in the whole tensor, for checkpoints."""
        groups, group = self._topology.groups, self._group
        copies = groups.expt_dp if self._is_expert else groups.dp_cp
        for part in self._adapted:
            for letter in self._letters:
                parameter, sharded = self._weight(part, letter), self._is_sharded(letter)
                offsets = [(int(letter == "A"), group.rank(), group.size())] if sharded else []
                replica = (0, 0 if sharded else group.rank(), copies.rank())
                key = f"{prefix}{name_tensor(part.name, letter)}"
                yield (
                    f"{part.key}_{letter}",
                    ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=replica),
                )


class LayerAdapters(torch.nn.Module):
    """The adapters of a transformer layer. Its modules are named for the linears, with `_` in the place of dots."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the place of every tensor in the whole model, as megatron-core's modules do."""
        return {
            f"{prefix}{name}.{local}": entry
            for name, adapter in self.named_children()
            for local, entry in adapter.list_entries(prefix)  # pyright: ignore[reportCallIssue]  # a LinearAdapter
        }


@torch.no_grad()
def add_update(block: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """Return the block W + s·B·A of a linear's weight in fp32.

    Args:
        block: [rows, columns] The block of W.
        up: [rows, r] The block's rows of B.
        down: [r, columns] The block's columns of A.
        scaling: The factor s.
    """
    return block.float() + scaling * up.float() @ down.float()


class _Scaled(torch.autograd.Function):
    """The multiplication by one factor in the forward pass, and by another in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None


def _choose_kind(module: torch.nn.Module) -> str:
    if isinstance(module, ColumnParallelLinear):
        return _COLUMN
    return _ROW if isinstance(module, RowParallelLinear) else _WHOLE
