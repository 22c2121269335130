"""How weights travel from a policy to a rollout engine: buckets of whole tensors, each with its fingerprints.

A bucket is a buffer of 64-bit words: its tensors' bytes one after the other, each from a word on, then one fingerprint
a tensor. Every rank of the policy fills in the rows that it holds and leaves zeros elsewhere, so that the sum over
ranks, as integers, *is* the bucket, exactly: one all-reduce gathers shards and delivers them.

The fingerprint of a tensor whose elements' bits are the integers x_ij:

    f = Σ_i Σ_j x_ij · u_i · v_j  mod 2⁶⁴,   u, v odd, hashes of the row and the column in the whole tensor

is a sum too, so each rank fingerprints what it holds *before* it is sent, and the receiver what arrived. A dropped,
altered or misplaced piece anywhere between shows; any change of a single element always does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_WORD = 8  # bytes
_SPREAD, _MIX = -0x61C8864680B583EB, 0x4CF5AD432745937F  # odd: multiplication by them loses nothing modulo 2⁶⁴
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_ONCE = 1 << 20  # bounds the memory of fingerprinting


class WeightsRefused(RuntimeError):
    """Weights that arrived are not those that were sent; the message names the tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """A Hugging Face tensor to come. `dtype`: its name in torch, as "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def num_words(self) -> int:
        return -(-self.num_bytes // _WORD)


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The word at which each tensor begins, and the one after the last."""
        starts = [0]
        for spec in self.tensors:
            starts.append(starts[-1] + spec.num_words)
        return tuple(starts)

    @property
    def num_words(self) -> int:
        return self.starts[-1] + len(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Of the weights alone."""
        return sum(spec.num_bytes for spec in self.tensors)

    def tensor(self, buffer: Tensor, index: int) -> Tensor:
        """The tensor `index` as a view of the bucket's `buffer` [num_words] int64."""
        spec, start = self.tensors[index], self.starts[index]
        words = buffer[start : start + spec.num_words]
        return words.view(torch.uint8)[: spec.num_bytes].view(spec.torch_dtype).view(spec.shape)

    def fingerprints(self, buffer: Tensor) -> Tensor:
        """[number of tensors] int64, a view of `buffer`."""
        return buffer[self.starts[-1] : self.num_words]

    def verify(self, buffer: Tensor) -> None:
        """Raises: WeightsRefused naming the first tensor that is not what its fingerprint says."""
        sent = self.fingerprints(buffer).tolist()
        for index, spec in enumerate(self.tensors):
            found = fingerprint(self.tensor(buffer, index))
            if found != sent[index]:
                raise WeightsRefused(f"{spec.name} arrived altered: fingerprint {found:#x}, sent with {sent[index]:#x}")


@dataclass(frozen=True)
class RefitPlan:
    """What an engine is told before the first weights come: how to build the model, and what will come in which bucket.

    hf_config: a Hugging Face config.json.
    vocab_size: ids from here on are padding: never sampled, and in no softmax.
    """

    hf_config: dict[str, Any]
    vocab_size: int
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


def plan_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> tuple[Bucket, ...]:
    """The tensors in their order, in buckets of `max_bytes` at most; a larger tensor has a bucket of its own."""
    buckets: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if not buckets or size + spec.num_bytes > max_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(spec)
        size += spec.num_bytes
    return tuple(Bucket(tuple(bucket)) for bucket in buckets)


def fingerprint(block: Tensor, origin: Sequence[int] = (0, 0)) -> int:
    """What `block` contributes to the fingerprint of the tensor that it is part of; of a whole tensor, its fingerprint.

    block: [rows, columns], or [rows] of a vector. origin: (row, column) of its first element in the whole tensor.
    """
    bits = block.detach().view(_BITS[block.element_size()])
    bits = bits.unsqueeze(-1) if bits.dim() < 2 else bits.flatten(1)
    of_rows = _hashes(origin[0], bits.size(0), bits.device)
    of_columns = _hashes(origin[1], bits.size(1), bits.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, bits.size(1)))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.size(0), at_once):
        rows = slice(start, start + at_once)
        total += ((bits[rows] * of_columns).sum(1) * of_rows[rows]).sum()
    return total.item()


def _hashes(start: int, count: int, device: torch.device) -> Tensor:
    """[count] odd numbers, of the positions from `start` on. Integer overflow is arithmetic modulo 2⁶⁴."""
    mixed = torch.arange(start, start + count, device=device) * _SPREAD
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return (mixed ^ (mixed >> 32)) | 1
