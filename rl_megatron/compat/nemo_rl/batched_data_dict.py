"""NeMo RL's `BatchedDataDict`: the core batch with sharding, microbatch iterators and in-place methods.

The intended differences from `nemo_rl.distributed.batched_data_dict` are:

- Settings are strict: an unknown key of `DynamicBatchingArgs` or `SequencePackingArgs` is an error that suggests the
  nearest key. Keys other than `max_tokens_per_microbatch` may be missing and then take defaults.
- `rl_megatron.batching` plans the microbatches: every shard has the same number of them in every step batch. Packing
  algorithms are "balanced" (the default) and the keys of `rl_megatron.batching.packing.ALGORITHMS`.
- There are two more settings: `group_size` keeps sequences together, and `cost` is the quantity to balance.
- A call that breaks a rule of NeMo RL raises `RuleError`, which is a ValueError and an AssertionError. Microbatch
  iterators raise it when they are created, not when they are first read.
- `from_batches` raises a `RuleError` if a batch with sequences lacks a key of another batch. Newer versions of NeMo RL
  refuse such batches too, but 0.6 drops keys that the first batch lacks.
- Multimodal batches are not provided: `get_multimodal_dict` raises NotImplementedError, and there is no `PackedTensor`.
- `get_batch` does not need a `batch_size` if microbatches were planned.
- `reorder_data` and `truncate_tensors` return the batch. `truncate_tensors` does not change tensors that are short
  enough.
- `SlicedDataDict` is `BatchedDataDict` itself.

Source: NVIDIA NeMo RL 0.3 to 0.8, its documentation of this module.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from rl_megatron.batching.config import DynamicPlanArgs, PackingPlanArgs
from rl_megatron.batching.microbatch_plan import MicrobatchPlan, plan_dynamic_batching, plan_sequence_packing
from rl_megatron.compat.nemo_rl.batch_settings import DynamicBatchingArgs, SequencePackingArgs, plan_args
from rl_megatron.compat.nemo_rl.errors import MissingKeyError, RangeError, RuleError, require, rule_errors
from rl_megatron.config.errors import shorten_value
from rl_megatron.data import batch as core

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(core.BatchedDataDict[DictT]):
    """A batch that can be sharded over data-parallel ranks and read in microbatches, with NeMo RL's interface.

    `to`, `reorder_data` and `truncate_tensors` change this batch and return it. All other methods return a new one.

    Attributes:
        micro_batch_indices: `[step batch][microbatch] = [start, end]`, counted from the step batch's first sequence;
            None unless `shard_by_batch_size` planned microbatches. `get_batch` keeps the plan; other methods that
            select sequences drop it.
        micro_batch_lengths: `[step batch][microbatch]`: the width to which the microbatch is cut (dynamic batching), or
            the number of its tokens (sequence packing).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        super().__init__(*args, **kwargs)

    # ---- in place

    def to(self, device: str | torch.device) -> Self:
        """Move every tensor to `device` in place, and return this batch."""
        self.data.update(super().to(device).data)
        return self

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Undo `order` in place by moving sequence i to position `order[i]`, and return this batch.

        `from_batches(shards).reorder_data(order)` is the batch that `shard_by_batch_size` split.

        Raises:
            RuleError: `order` is not a permutation of the sequences.
        """
        size = self._equal_size()
        if sorted(order) != list(range(size)):
            raise RuleError(f"order must have each of 0 … {size - 1} once, but is {list(order)[:16]} …")
        inverse = sorted(range(len(order)), key=order.__getitem__)
        self.data = self.select_indices(inverse).data
        return self

    def truncate_tensors(self, dim: int, length: int) -> Self:
        """Cut every tensor that is longer than `length` along `dim` in place, and return this batch.

        Raises:
            RuleError: `length` is negative.
        """
        require(length >= 0, f"truncate_tensors({dim}, {length}): the length must not be negative")
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim and value.shape[dim] > length:
                self.data[key] = value.narrow(dim, 0, length)
        return self

    # ---- selecting and joining

    def slice(self, start: int, end: int) -> Self:
        """Return sequences `start` to `end - 1`. Tensors are views of this batch's.

        Raises:
            RangeError: The batch does not have all of these sequences.
        """
        size = self._equal_size()
        if not 0 <= start <= end <= size:
            raise RangeError(f"slice({start}, {end}) of a batch of size {size}: 0 ≤ start ≤ end ≤ size must hold.")
        return super().slice(start, end)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Return the sequences of all batches, one batch after the other, as NeMo RL does after 0.6.

        A batch without sequences may lack keys, and the width of its tensors is ignored. The result has the keys of all
        batches; it is empty if there are no batches. See the base class for shapes and other errors.

        Raises:
            MissingKeyError: A batch with sequences lacks a key.
        """
        with rule_errors():
            sizes = [core.common_size(batch) for batch in batches]
        empty = {key: value for batch in reversed(batches) for key, value in batch.items()}
        for key in empty:
            lacking = [i for i, batch in enumerate(batches) if sizes[i] and key not in batch]
            if lacking:
                raise MissingKeyError(
                    f"Key {key!r} is missing from non-empty batches {lacking}: remove it from all other batches, or "
                    "add it to these"
                )
        filled = [batch for batch, size in zip(batches, sizes, strict=True) if size]
        return super().from_batches(filled or [empty], pad_value_dict)

    def get_multimodal_dict(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Raise NotImplementedError, because there are no multimodal batches."""
        raise NotImplementedError(
            "rl_megatron does not provide NeMo RL's multimodal batches: train a text-only model, and remove the call "
            "of get_multimodal_dict"
        )

    def chunk(self, rank: int, chunks: int) -> Self:
        """Return a copy of the `rank`-th of `chunks` equal parts: `[a, b, c, d]`, rank 1 of 2 → `[c, d]`.

        Raises:
            RangeError: `rank` is not in 0 … chunks − 1.
            RuleError: The size is not a multiple of the number of parts.
        """
        size = self._equal_size()
        if not 0 <= rank < chunks:
            raise RangeError(
                f"index OOB: not enough splits for this rank: chunk(rank={rank}, chunks={chunks}): the rank must be "
                f"between 0 and {chunks - 1}."
            )
        _require_multiple(size, "batch size", chunks, "chunks")
        share = size // chunks
        return self.select_indices(range(rank * share, (rank + 1) * share))

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return each sequence `num_repeats` times: `[a, b]` → `[a, a, b, b]`. List elements are deep copies.

        Raises:
            RuleError: `num_repeats` is negative.
        """
        require(num_repeats >= 0, f"repeat_interleave({num_repeats}): the number must not be negative")
        return self.map_values(
            lambda tensor: tensor.repeat_interleave(num_repeats, dim=0),
            lambda items: [copy.deepcopy(item) for item in items for _ in range(num_repeats)],
        )

    def all_gather(
        self, group: dist.ProcessGroup | None, pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Gather the sequences of all ranks of `group`, and return them in rank order, the same on every rank.

        It is a collective. The ranks' batches may differ in size and width.

        Args:
            group: The process group.
            pad_value_dict: The value of each key's padding; see `from_batches`.

        Raises:
            ValueError: Ranks have different keys, or `from_batches` raises. Every rank raises the error.
        """
        self._equal_size()
        ours = {
            key: _TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in self.data.items()
        }
        theirs: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(theirs, ours, group=group)
        kinds = [{key: isinstance(value, _TensorSpec) for key, value in rank.items()} for rank in theirs]
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:  # checked first, because ranks that gather different keys would wait for each other
                raise RuleError(
                    f"rank {rank} gathers {sorted(kind)}, but rank 0 gathers {sorted(kinds[0])}: all ranks must have "
                    f"the same keys, and the same keys must be tensors."
                )
        parts = [dict(rank) for rank in theirs]
        for key in theirs[0]:  # in rank 0's order of keys, so that every rank makes the same calls
            if kinds[0][key]:
                gathered = _gather_tensor(self.data[key], [rank[key] for rank in theirs], group)
                for part, tensor in zip(parts, gathered, strict=True):
                    part[key] = tensor
        return self.from_batches(parts, pad_value_dict)

    # ---- shards

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[Self] | tuple[list[Self], list[int]]:
        """Split each step batch of `batch_size` sequences over the shards. A shard has its part of every step batch.

        `[a a b b c c d d]` with `shards=2, batch_size=4` → `[a a c c]`, `[b b d d]`. Each optimizer step (one step
        batch) therefore uses the same sequences whatever the number of shards.

        Args:
            shards: The number of data-parallel ranks.
            batch_size: The number of sequences of a step batch over all shards; by default, all sequences.
            allow_uneven_shards: Whether the last shards may have fewer sequences, or none; only without `batch_size`.
            dynamic_batching_args: Plan microbatches of sequences of similar length; see `DynamicBatchingArgs`.
            sequence_packing_args: Plan microbatches that fit one packed row; see `SequencePackingArgs`.

        Returns:
            The shards. If microbatches are planned, (shards, order): sequence i of all shards, one after the other, is
            sequence `order[i]` of this batch. Every shard has the same number of microbatches per step batch; read
            them with `get_batch` and the plan's iterator.

        Raises:
            RuleError: Both plans are requested, sizes are not divisible, or a sequence exceeds the token budget.
        """
        if allow_uneven_shards and batch_size is not None:
            raise RuleError("batch_size must be None if allow_uneven_shards is True")
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise RuleError("dynamic_batching_args and sequence_packing_args cannot be passed together")
        size = self._equal_size()
        batch_size = size if batch_size is None else batch_size
        if batch_size < 1 or shards < 1:
            raise RuleError(f"batch_size={batch_size} and shards={shards} must both be at least 1.")
        _require_multiple(size, "Total batch size", batch_size, "batch_size")
        if not allow_uneven_shards:
            _require_multiple(batch_size, "Batch size", shards, "shards")
        starts = range(0, size, batch_size)
        if dynamic_batching_args is not None:
            return self._build_shards(self._plan_dynamic(dynamic_batching_args, starts, shards), batch_size)
        if sequence_packing_args is not None:
            plans = self._plan_packing(sequence_packing_args, starts, shards, allow_uneven_shards)
            return self._build_shards(plans, batch_size)
        share = -(-batch_size // shards)
        return [
            self.select_indices(
                [j for i in starts for j in range(i + shard * share, min(i + (shard + 1) * share, i + batch_size))]
            )
            for shard in range(shards)
        ]

    def _plan_dynamic(self, settings: Mapping[str, Any], starts: range, shards: int) -> list[MicrobatchPlan]:
        """Return the dynamic-batching plan of each step batch."""
        args, input_key, lengths_key = plan_args(settings, DynamicBatchingArgs, DynamicPlanArgs)
        lengths, width = self._lengths(lengths_key), self._sequence_width(input_key)
        try:
            return [plan_dynamic_batching(lengths[i : i + starts.step], width, shards, args) for i in starts]
        except ValueError as error:
            raise RuleError(str(error)) from error

    def _plan_packing(
        self, settings: Mapping[str, Any], starts: range, shards: int, allow_uneven: bool
    ) -> list[MicrobatchPlan]:
        """Return the sequence-packing plan of each step batch."""
        order = settings.get("microbatch_order")
        require(
            order in (None, "packer", "largest_first"),
            f"microbatch_order must be 'packer' or 'largest_first', got {order!r}",
        )
        settings = {key: value for key, value in settings.items() if key != "microbatch_order"}
        args, _, lengths_key = plan_args(settings, SequencePackingArgs, PackingPlanArgs)
        lengths = self._lengths(lengths_key)
        with rule_errors():
            plans = [plan_sequence_packing(lengths[i : i + starts.step], shards, args, allow_uneven) for i in starts]
        return [_sort_largest_first(plan) for plan in plans] if order == "largest_first" else plans

    def _build_shards(self, plans: list[MicrobatchPlan], batch_size: int) -> tuple[list[Self], list[int]]:
        """Return (the shards, the order of sequences over all shards) from one plan per step batch."""
        shards: list[Self] = []
        order: list[int] = []
        for number in range(len(plans[0].sequences)):
            chosen: list[int] = []
            indices: list[list[list[int]]] = []
            for step, plan in enumerate(plans):
                bounds, end = [], 0
                for microbatch in plan.sequences[number]:
                    chosen += [step * batch_size + sequence for sequence in microbatch]
                    bounds.append([end, end + len(microbatch)])
                    end += len(microbatch)
                indices.append(bounds)
            shard = self.select_indices(chosen)
            shard.micro_batch_indices = indices
            shard.micro_batch_lengths = [plan.lengths[number] for plan in plans]
            shards.append(shard)
            order += chosen
        return shards, order

    def _lengths(self, key: str) -> list[int]:
        """Return the length of each sequence from data[key]."""
        if key not in self.data:
            raise RuleError(f"planning microbatches needs the lengths {key!r}; the batch has {sorted(self.data)}.")
        lengths = self.data[key]
        lengths = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
        require(
            all(isinstance(length, int) and length >= 0 for length in lengths),
            f"{key!r} must be whole numbers ≥ 0, got {shorten_value(lengths)}",
        )
        return lengths

    def _sequence_width(self, key: str) -> int:
        """Return S of the token ids [B, S]; raise RuleError if dimension 1 of another tensor is neither S nor 1."""
        tokens = self.data.get(key)
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            raise RuleError(f"dynamic batching needs {key!r} as a [B, S] tensor; the batch has {sorted(self.data)}.")
        width = tokens.shape[1]
        for other, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] not in (1, width):
                raise RuleError(
                    f"dynamic batching cuts dimension 1 to the longest sequence, but {other!r} {tuple(value.shape)} is "
                    f"not as wide as {key!r} {tuple(tokens.shape)}: align it with the tokens, or make it a list."
                )
        return width

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> Self:
        """Return the `batch_idx`-th step batch of a shard of `shard_by_batch_size`, with its planned microbatches.

        Args:
            batch_idx: The number of the step batch.
            batch_size: The number of sequences of a step batch on this shard. It is required if no microbatches were
                planned; a plan has these sizes, so it is ignored then.

        Raises:
            RuleError: There is neither a plan nor a `batch_size`.
            RangeError: `batch_idx` is out of range.
        """
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            if batch_size is None:
                raise RuleError("get_batch needs batch_size, because this batch does not have planned microbatches.")
            return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        if not 0 <= batch_idx < len(self.micro_batch_indices):
            raise RangeError(f"batch_idx={batch_idx} must be between 0 and {len(self.micro_batch_indices) - 1}.")
        ends = [bounds[-1][1] for bounds in self.micro_batch_indices]
        start = sum(ends[:batch_idx])
        batch = self.slice(start, start + ends[batch_idx])
        batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    # ---- microbatches

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Return an iterator over consecutive slices of `microbatch_size` sequences.

        Raises:
            RuleError: The size is not a multiple of `microbatch_size`. The call raises the error, not the iterator.
        """
        size = self._equal_size()
        _require_multiple(size, "Data dict size", microbatch_size, "the provided microbatch size")
        return (self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        """Return an iterator over the microbatches of dynamic batching, each cut to its planned width."""
        bounds, lengths = self._get_planned_microbatches()
        return (
            self.slice(start, end).truncate_tensors(sequence_dim, length)
            for (start, end), length in zip(bounds, lengths, strict=True)
        )

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of microbatches of dynamic batching, which is the same on every shard."""
        return len(self._get_planned_microbatches()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        """Return an iterator over the microbatches of sequence packing: each fits one pack, but is still padded."""
        bounds, _ = self._get_planned_microbatches()
        return (self.slice(start, end) for start, end in bounds)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return (the number of microbatches of sequence packing, the tokens of the largest one)."""
        bounds, lengths = self._get_planned_microbatches()
        return len(bounds), max(lengths)

    def _get_planned_microbatches(self) -> tuple[list[list[int]], list[int]]:
        """Return the indices and lengths of planned microbatches; raise `RuleError` unless there is one step batch."""
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise RuleError(
                "no microbatches are planned; call shard_by_batch_size with dynamic_batching_args or "
                "sequence_packing_args first."
            )
        if len(self.micro_batch_indices) != 1:
            raise RuleError(f"the shard has {len(self.micro_batch_indices)} step batches; select one: get_batch(i).")
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]

    def _equal_size(self) -> int:
        """Return the number of sequences. If the keys have different numbers, raise `RuleError`."""
        try:
            return self.size
        except ValueError as error:
            raise RuleError(f"Batch sizes are not the same across the rollout batch: {error}") from error


def _require_multiple(value: int, value_name: str, divisor: int, divisor_name: str) -> None:
    """Raise `RuleError`, naming both values and the remedy, unless `value` is a multiple of `divisor`."""
    if divisor < 1 or value % divisor:
        remedy = f"; append padding sequences with `pad_to_multiple({divisor})`" if divisor > 1 else ""
        raise RuleError(f"{value_name} ({value}) is not a multiple of {divisor_name} ({divisor}){remedy}")


def _sort_largest_first(plan: MicrobatchPlan) -> MicrobatchPlan:
    """Return the plan with each shard's microbatches in descending order of their tokens."""
    orders = [sorted(range(len(shard)), key=shard.__getitem__, reverse=True) for shard in plan.lengths]
    sorted_fields = {
        field.name: [[shard[i] for i in order] for shard, order in zip(getattr(plan, field.name), orders, strict=True)]
        for field in dataclasses.fields(plan)
    }
    return MicrobatchPlan(**sorted_fields)


class _TensorSpec(NamedTuple):
    """The shape and dtype of a tensor, which other ranks need to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def _gather_tensor(
    tensor: torch.Tensor, specs: list[_TensorSpec], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return every rank's tensor.

    The shapes may differ by rank, but `all_gather` needs equal shapes. Tensors are therefore sent as bytes, padded to
    the size of the largest tensor.
    """
    ours = tensor.detach().contiguous().flatten().view(torch.uint8)
    buffer = ours.new_zeros(max(spec.num_bytes for spec in specs))
    buffer[: ours.numel()] = ours
    received = [torch.empty_like(buffer) for _ in specs]
    dist.all_gather(received, buffer, group=group)
    return [
        theirs[: spec.num_bytes].view(spec.dtype).view(spec.shape) for theirs, spec in zip(received, specs, strict=True)
    ]
