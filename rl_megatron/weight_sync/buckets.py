"""The format in which weights are sent to a rollout engine: buckets of whole tensors with their fingerprints.

A bucket is a buffer of 64-bit words. It holds the bytes of its tensors, each starting at a new word, and then one
fingerprint per tensor. Every rank of the model writes the rows that it holds and leaves zeros elsewhere. A row
is non-zero on one rank only, so the integer sum of all ranks' buffers is the complete bucket. The engines take part in
the all-reduce that computes this sum, so it also delivers the bucket to them.

A tensor is read as a matrix of 16-bit integers x_ij (an fp32 element is two of them side by side). Its fingerprint is

    f = Σ_i Σ_j x_ij · (u_i · v_j + w_i · v'_j)  mod 2⁶⁴

u and w are hashes of the row, v and v' are hashes of the column in the whole tensor. u and w have 64 bits, v and v'
have 24. u and v are odd, and w is even.

Because f is a sum, each rank fingerprints its rows *before* they are sent, and the fingerprints are summed like the
rows. The receiver fingerprints the tensors that arrived. This detects a piece that was dropped, altered or misplaced on
the way. A change of one 16-bit number is always detected, because its factor is odd (changes of both halves of an fp32
element cancel with probability 2⁻⁶⁴). The sums over columns are matrix products in fp64, which are exact up to 2⁵³.
They are fast, and do not depend on the order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from rl_megatron.config.errors import RunFailed

_WORD = 8  # bytes
_SPREAD, _MIX = -0x61C8864680B583EB, 0x4CF5AD432745937F  # odd: multiplication by them loses nothing modulo 2⁶⁴
_COLUMN_BITS = 24  # the size of a column's hash
COLUMNS_AT_ONCE = 1 << 14  # 2¹⁴ columns · 2²⁴ (hash) · 2¹⁵ (number) = 2⁵³, up to which fp64 sums are exact
ELEMENTS_AT_ONCE_CPU = 1 << 18  # elements of fp64 scratch memory (2 MiB), to fit a core's cache
ELEMENTS_AT_ONCE_GPU = 1 << 24  # 128 MiB, because small kernels leave a GPU idle


class WeightsRefused(RunFailed):
    """The error for weights that did not arrive as they were sent, or that do not fit the engine's model."""


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and dtype (torch's name, such as "bfloat16") of a Hugging Face tensor that will be sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def num_words(self) -> int:
        """Return the number of 64-bit words that the tensor takes in a bucket."""
        return -(-self.num_bytes // _WORD)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the index of the word at which each tensor begins, and of the first word after the last tensor."""
        starts = [0]
        for spec in self.tensors:
            starts.append(starts[-1] + spec.num_words)
        return tuple(starts)

    @property
    def num_words(self) -> int:
        """Return the size of the bucket in 64-bit words, fingerprints included."""
        return self.starts[-1] + len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Return the size of the weights in bytes, without fingerprints."""
        return sum(spec.num_bytes for spec in self.tensors)

    def tensor(self, buffer: Tensor, index: int) -> Tensor:
        """Return tensor number `index` as a view of the bucket's `buffer` [num_words] int64."""
        spec, start = self.tensors[index], self.starts[index]
        words = buffer[start : start + spec.num_words]
        return words.view(torch.uint8)[: spec.num_bytes].view(spec.torch_dtype).view(spec.shape)

    def fingerprints(self, buffer: Tensor) -> Tensor:
        """Return the fingerprints [number of tensors] int64 as a view of `buffer`."""
        return buffer[self.starts[-1] : self.num_words]

    def verify(self, buffer: Tensor) -> None:
        """Raise WeightsRefused if a tensor in `buffer` does not have its fingerprint; name the first such tensor."""
        received = torch.stack([fingerprint(self.tensor(buffer, index)) for index in range(len(self.tensors))])
        for spec, here, sent in zip(self.tensors, received.tolist(), self.fingerprints(buffer).tolist(), strict=True):
            if here != sent:
                raise WeightsRefused(
                    f"{spec.name} arrived altered: its fingerprint is {here:#x}, but it was sent with {sent:#x}"
                )


@dataclass(frozen=True)
class RefitPlan:
    """The information that an engine needs before the first weights: the model, and the tensors of each bucket.

    Attributes:
        hf_config: The content of a Hugging Face config.json, from which the engine builds the model.
        vocab_size: The number of valid token ids. Larger ids are padding: they are never sampled, and no softmax
            includes them.
        buckets: The buckets in the order in which they are sent.
    """

    hf_config: dict[str, Any]
    vocab_size: int
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of all weights in bytes, without fingerprints."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def to_json(self) -> dict[str, object]:
        """Return the plan for a JSON file."""
        buckets = [[[spec.name, list(spec.shape), spec.dtype] for spec in bucket.tensors] for bucket in self.buckets]
        return {"hf_config": self.hf_config, "vocab_size": self.vocab_size, "buckets": buckets}

    @staticmethod
    def from_json(plan: dict[str, Any]) -> RefitPlan:
        buckets = (
            Bucket(tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in bucket))
            for bucket in plan["buckets"]
        )
        return RefitPlan(plan["hf_config"], plan["vocab_size"], tuple(buckets))


def plan_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> tuple[Bucket, ...]:
    """Return buckets of at most `max_bytes` of tensors, in the given order. A larger tensor has its own bucket."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not buckets or size + spec.num_bytes > max_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.num_bytes
    return tuple(Bucket(tuple(bucket)) for bucket in buckets)


def fingerprint(block: Tensor, offset: Sequence[int] = (0, 0)) -> Tensor:
    """Return the part of a tensor's fingerprint that comes from `block`, a scalar int64.

    Args:
        block: A part of the tensor: [rows, columns], or [rows] for a vector. A whole tensor may have more dimensions;
            its last dimension is the columns.
        offset: The (row, column) of the block's first element in the whole tensor.
    """
    numbers = block.detach().unsqueeze(-1) if block.dim() < 2 else block.detach().flatten(0, -2)
    numbers = numbers.view(torch.int8 if block.element_size() == 1 else torch.int16)
    per_element = max(1, block.element_size() // 2)
    row_hashes = hash_rows(offset[0], numbers.size(0), block.device)
    column_hashes = hash_columns(offset[1] * per_element, numbers.size(1), block.device).double()
    total = torch.zeros((), dtype=torch.int64, device=block.device)
    elements_at_once = ELEMENTS_AT_ONCE_CPU if block.device.type == "cpu" else ELEMENTS_AT_ONCE_GPU
    for first in range(0, numbers.size(1), COLUMNS_AT_ONCE):
        columns = slice(first, first + COLUMNS_AT_ONCE)
        at_once = max(1, elements_at_once // numbers[:, columns].size(1))
        for start in range(0, numbers.size(0), at_once):
            rows = slice(start, start + at_once)
            over_columns = column_hashes[:, columns] @ numbers[rows, columns].double().t()
            total += (over_columns.long() * row_hashes[:, rows]).sum()
    return total


def fingerprint_ones(shape: Sequence[int], offset: Sequence[int], device: torch.device) -> Tensor:
    """Return the fingerprint of a block of ones, [rows, columns] or [rows], a scalar int64.

    If blocks cover each element of a tensor once, their fingerprints add up to that of a whole tensor of ones.
    `offset` is the (row, column) of the block's first element in the whole tensor.
    """
    rows = hash_rows(offset[0], shape[0], device).sum(1)
    columns = hash_columns(offset[1], shape[1], device) if len(shape) > 1 else hash_columns(0, 1, device)
    return (rows * columns.sum(1)).sum()


def hash_rows(start: int, count: int, device: torch.device) -> Tensor:
    """Return [2, count] int64: u and w of the rows from `start` on."""
    return _hash_table(_table_size(start + count), device)[:2, start : start + count]


def hash_columns(start: int, count: int, device: torch.device) -> Tensor:
    """Return [2, count] int64: v and v' of the columns from `start` on."""
    return _hash_table(_table_size(start + count), device)[2:, start : start + count]


def _table_size(positions: int) -> int:
    return 1 << max(16, (positions - 1).bit_length())


@lru_cache(maxsize=8)
def _hash_table(size: int, device: torch.device) -> Tensor:
    """Return [4, size] int64: u, w, v and v' of every position. Integers overflow, which is arithmetic modulo 2⁶⁴.

    Tables are cached, because many small blocks need the same few tables.
    """
    mixed = torch.arange(1, size + 1, device=device) * _SPREAD  # starts at 1, because the hash of 0 would be 0
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    mixed = mixed ^ (mixed >> 32)
    mask = (1 << _COLUMN_BITS) - 1
    rows = mixed | 1, (mixed ^ (mixed >> 17)) * _MIX & ~1
    return torch.stack([*rows, mixed & mask | 1, mixed >> _COLUMN_BITS & mask])
