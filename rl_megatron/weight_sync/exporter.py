"""`WeightExporter`: converts a sharded model's weights to Hugging Face tensors, bucket by bucket, in any layout.

`AdapterExporter` does the same with the tensors of its adapters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.checkpoint.peft_format import PEFT_PREFIX, build_peft_config
from rl_megatron.config.engines import refuse_several
from rl_megatron.model.families import family_of_model
from rl_megatron.model.families.table import Shape, Slab, WeightTable
from rl_megatron.model.lora.attach import find_adapters
from rl_megatron.model.lora.layers import LinearAdapter
from rl_megatron.model.lora.modules import find_whole_tensors
from rl_megatron.model.lora.targets import (
    Part,
    build_weight_table,
    find_adapted_linears,
    list_adapter_shapes,
    parse_adapter,
    parse_peft_name,
)
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.model.shards import PADDED, Piece, pieces, split_piece
from rl_megatron.weight_sync.buckets import (
    Bucket,
    RefitPlan,
    TensorSpec,
    fingerprint,
    fingerprint_ones,
    plan_buckets,
)

DEFAULT_BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class _Block:
    """A block of rows that this rank holds: a view of a parameter, and its offset in the Hugging Face tensor."""

    source: Tensor
    offset: tuple[int, ...]  # the index of the first element in `slab`, or in the Hugging Face tensor if `slab` is None
    slab: Slab | None  # the part, with this block, of a tensor of stacked experts; None for other tensors
    adapters: Sequence[tuple[LinearAdapter, Part]] = ()  # adapters to merge, each with its part for these rows

    @property
    def position(self) -> tuple[int, ...]:
        """Return the index of the block's first element, with the rows of all slabs numbered consecutively."""
        return (self.offset[0] + (0 if self.slab is None else self.slab.start), *self.offset[1:])

    def merge_adapters(self, dtype: torch.dtype) -> Tensor:
        """Return the rows in the dtype that is sent, with all adapters merged."""
        rows = self.source
        for adapter, part in self.adapters:
            rows = adapter.merge_block(part, self.offset, rows)
        return rows.to(dtype)

    def select(self, whole: Tensor) -> Tensor:
        """Return the part of the Hugging Face tensor `whole` that the block fills, as a view."""
        if self.slab is not None:
            whole = self.slab.rows(whole[self.slab.expert])
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.source.shape, strict=True))]


class WeightExporter:
    """An object that fills buckets with a model's weights. It owns the plan and this rank's views of the parameters.

    Attributes:
        plan: The tensors of each bucket. It is the same on every rank and never changes.
    """

    _merges_adapters = True

    def __init__(self, model: ShardedModel, max_bytes: int = DEFAULT_BUCKET_BYTES):
        """Plan buckets of at most `max_bytes` of weights, and check that the ranks hold every weight once. Collective.

        Raises:
            ConfigError: No Hugging Face family can express the model.
            RuntimeError: An element of a tensor is held by no rank or by several. It is raised on every rank.
        """
        model.require_head("lm", "sending weights to an engine")
        rows = model.config.vocab_size or model.vocab_size
        family = family_of_model(model.config, rows)
        table = family.table(model.config, rows)
        dtype = "bfloat16" if model.precision == "bf16" else "float32"
        specs = [
            TensorSpec(name, shape, "float32" if name in table.fp32 else dtype)
            for name, shape in table.hf_shapes.items()
        ]
        hf_config = family.write_config(model.config, rows) | {"dtype": dtype}
        unknown, blocks = _collect_blocks(model.model_chunks, table, self._merges_adapters)
        plan = RefitPlan(hf_config, model.vocab_size, plan_buckets(specs, max_bytes))
        shapes = {name: table.numbered_shape(name) for name in table.hf_shapes}
        self._prepare(model, plan, shapes, blocks, unknown)

    def _prepare(
        self,
        model: ShardedModel,
        plan: RefitPlan,
        shapes: Mapping[str, Shape],
        blocks: dict[str, list[_Block]],
        unknown: list[str],
    ) -> None:
        """Keep the plan and this rank's blocks of each tensor, and check that the ranks hold every tensor once.

        `shapes` has the tensors' shapes in the numbering of `_Block.position`. `unknown` lists tensors of this rank
        that the plan lacks.
        """
        self._model, self.plan, self._blocks, self._device = model, plan, blocks, model.topology.device
        self.check_coverage(shapes, unknown)

    @property
    def num_words(self) -> int:
        """Return the size of a buffer that can hold any of the buckets, in 64-bit words."""
        return max(bucket.num_words for bucket in self.plan.buckets)

    def allocate_buffer(self) -> Tensor:
        """Return an uninitialized buffer [num_words] int64 on the model's device."""
        return torch.empty(self.num_words, dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def fill(self, bucket_index: int, buffer: Tensor) -> Tensor:
        """Write this rank's rows and their fingerprints into `buffer` [≥ num_words] int64, and zeros elsewhere.

        Call the model's `gather_parameters` first. This method is not collective.

        Returns:
            The part of `buffer` that is the bucket. Its *sum* over the model's ranks holds the whole tensors.
        """
        bucket = self.plan.buckets[bucket_index]
        buffer = buffer[: bucket.num_words].zero_()
        fingerprints = bucket.fingerprints(buffer)
        for index, spec in enumerate(bucket.tensors):
            whole = bucket.tensor(buffer, index)
            blocks = self._blocks.get(spec.name, ())
            for block in blocks:
                rows = block.merge_adapters(spec.torch_dtype)
                block.select(whole).copy_(rows)
                if block.slab is None:
                    fingerprints[index] += fingerprint(rows, (*block.offset, 0)[:2])
            if blocks and blocks[0].slab is not None:  # zeros elsewhere add nothing to the fingerprint
                fingerprints[index] += fingerprint(whole)
        return buffer

    def gather_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield (bucket, buffer with its whole tensors) on every rank. The buffer is valid until the next bucket.

        Collective: several ranks need one all-reduce per bucket. One bucket is in memory at a time. WeightsRefused is
        raised if the bytes that arrived differ from those that were sent.
        """
        self._model.gather_parameters()
        buffer = self.allocate_buffer()
        for index, bucket in enumerate(self.plan.buckets):
            filled = self.fill(index, buffer)
            if self._model.topology.world_size > 1:
                dist.all_reduce(filled)
            bucket.verify(filled)
            yield bucket, filled

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) in the plan's order, on every rank. A tensor is valid until the next one.

        Like `gather_buckets`, it is collective and may raise WeightsRefused.
        """
        for bucket, filled in self.gather_buckets():
            for position, spec in enumerate(bucket.tensors):
                yield spec.name, bucket.tensor(filled, position)

    def check_coverage(self, shapes: Mapping[str, Shape], unknown: list[str]) -> None:
        """Check that every element of every tensor is held by exactly one block, and that the table knows every tensor.

        A count of elements would not notice that one element is held twice and another by no rank. So each element also
        adds a hash of its position.
        """

        def count(shape: Sequence[int], offset: Sequence[int]) -> Tensor:
            positions = fingerprint_ones(shape, offset, torch.device("cpu"))
            return torch.stack([torch.tensor(math.prod(shape)), positions])

        held = torch.zeros(len(shapes) + 1, 2, dtype=torch.int64)
        held[-1, 0] = len(unknown)
        for index, name in enumerate(shapes):
            for block in self._blocks.get(name, ()):
                held[index] += count(block.source.shape, block.position)
        held = held.to(self._device)
        if self._model.topology.world_size > 1:
            dist.all_reduce(held)
        held = held.cpu()
        if held[-1, 0]:
            raise RuntimeError(f"the family's weight table lacks {', '.join(unknown) or 'tensors of another rank'}")
        for (name, shape), actual in zip(shapes.items(), held[:-1], strict=True):
            expected = count(shape, (0, 0))
            if not torch.equal(actual, expected):
                raise RuntimeError(
                    f"{name}: the ranks hold {actual[0]} elements of {expected[0]}, but some are missing or held more "
                    "than once; the family's weight table lacks a module, or shards overlap"
                )


class BaseExporter(WeightExporter):
    """An exporter of a model's weights without its adapters."""

    _merges_adapters = False

    def __init__(self, model: ShardedModel, max_bytes: int = DEFAULT_BUCKET_BYTES):
        with model.adapters_off():  # so that the blocks are views of the original modules' weights
            super().__init__(model, max_bytes)


class AdapterExporter(WeightExporter):
    """An exporter of a model's adapters alone, under the tensor names of peft's files.

    The plan's `hf_config` is the content of adapter_config.json.
    """

    def __init__(self, model: ShardedModel, max_bytes: int = DEFAULT_BUCKET_BYTES):
        """Plan the buckets of a model with adapters; see `WeightExporter`.

        Raises:
            ConfigError: The model has adapters with several names; an engine takes only one.
        """
        assert model.lora is not None, "only a model with adapters has an exporter of them"
        refuse_several([model.lora, *model.frozen_adapters])
        rows = model.config.vocab_size or model.vocab_size
        linears = find_adapted_linears(model.lora, model.config, rows)
        whole = find_whole_tensors(model.lora, model.config, rows, model.head)
        dtype = "bfloat16" if model.precision == "bf16" else "float32"
        shapes = list_adapter_shapes(linears, model.lora) | {tensor.hf_name: tensor.shape for tensor in whole.values()}
        specs = [TensorSpec(f"{PEFT_PREFIX}{name}", shape, dtype) for name, shape in shapes.items()]
        blocks: dict[str, list[_Block]] = {}
        for piece in pieces(model.model_chunks):
            if parse_adapter(piece.name) is not None and piece.is_first_replica:
                name = f"{PEFT_PREFIX}{parse_peft_name(piece.name)}"
                blocks.setdefault(name, []).append(_Block(piece.tensor, piece.offset, None))
            elif piece.name in whole and piece.is_first_replica:
                for rows_in_hf, offset, view in split_piece(piece, build_weight_table(model.config, rows)):
                    name = f"{PEFT_PREFIX}{rows_in_hf.hf_name}"
                    blocks.setdefault(name, []).append(_Block(view, offset, None))
        plan = RefitPlan(build_peft_config(model.lora, linears, None), model.vocab_size, plan_buckets(specs, max_bytes))
        unknown = [name for name in blocks if name.removeprefix(PEFT_PREFIX) not in shapes]
        self._prepare(model, plan, {spec.name: spec.shape for spec in specs}, blocks, unknown)


def digest_weights(model: ShardedModel, frozen_only: bool = False) -> str:
    """Return a digest, the same in any layout, of all of a model's weights or only of the frozen ones. Collective."""
    model.gather_parameters()
    topology = model.topology
    total = torch.zeros((), dtype=torch.int64, device=topology.device)
    for piece in pieces(model.model_chunks):
        if piece.is_first_replica and not (frozen_only and piece.is_trained):
            name_digest = hashlib.blake2b(piece.name.encode(), digest_size=8).digest()
            name_factor = int.from_bytes(name_digest, "big", signed=True) | 1  # odd, so that no bit of the sum is lost
            total += name_factor * fingerprint(piece.tensor, (*piece.offset, 0)[:2])
    if topology.world_size > 1:
        dist.all_reduce(total)
    return f"{total.item() % 2**64:016x}"


def _collect_blocks(
    model_chunks: Sequence[torch.nn.Module], table: WeightTable, with_adapters: bool
) -> tuple[list[str], dict[str, list[_Block]]]:
    """Return (tensors that the table lacks, this rank's blocks of each Hugging Face tensor).

    If several ranks hold the same weights, only the first of these ranks gets blocks of them.
    """
    unknown: list[str] = []
    blocks: dict[str, list[_Block]] = {}
    adapters: dict[str, list[tuple[LinearAdapter, Part]]] = {}
    for adapter in find_adapters(model_chunks) if with_adapters else ():
        for part in adapter.parts:
            if part.has_adapter:
                adapters.setdefault(f"{part.name}.weight", []).append((adapter, part))
    for piece in pieces(model_chunks):
        if parse_adapter(piece.name) is not None:
            continue  # an adapter is merged into the rows, or left out
        if not _is_known(piece, table):
            unknown.append(f"{piece.name} {list(piece.global_shape)}")
        elif piece.is_first_replica:
            for rows, offset, view in split_piece(piece, table):
                block = _Block(view, offset, rows.slab, adapters.get(rows.hf_name, ()))
                blocks.setdefault(rows.hf_name, []).append(block)
    return unknown, blocks


def _is_known(piece: Piece, table: WeightTable) -> bool:
    shape = table.shapes.get(piece.name)
    if shape is None or piece.global_shape[1:] != shape[1:]:
        return False
    return piece.global_shape[0] == shape[0] or (piece.name in PADDED and piece.global_shape[0] > shape[0])
