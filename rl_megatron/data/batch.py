"""`BatchedDataDict`: one batch, rows first, on its way from a dataset to a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

import torch

from rl_megatron.batching.plan import (
    DynamicBatchingArgs,
    MicrobatchPlan,
    SequencePackingArgs,
    plan_dynamic_batching,
    plan_sequence_packing,
)
from rl_megatron.data.rows import RowDict, require_multiple

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(RowDict, Generic[DictT]):
    """Rows (see `RowDict`) that can be sharded over data-parallel ranks and read in microbatches.

    `DictT` names the keys a loss expects, as in `BatchedDataDict[ClippedPGLossDataDict]`; it is not checked at runtime.

    Attributes:
        micro_batch_indices: `[chunk][microbatch] = [start, end]`, rows counted from the chunk's first; None unless
            `shard_by_batch_size` planned microbatches. Methods that pick rows drop the plan, `get_batch` keeps it.
        micro_batch_lengths: `[chunk][microbatch]`: the width to cut the microbatch to (dynamic batching) or its tokens
            in all (sequence packing).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        super().__init__(*args, **kwargs)

    # ---- shards

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
        sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    ) -> list[Self] | tuple[list[Self], list[int]]:
        """Split each chunk of `batch_size` rows over the shards; a shard is its parts of all chunks, in order.

        `[a a b b c c d d]` with `shards=2, batch_size=4` → `[a a c c]`, `[b b d d]`: every optimizer step (one chunk)
        uses its own rows, whatever the number of shards.

        Args:
            shards: data-parallel ranks.
            batch_size: rows of a chunk over all shards; all rows by default.
            allow_uneven_shards: let the last shards have fewer rows (or none); only without `batch_size`.
            dynamic_batching_args: plan microbatches of rows of like length; see `DynamicBatchingArgs`.
            sequence_packing_args: plan microbatches that fit one packed row; see `SequencePackingArgs`.

        Returns:
            The shards. With one of the two plans also `order`: row i of the shards read one after the other is row
            `order[i]` of this batch. Every shard has the same number of microbatches per chunk; read them with
            `get_batch` and the iterator of that plan.

        Raises:
            ValueError: both plans asked for, sizes that do not divide, or a sequence over the token budget.
        """
        num_rows = self.size
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("dynamic_batching_args and sequence_packing_args exclude each other: give one of them.")
        if allow_uneven_shards and batch_size is not None:
            raise ValueError("allow_uneven_shards splits the batch once: leave batch_size out.")
        batch_size = num_rows if batch_size is None else batch_size
        if batch_size < 1 or shards < 1:
            raise ValueError(f"cannot split {num_rows} rows in chunks of {batch_size} over {shards} shards.")
        require_multiple(num_rows, batch_size, "batch_size", "rows of the batch")
        if not allow_uneven_shards:
            require_multiple(batch_size, shards, "shards", "batch_size (by default, all rows)")
        starts = range(0, num_rows, batch_size)
        if dynamic_batching_args is not None:
            dynamic = DynamicBatchingArgs.of(dynamic_batching_args)
            lengths, width = self._lengths(dynamic.input_lengths_key), self._sequence_width(dynamic.input_key)
            plans = [plan_dynamic_batching(lengths[i : i + batch_size], width, shards, dynamic) for i in starts]
            return self._shards_of(plans, batch_size)
        if sequence_packing_args is not None:
            packing = SequencePackingArgs.of(sequence_packing_args)
            lengths = self._lengths(packing.input_lengths_key)
            plans = [
                plan_sequence_packing(lengths[i : i + batch_size], shards, packing, allow_uneven_shards) for i in starts
            ]
            return self._shards_of(plans, batch_size)
        share = -(-batch_size // shards)
        return [
            self.select_indices(
                [row for i in starts for row in range(i + shard * share, min(i + (shard + 1) * share, i + batch_size))]
            )
            for shard in range(shards)
        ]

    def _shards_of(self, plans: list[MicrobatchPlan], batch_size: int) -> tuple[list[Self], list[int]]:
        """The shards that one plan per chunk describes, and the order of rows over all of them."""
        shards: list[Self] = []
        order: list[int] = []
        for number in range(len(plans[0].rows)):
            rows: list[int] = []
            indices: list[list[list[int]]] = []
            for chunk, plan in enumerate(plans):
                bounds, end = [], 0
                for microbatch in plan.rows[number]:
                    rows += [chunk * batch_size + row for row in microbatch]
                    bounds.append([end, end + len(microbatch)])
                    end += len(microbatch)
                indices.append(bounds)
            shard = self.select_indices(rows)
            shard.micro_batch_indices = indices
            shard.micro_batch_lengths = [plan.lengths[number] for plan in plans]
            shards.append(shard)
            order += rows
        return shards, order

    def _lengths(self, key: str) -> list[int]:
        if key not in self.data:
            raise ValueError(f"planning microbatches needs lengths under {key!r}; the batch has {sorted(self.data)}.")
        lengths = self.data[key]
        return [int(length) for length in (lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths)]

    def _sequence_width(self, key: str) -> int:
        """S of `[B, S]`, once it is certain that cutting dimension 1 of any tensor cuts a sequence and nothing else."""
        tokens = self.data.get(key)
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
            raise ValueError(f"dynamic batching needs {key!r} as a [B, S] tensor; the batch has {sorted(self.data)}.")
        width = tokens.shape[1]
        for other, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] not in (1, width):
                raise ValueError(
                    f"dynamic batching cuts dimension 1 to the longest row, and {other!r} {tuple(value.shape)} is not "
                    f"as wide as {key!r} {tuple(tokens.shape)}: align it with the tokens, or carry it as a list."
                )
        return width

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> Self:
        """The `batch_idx`-th chunk of a shard, as `shard_by_batch_size` made it, with its microbatches.

        Where microbatches were planned, the plan knows how many rows each chunk has on this shard, and `batch_size` is
        not read. Otherwise it is required: rows of a chunk on this shard.

        Raises:
            ValueError: no plan and no `batch_size`.
            IndexError: no such chunk.
        """
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            if batch_size is None:
                raise ValueError("get_batch needs batch_size: this batch has no planned microbatches to read it from.")
            return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        if not 0 <= batch_idx < len(self.micro_batch_indices):
            raise IndexError(f"chunk {batch_idx} of a shard with {len(self.micro_batch_indices)} chunks.")
        ends = [chunk[-1][1] for chunk in self.micro_batch_indices]
        start = sum(ends[:batch_idx])
        batch = self.slice(start, start + ends[batch_idx])
        batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        return batch

    # ---- microbatches

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Consecutive slices of `microbatch_size` rows.

        Raises:
            ValueError: at the call, when the rows do not divide.
        """
        require_multiple(self.size, microbatch_size, "microbatch_size", "rows of the batch")
        starts = range(0, self.size, microbatch_size)
        return (self.slice(start, start + microbatch_size) for start in starts)

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        """The microbatches that dynamic batching planned for this chunk, each cut to its planned width."""
        bounds, lengths = self._planned()
        return (
            self.slice(start, end).truncate_tensors(sequence_dim, length)
            for (start, end), length in zip(bounds, lengths, strict=True)
        )

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """How many microbatches `make_microbatch_iterator_with_dynamic_shapes` yields; the same on every shard."""
        return len(self._planned()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        """The microbatches that sequence packing planned for this chunk: rows that fit one pack, still padded."""
        bounds, _ = self._planned()
        return (self.slice(start, end) for start, end in bounds)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """(Number of microbatches that its iterator yields, the same on every shard; tokens of the fullest one.)"""
        bounds, lengths = self._planned()
        return len(bounds), max(lengths)

    def _planned(self) -> tuple[list[list[int]], list[int]]:
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise ValueError(
                "no microbatches are planned: call shard_by_batch_size with dynamic_batching_args or "
                "sequence_packing_args first."
            )
        if len(self.micro_batch_indices) != 1:
            raise ValueError(f"the shard holds {len(self.micro_batch_indices)} chunks: pick one with get_batch(i).")
        return self.micro_batch_indices[0], self.micro_batch_lengths[0]
