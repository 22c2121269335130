"""A policy's weights under their Hugging Face names, bucket by bucket, whatever layout they are sharded over.

One exporter feeds every way out: an engine's process group, shared memory, a checkpoint on disk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.model.families import family_of_model
from rl_megatron.model.families.table import WeightTable
from rl_megatron.model.shards import Piece, pieces
from rl_megatron.weight_sync.plan import RefitPlan, TensorSpec, fingerprint, places, plan_buckets

if TYPE_CHECKING:
    from rl_megatron.policy.megatron_policy import MegatronPolicy
    from rl_megatron.topology.topology import Topology

DEFAULT_BUCKET_BYTES = 64 << 20
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")  # Megatron's have rows beyond the vocabulary


@dataclass(frozen=True)
class _Block:
    """Rows that this rank holds: `source` (a view of a parameter) belongs at `origin` of the Hugging Face tensor."""

    source: Tensor
    origin: tuple[int, ...]

    def within(self, whole: Tensor) -> Tensor:
        """The block's place in the whole tensor."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.origin, self.source.shape, strict=True))]


class WeightExporter:
    """What a policy's weights are to the world outside: a plan, and buckets to be filled by all ranks together.

    plan: what comes in which bucket; the same on every rank, and for as long as the policy lives.
    """

    def __init__(self, policy: MegatronPolicy, max_bytes: int = DEFAULT_BUCKET_BYTES):
        """Collective. `max_bytes`: of the weights in a bucket.

        Raises: ConfigError where no family says what the model is; RuntimeError naming a tensor of which an element is
            held by no rank or by several, on every rank.
        """
        policy.require_head("lm", "handing weights over")
        self._policy = policy
        rows = policy.model_config.vocab_size or policy.vocab_size
        family = family_of_model(policy.model_config, rows)
        table = family.table(policy.model_config, rows)
        dtype = "bfloat16" if policy.precision == "bf16" else "float32"
        specs = [
            TensorSpec(name, shape, "float32" if name in table.fp32 else dtype)
            for name, shape in table.hf_shapes.items()
        ]
        hf_config = family.write_config(policy.model_config, rows) | {"dtype": dtype}
        self.plan = RefitPlan(hf_config, policy.vocab_size, plan_buckets(specs, max_bytes))
        self._device = policy.topology.device
        unknown, self._blocks = _blocks(policy.chunks, table)
        self._check_coverage(specs, unknown)

    @property
    def num_words(self) -> int:
        """Of a buffer that takes any of the buckets."""
        return max(bucket.num_words for bucket in self.plan.buckets)

    def new_buffer(self) -> Tensor:
        return torch.empty(self.num_words, dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def fill(self, bucket_index: int, buffer: Tensor) -> Tensor:
        """Writes this rank's rows and their fingerprints into `buffer`, zeros elsewhere. Returns the part of it that is
        the bucket: the *sum* of that over the policy's ranks holds the whole tensors. Not collective; the policy's
        `finish_training()` comes first."""
        bucket = self.plan.buckets[bucket_index]
        buffer = buffer[: bucket.num_words].zero_()
        fingerprints = bucket.fingerprints(buffer)
        for index, spec in enumerate(bucket.tensors):
            whole = bucket.tensor(buffer, index)
            for block in self._blocks.get(spec.name, ()):
                rows = block.source.to(spec.torch_dtype)
                block.within(whole).copy_(rows)
                fingerprints[index] += fingerprint(rows, (*block.origin, 0)[:2])
        return buffer

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, whole, in the plan's order and on every rank: what is there until the next one is asked for.
        Collective: one all-reduce a bucket (none in a world of one), and one bucket in memory.

        Raises: WeightsRefused where what arrived is not what was sent.
        """
        self._policy.finish_training()
        buffer = self.new_buffer()
        for index, bucket in enumerate(self.plan.buckets):
            filled = self.fill(index, buffer)
            if self._policy.topology.world_size > 1:
                dist.all_reduce(filled)
            bucket.verify(filled)
            for position, spec in enumerate(bucket.tensors):
                yield spec.name, bucket.tensor(filled, position)

    def _check_coverage(self, specs: Sequence[TensorSpec], unknown: list[str]) -> None:
        """Every element of every tensor is held, and by one block; no rank holds what the table does not know. Counts
        alone could hide a gap behind an overlap, so places are added up as well."""

        def counted(shape: Sequence[int], origin: Sequence[int]) -> Tensor:
            return torch.stack([torch.tensor(math.prod(shape)), places(shape, origin, torch.device("cpu"))])

        held = torch.zeros(len(specs) + 1, 2, dtype=torch.int64)
        held[-1, 0] = len(unknown)
        for index, spec in enumerate(specs):
            for block in self._blocks.get(spec.name, ()):
                held[index] += counted(block.source.shape, block.origin)
        held = held.to(self._device)
        if self._policy.topology.world_size > 1:
            dist.all_reduce(held)
        held = held.cpu()
        if held[-1, 0]:
            raise RuntimeError(f"the family's weight table lacks {', '.join(unknown) or 'what another rank holds'}")
        for spec, found in zip(specs, held[:-1], strict=True):
            wanted = counted(spec.shape, (0, 0))
            if not torch.equal(found, wanted):
                raise RuntimeError(
                    f"{spec.name}: ranks hold {found[0]} elements of {wanted[0]}, and not each of them once; a module "
                    "is missing from the family's weight table, or its shards overlap"
                )


def weights_digest(chunks: Sequence[torch.nn.Module], topology: Topology) -> str:
    """Of all weights of a model, whole on their ranks: the same for the same weights in any layout. Collective."""
    total = torch.zeros((), dtype=torch.int64, device=topology.device)
    for piece in pieces(chunks):
        if piece.is_first_replica:
            of_name = hashlib.blake2b(piece.name.encode(), digest_size=8).digest()
            odd = int.from_bytes(of_name, "big", signed=True) | 1
            total += odd * fingerprint(piece.tensor, (*piece.offset, 0)[:2])
    if topology.world_size > 1:
        dist.all_reduce(total)
    return f"{total.item() % 2**64:016x}"


def _blocks(chunks: Sequence[torch.nn.Module], table: WeightTable) -> tuple[list[str], dict[str, list[_Block]]]:
    """(Tensors that the table does not know, this rank's rows of each Hugging Face tensor). Weights that several ranks
    hold count on the first of them alone."""
    unknown: list[str] = []
    blocks: dict[str, list[_Block]] = {}
    for piece in pieces(chunks):
        if not _is_known(piece, table):
            unknown.append(f"{piece.name} {list(piece.global_shape)}")
        elif piece.is_first_replica:
            first, last = piece.offset[0], piece.offset[0] + piece.tensor.size(0)
            for rows in table.of_megatron[piece.name]:
                low, high = max(first, rows.row), min(last, rows.row + rows.count)
                if low < high:
                    origin = (rows.hf_row + low - rows.row, *piece.offset[1:])
                    block = _Block(piece.tensor[low - first : high - first], origin)
                    blocks.setdefault(rows.hf_name, []).append(block)
    return unknown, blocks


def _is_known(piece: Piece, table: WeightTable) -> bool:
    shape = table.shapes.get(piece.name)
    if shape is None or piece.global_shape[1:] != shape[1:]:
        return False
    return piece.global_shape[0] == shape[0] or (piece.name in _PADDED and piece.global_shape[0] > shape[0])
