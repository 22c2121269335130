"""Rows: dicts of tensors and lists with one entry per row, joined, picked and put in order."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist


class RowDict(UserDict[str, Any]):
    """A dict whose values are tensors (first dimension = rows) or lists (one element per row), all with as many rows.

    Methods that pick rows return a new batch. `reorder_data`, `truncate_tensors` and `to` work in place and return
    the batch, so that both `batch.to(device)` and `batch = batch.to(device)` do what they say.
    """

    # ---- what it holds

    @property
    def size(self) -> int:
        """Rows of the batch; 0 when it has no keys.

        Raises:
            ValueError: two keys disagree.
            TypeError: a value is neither a tensor with a row dimension nor a list.
        """
        return _num_rows_of_all(self.data)

    def get_dict(self) -> dict[str, Any]:
        """The plain dict underneath, not a copy."""
        return self.data

    def to(self, device: str | torch.device) -> Self:
        """Move every tensor to `device`, in place; lists stay."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    # ---- putting batches together

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Rows of all batches, one batch after the other; dimension 1 is padded to the widest.

        Args:
            batches: at least one; all with the same keys.
            pad_value_dict: what to pad a key with; 0 for keys it does not name.

        Shapes: `[B_i, S_i, …]` → `[Σ B_i, max S_i, …]`; `[B_i]` → `[Σ B_i]`; lists are joined.

        Raises:
            ValueError: no batch, keys of one batch that disagree on its rows, or batches that differ in keys, dtypes,
                ranks or trailing dimensions.
        """
        if not batches:
            raise ValueError("from_batches needs at least one batch, got none.")
        for number, batch in enumerate(batches):
            if batch.keys() != batches[0].keys():
                raise ValueError(f"batch {number} has keys {sorted(batch)} and batch 0 has {sorted(batches[0])}.")
            _num_rows_of_all(batch)
        pad_values = pad_value_dict or {}
        joined = cls()
        for key, first in batches[0].items():
            values = [batch[key] for batch in batches]
            if any(isinstance(value, torch.Tensor) != isinstance(first, torch.Tensor) for value in values):
                raise ValueError(f"key {key!r} is a tensor in some batches and a list in others.")
            if isinstance(first, torch.Tensor):
                joined[key] = _concatenate(key, values, pad_values.get(key, 0))
            else:
                joined[key] = [item for value in values for item in value]
        return joined

    def all_gather(
        self, group: dist.ProcessGroup | None, pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """The rows of every rank of `group`, in rank order, the same on every rank. Rows and widths may differ by rank.

        Raises:
            ValueError: ranks with different keys, or what `from_batches` raises; on every rank alike.
        """
        _num_rows_of_all(self.data)
        ours = {
            key: _Layout(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for key, value in self.data.items()
        }
        theirs: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(theirs, ours, group=group)
        kinds = [{key: isinstance(value, _Layout) for key, value in rank.items()} for rank in theirs]
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:  # seen before any tensor is exchanged, or the ranks would wait for each other
                raise ValueError(
                    f"rank {rank} gathers {sorted(kind)} and rank 0 gathers {sorted(kinds[0])}: keys must agree, and "
                    f"which of them are tensors."
                )
        parts = [dict(rank) for rank in theirs]
        for key in theirs[0]:  # rank 0's order of keys, so that every rank makes the same calls
            if kinds[0][key]:
                gathered = _gather_tensor(self.data[key], [rank[key] for rank in theirs], group)
                for part, tensor in zip(parts, gathered, strict=True):
                    part[key] = tensor
        return self.from_batches(parts, pad_value_dict)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row `num_repeats` times in a row: `[a, b]` → `[a, a, b, b]`. Elements of lists are copied deeply."""
        return self._map(
            lambda tensor: tensor.repeat_interleave(num_repeats, dim=0),
            lambda items: [copy.deepcopy(item) for item in items for _ in range(num_repeats)],
        )

    def pad_to_multiple(self, multiple: int) -> Self:
        """Append copies of row 0 that weigh nothing, until the rows divide by `multiple`.

        A filler row keeps row 0's tokens, so that it runs like any other, and has `sample_mask` 0 and `token_mask` 0,
        so that it adds nothing to a loss, a gradient or a count.

        Raises:
            ValueError: the batch is empty or has no `sample_mask` (its copies would count as data).
        """
        num_rows = self.size
        if multiple < 1 or num_rows == 0:
            raise ValueError(f"cannot pad {num_rows} rows to a multiple of {multiple}: both must be at least 1.")
        num_fillers = -num_rows % multiple
        if num_fillers == 0:
            return self.slice(0, num_rows)
        if not isinstance(self.data.get("sample_mask"), torch.Tensor):
            raise ValueError(
                f"pad_to_multiple({multiple}) on {num_rows} rows needs a 'sample_mask' tensor to give the filler rows "
                f"weight 0; the batch has keys {sorted(self.data)}."
            )
        padded = self.select_indices(list(range(num_rows)) + [0] * num_fillers)
        for key in ("sample_mask", "token_mask"):
            if key in padded:
                padded[key][num_rows:] = 0
        return padded

    # ---- picking rows

    def slice(self, start: int, end: int) -> Self:
        """Rows `start` to `end - 1`. Tensors are views of this batch's.

        Raises:
            IndexError: the rows are not all there.
        """
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"rows {start} to {end} of a batch with {self.size} rows.")
        return self._map(lambda tensor: tensor[start:end], lambda items: items[start:end])

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows with these numbers, in this order, copied. A boolean tensor picks the rows where it is true."""
        if isinstance(indices, torch.Tensor):
            indices = indices.nonzero().flatten().tolist() if indices.dtype == torch.bool else indices.tolist()
        numbers = list(indices)
        # copies, not views: pickling a view sends the whole storage behind it to the other process
        return self._map(
            lambda tensor: tensor[torch.tensor(numbers, dtype=torch.long, device=tensor.device)],
            lambda items: [items[number] for number in numbers],
        )

    def chunk(self, rank: int, chunks: int) -> Self:
        """The `rank`-th of `chunks` equal parts, copied: `[a, b, c, d]`, rank 1 of 2 → `[c, d]`."""
        num_rows = self.size
        if not 0 <= rank < chunks:
            raise IndexError(f"chunk {rank} of {chunks}: ranks run from 0 to {chunks - 1}.")
        require_multiple(num_rows, chunks, "chunks", "rows of the batch")
        share = num_rows // chunks
        return self.select_indices(range(rank * share, (rank + 1) * share))

    # ---- in place

    def reorder_data(self, order: Sequence[int]) -> Self:
        """Undo `order`, in place: row i goes to place `order[i]`.

        `from_batches(shards).reorder_data(order)` is the batch that `shard_by_batch_size` split.

        Raises:
            ValueError: `order` is not a permutation of the rows.
        """
        if sorted(order) != list(range(self.size)):
            raise ValueError(f"order must hold each of 0 … {self.size - 1} once, got {list(order)[:16]} …")
        inverse = sorted(range(len(order)), key=order.__getitem__)
        self.data = self.select_indices(inverse).data
        return self

    def truncate_tensors(self, dim: int, length: int) -> Self:
        """Cut every tensor that is longer than `length` along `dim`, in place; tensors without that dimension stay."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim and value.shape[dim] > length:
                self.data[key] = value.narrow(dim, 0, length)
        return self

    def _map(
        self, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_list: Callable[[list[Any]], list[Any]]
    ) -> Self:
        _num_rows_of_all(self.data)  # keys that disagree would pass unseen into the new batch
        mapped = type(self)()
        for key, value in self.data.items():
            mapped[key] = of_tensor(value) if isinstance(value, torch.Tensor) else of_list(value)
        return mapped


def require_multiple(value: int, divisor: int, divisor_name: str, value_name: str) -> None:
    """ValueError, with its remedy, unless `divisor` ≥ 1 divides `value`."""
    if divisor < 1 or value % divisor:
        remedy = f": append zero-weight rows with `pad_to_multiple({divisor})`." if divisor > 1 else "."
        raise ValueError(f"{value_name} = {value} does not divide by {divisor_name} = {divisor}{remedy}")


def _num_rows_of_all(values: Mapping[str, Any]) -> int:
    sizes = {key: _num_rows(key, value) for key, value in values.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"keys disagree on the number of rows: {sizes}. Every value needs one entry per row.")
    return next(iter(sizes.values()), 0)


def _num_rows(key: str, value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return value.shape[0]
    if isinstance(value, list):
        return len(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise TypeError(
        f"key {key!r} holds a {type(value).__name__}{shape}: a batch holds tensors whose first dimension is the row, "
        f"and lists with one element per row."
    )


def _concatenate(key: str, tensors: list[torch.Tensor], pad_value: int | float) -> torch.Tensor:
    """`[B_i, S_i, …]` → `[Σ B_i, max S_i, …]`."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"key {key!r} has dtypes {[str(tensor.dtype) for tensor in tensors]}: convert them to one.")
    if len({len(shape) for shape in shapes}) > 1 or len({shape[2:] for shape in shapes}) > 1:
        raise ValueError(f"key {key!r} has shapes {shapes}: only dimensions 0 (rows) and 1 (sequence) may differ.")
    if tensors[0].ndim == 1:
        return torch.cat(tensors)
    width = max(shape[1] for shape in shapes)
    joined = tensors[0].new_full((sum(shape[0] for shape in shapes), width, *shapes[0][2:]), pad_value)
    start = 0
    for tensor in tensors:
        joined[start : start + tensor.shape[0], : tensor.shape[1]] = tensor
        start += tensor.shape[0]
    return joined


class _Layout(NamedTuple):
    """What a rank must know of another rank's tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _gather_tensor(tensor: torch.Tensor, layouts: list[_Layout], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Every rank's tensor. Shapes differ by rank and collectives want equal ones: bytes, padded to the most."""
    ours = tensor.detach().contiguous().flatten().view(torch.uint8)
    buffer = ours.new_zeros(max(layout.num_bytes for layout in layouts))
    buffer[: ours.numel()] = ours
    received = [torch.empty_like(buffer) for _ in layouts]
    dist.all_gather(received, buffer, group=group)
    return [
        theirs[: layout.num_bytes].view(layout.dtype).view(layout.shape)
        for theirs, layout in zip(received, layouts, strict=True)
    ]
