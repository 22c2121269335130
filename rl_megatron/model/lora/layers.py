"""The adapters of a transformer layer's linears, sharded as these are, and how they are attached and switched off.

A linear y = W·x of Megatron may stack several linears of Hugging Face, such as queries, keys and values. Each of them
has its own A and B, as peft has it. The product A·x has only r numbers per token, so it is what ranks exchange:

    column-parallel   A is whole on every rank, B has the rank's rows. Under sequence parallelism A·x is gathered.
    row-parallel      A has the rank's columns, B is whole. The ranks' A·x are summed, or reduced and scattered.
    whole             A and B are whole on every rank.

The linears of an expert are split over its expert-tensor-parallel ranks. megatron-core gathers the expert's tokens on
each of them before the first linear and sums their outputs after the last one, so it also sums the gradients of these
tokens. Each rank's adapter therefore contributes an equal share of its output and of the gradient of its input.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import dropout, linear

from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.heads.score import ScoreHead
from rl_megatron.model.layers.latent_attention import ReplicatedLinear
from rl_megatron.model.lora.targets import CONTAINER, Part
from rl_megatron.topology.fake_cuda import is_planned
from rl_megatron.topology.topology import Topology

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_COLUMN, _ROW, _WHOLE = "column", "row", "whole"


class LinearAdapter(torch.nn.Module):
    """The adapters of one Megatron linear: A and B of each of its parts that has one.

    Attributes:
        parts: All parts of the linear, in the order of its rows.
        scaling: The factor s of B·A·x.
        is_on: Whether the adapter takes part in the forward pass.
    """

    def __init__(
        self,
        config: LoraConfig,
        parts: Sequence[Part],
        module: torch.nn.Module,
        megatron: TransformerConfig,
        topology: Topology,
        seed: int,
    ):
        """Build the adapter of `module`, with numbers that depend only on the seed and the names of its parts."""
        super().__init__()
        self.parts, self.scaling, self.is_on = tuple(parts), config.scaling, True
        self._dropout = config.lora_dropout
        self._is_expert = bool(getattr(module, "is_expert", False))
        self._kind = _kind_of(module)
        self._gathers = megatron.sequence_parallel and not self._is_expert
        self._topology = topology
        self._group = topology.groups.expt_tp if self._is_expert else topology.groups.tp
        shards = self._shards = 1 if self._kind == _WHOLE else self._group.size()
        in_shards, out_shards = (shards if self._kind == kind else 1 for kind in (_ROW, _COLUMN))
        for part in self._adapted:
            shapes = {"A": (config.r, part.in_features // in_shards), "B": (part.out_features // out_shards, config.r)}
            for letter, shape in shapes.items():
                weight = torch.empty(shape, dtype=megatron.params_dtype, device=topology.device)
                parameter = torch.nn.Parameter(weight)
                self.register_parameter(f"{part.key}_{letter}", parameter)
                self._mark(parameter, letter)
                self._fill(parameter, part, letter, config, seed)

    @property
    def _adapted(self) -> Iterator[Part]:
        return (part for part in self.parts if part.has_adapter)

    def forward(self, x: Tensor) -> Tensor:
        """Return s·B·A·x in the layout of the linear's output. `x` is the linear's input on this rank."""
        if self._dropout and self.training:
            x = dropout(x, self._dropout)
        share = 1.0 / self._shards
        if self._is_expert and self._kind == _COLUMN and self._shards > 1:
            x = _Scaled.apply(x, 1.0, share)
        adapted = list(self._adapted)
        downs: list[Tensor] = [self._weight(part, "A") for part in adapted]
        inner = self._exchanged(linear(x, downs[0] if len(downs) == 1 else torch.cat(downs))) * self.scaling
        inners = iter(inner.chunk(len(downs), dim=-1))
        outputs = [
            linear(next(inners), self._weight(part, "B"))
            if part.has_adapter
            else inner.new_zeros(*inner.shape[:-1], part.out_features // self._out_shards)
            for part in self.parts
        ]
        if self._is_expert and self._kind == _ROW and self._shards > 1:
            outputs = [_Scaled.apply(output, share, 1.0) for output in outputs]
        if len(outputs) == 1:
            return outputs[0]
        groups = self.parts[0].groups // self._out_shards or 1
        return torch.cat([output.unflatten(-1, (groups, -1)) for output in outputs], dim=-1).flatten(-2)

    @property
    def _out_shards(self) -> int:
        return self._shards if self._kind == _COLUMN else 1

    def _weight(self, part: Part, letter: str) -> torch.nn.Parameter:
        return self.get_parameter(f"{part.key}_{letter}")

    def _exchanged(self, inner: Tensor) -> Tensor:
        """Return A·x of all tokens and columns that this rank's rows need."""
        group = self._group
        if self._shards == 1:
            return inner
        if self._kind == _COLUMN:
            if self._gathers:
                return gather_from_sequence_parallel_region(inner, group=group)
            return copy_to_tensor_model_parallel_region(inner, group=group)
        if self._gathers:
            return reduce_scatter_to_sequence_parallel_region(inner, group=group)
        return reduce_from_tensor_model_parallel_region(inner, group=group)

    def _is_sharded(self, letter: str) -> bool:
        return self._shards > 1 and (self._kind, letter) in {(_ROW, "A"), (_COLUMN, "B")}

    def _mark(self, parameter: torch.nn.Parameter, letter: str) -> None:
        """Set the marks by which megatron-core sums a parameter's gradient over the right ranks."""
        mark: Any = parameter
        if self._is_expert:
            mark.allreduce = False
        if self._is_sharded(letter):
            set_tensor_model_parallel_attributes(parameter, True, int(letter == "A"), 1)
        elif not self._is_expert:  # under sequence parallelism, each rank has the gradient of its own tokens
            mark.sequence_parallel = self._gathers

    @torch.no_grad()
    def _fill(self, parameter: torch.nn.Parameter, part: Part, letter: str, config: LoraConfig, seed: int) -> None:
        """Draw A from U(−1/√in, 1/√in), as peft does, and set B to 0, or draw it from U(−1/√r, 1/√r)."""
        if is_planned():  # the tensor has no data to fill
            return
        if letter == "B" and config.init_lora_weights:
            parameter.zero_()
            return
        name, shape = tensor_name(part, letter), (config.r, part.in_features)
        if letter == "B":
            shape = (part.out_features, config.r)
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(shape[1])
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        starts = self._offset(parameter, letter)
        own = tuple(slice(o, o + n) for o, n in zip(starts, parameter.shape, strict=True))
        parameter.copy_(whole[own])

    def _offset(self, parameter: Tensor, letter: str) -> tuple[int, int]:
        """Return the index of a local tensor's first element in the whole tensor."""
        rank = self._group.rank()
        if not self._is_sharded(letter):
            return 0, 0
        return (0, rank * parameter.size(1)) if letter == "A" else (rank * parameter.size(0), 0)

    def delta(self, part: Part, offset: tuple[int, int], shape: tuple[int, int]) -> Tensor:
        """Return a block of s·B·A of one part in fp32, of which this rank has the rows of B and the columns of A.

        Args:
            part: The part, which has an adapter.
            offset: The block's first row and column in the part's whole weight.
            shape: The block's rows and columns.
        """
        down, up = self._weight(part, "A"), self._weight(part, "B")
        column, row = offset[1] - self._offset(down, "A")[1], offset[0] - self._offset(up, "B")[0]
        rows, columns = up[row : row + shape[0]].float(), down[:, column : column + shape[1]].float()
        return self.scaling * rows @ columns

    def entries(self, prefix: str) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield (name in this module's state, place in the whole tensor) of each tensor, for checkpoints."""
        groups, group = self._topology.groups, self._group
        copies = groups.expt_dp if self._is_expert else groups.dp_cp
        for part in self._adapted:
            for letter in "AB":
                parameter, sharded = self._weight(part, letter), self._is_sharded(letter)
                offsets = [(int(letter == "A"), group.rank(), group.size())] if sharded else []
                replica = (0, 0 if sharded else group.rank(), copies.rank())
                key = f"{prefix}{tensor_name(part, letter)}"
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
            f"{prefix}{name}.{own}": entry
            for name, adapter in self.named_children()
            for own, entry in adapter.entries(prefix)  # pyright: ignore[reportCallIssue]  # a LinearAdapter
        }


def tensor_name(part: Part, letter: str) -> str:
    """Return the name that peft gives to a tensor of an adapter, without its prefix for the base model."""
    return f"{part.name}.lora_{letter}.weight"


def attach_adapters(
    model_chunk: torch.nn.Module,
    config: LoraConfig,
    linears: dict[str, tuple[Part, ...]],
    megatron: TransformerConfig,
    topology: Topology,
    seed: int,
) -> None:
    """Give the linears of a model chunk their adapters, and freeze all other weights but those of a score head.

    Args:
        model_chunk: The model, without wrappers.
        config: The section `peft`.
        linears: The parts of each linear that gets an adapter, by its global name (`adapted_linears`).
        megatron: megatron-core's config of the model.
        topology: The layout.
        seed: The seed of the adapters' initial numbers.
    """
    for module in model_chunk.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, ScoreHead))
    for layer in [module for module in model_chunk.modules() if isinstance(module, TransformerLayer)]:
        adapters = LayerAdapters()
        for local, module in layer.named_modules():
            name = f"decoder.layers.{layer.layer_number - 1}.{_global_name(local, megatron, topology)}"
            if name in linears and isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                adapter = LinearAdapter(config, linears[name], module, megatron, topology, seed)
                adapters.add_module(local.replace(".", "_"), adapter)
                module.register_forward_hook(_Added(adapter))
        layer.add_module(CONTAINER, adapters)
    if getattr(model_chunk, "pre_process", False):
        # Recomputation of a layer gives no gradients unless its input has one, and the frozen embedding has none.
        model_chunk.get_submodule("embedding").register_forward_hook(_with_gradient)


def adapters_of(model_chunks: Sequence[torch.nn.Module]) -> Iterator[LinearAdapter]:
    """Yield the adapters of this rank."""
    for model_chunk in model_chunks:
        yield from (module for module in model_chunk.modules() if isinstance(module, LinearAdapter))


@contextmanager
def switched_off(model_chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the model compute without its adapters within the block."""
    adapters = list(adapters_of(model_chunks))
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


class _Scaled(torch.autograd.Function):
    """The identity with a factor in the forward pass, and another in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.factor, None, None


class _Added:
    """A forward hook that adds an adapter's output to a linear's. The linear does not own the adapter."""

    def __init__(self, adapter: LinearAdapter):
        self._adapter = adapter

    def __call__(self, module: torch.nn.Module, args: tuple, output: Any) -> Any:
        if not self._adapter.is_on:
            return output
        if isinstance(output, tuple):  # megatron-core's linears return their bias as well
            return output[0] + self._adapter(args[0]), *output[1:]
        return output + self._adapter(args[0])


def _with_gradient(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


def _kind_of(module: torch.nn.Module) -> str:
    if isinstance(module, ColumnParallelLinear):
        return _COLUMN
    return _ROW if isinstance(module, RowParallelLinear) else _WHOLE


def _global_name(local: str, megatron: TransformerConfig, topology: Topology) -> str:
    """Return the name of a layer's module with the global number of its expert, if it is an expert's."""
    match = _LOCAL_EXPERT.search(local)
    if match is None:
        return local
    first = topology.groups.ep.rank() * (megatron.num_moe_experts or 0) // topology.expert
    return f"{local[: match.start()]}.{first + int(match[1])}.{local[match.end() :]}"
