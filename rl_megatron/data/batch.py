"""`BatchedDataDict`: a batch of sequences, with one entry per sequence under each key.

`Padding` makes batches of lists of token ids. `score_positions` returns the index of the token at which the score of a
sequence is read.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """A dict of tensors (first dimension: the sequences) and lists (one element per sequence), all of the same size.

    Methods that return a batch return a new one, and leave this one unchanged. `DictT` names the keys that a loss
    expects, as in `BatchedDataDict[ClippedPGLossDataDict]`; it is not checked at runtime.
    """

    @property
    def size(self) -> int:
        """Return the number of sequences; 0 if the batch has no keys.

        Raises:
            ValueError: Two keys have different numbers of sequences.
            TypeError: A value is neither a tensor with a first dimension nor a list.
        """
        return common_size(self.data)

    def get_dict(self) -> dict[str, Any]:
        """Return the plain dict underneath, not a copy."""
        return self.data

    def to(self, device: str | torch.device) -> Self:
        """Return a batch with every tensor on `device`. Lists, and tensors that are already there, are not copied."""
        moved = type(self)()
        for key, value in self.data.items():
            moved[key] = value.to(device) if isinstance(value, torch.Tensor) else value
        return moved

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Join batches in order; dimension 1 of each key is padded to its largest size in any batch.

        Shapes: `[B_i, S_i, …]` → `[Σ B_i, max S_i, …]`; `[B_i]` → `[Σ B_i]`; lists are joined.

        Args:
            batches: At least one batch; all have the same keys.
            pad_value_dict: The padding value of each key; 0 for keys that it does not name.

        Raises:
            ValueError: `batches` is empty, the keys of one batch differ in their number of sequences, or batches differ
                in keys, types, numbers of dimensions, or sizes of dimensions after the second.
        """
        if not batches:
            raise ValueError("from_batches needs at least one batch, got none.")
        for number, batch in enumerate(batches):
            if batch.keys() != batches[0].keys():
                raise ValueError(f"batch {number} has keys {sorted(batch)}, but batch 0 has {sorted(batches[0])}.")
            common_size(batch)
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

    def pad_to_multiple(self, multiple: int) -> Self:
        """Return the batch with padding sequences of zero loss weight appended until `multiple` divides its size.

        A padding sequence has the tokens of sequence 0, so that it runs like any other, and has `sample_mask` 0 and
        `token_mask` 0, so that it adds nothing to a loss, a gradient or a count.

        Raises:
            ValueError: The batch is empty, `multiple` is below 1, or padding is needed but the batch has no
                `sample_mask`.
        """
        size = self.size
        if multiple < 1 or size == 0:
            raise ValueError(f"cannot pad {size} sequences to a multiple of {multiple}: both must be at least 1.")
        num_padding = -size % multiple
        if num_padding == 0:
            return self.slice(0, size)
        if not isinstance(self.data.get("sample_mask"), torch.Tensor):
            raise ValueError(
                f"pad_to_multiple({multiple}) on {size} sequences needs a 'sample_mask' tensor to give the padding "
                f"sequences weight 0; the batch has keys {sorted(self.data)}."
            )
        padded = self.select_indices(list(range(size)) + [0] * num_padding)
        for key in ("sample_mask", "token_mask"):
            if key in padded:
                padded[key][size:] = 0
        return padded

    def slice(self, start: int, end: int) -> Self:
        """Return sequences `start` to `end - 1`. The tensors are views of this batch's tensors.

        Raises:
            IndexError: The batch does not have all of these sequences.
        """
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"cannot slice sequences {start} to {end} of a batch with {self.size} sequences.")
        return self.map_values(lambda tensor: tensor[start:end], lambda items: items[start:end])

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return copies of the sequences with these indices, in this order.

        Args:
            indices: Indices, or a boolean tensor that is true for the sequences to return.

        Raises:
            IndexError: The batch does not have all of these sequences, or the boolean tensor is not [B].
        """
        size = self.size
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool and indices.shape != (size,):
            raise IndexError(
                f"booleans of shape {tuple(indices.shape)} cannot select from a batch with {size} sequences."
            )
        if isinstance(indices, torch.Tensor):
            indices = indices.nonzero().flatten().tolist() if indices.dtype == torch.bool else indices.tolist()
        numbers = list(indices)
        if wrong := [number for number in numbers if not -size <= number < size]:
            raise IndexError(f"cannot select sequence {wrong[0]} of a batch with {size} sequences.")
        # These are copies, not views: pickling a view sends its whole storage to the other process.
        return self.map_values(
            lambda tensor: tensor[torch.tensor(numbers, dtype=torch.long, device=tensor.device)],
            lambda items: [items[number] for number in numbers],
        )

    def map_values(
        self, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_list: Callable[[list[Any]], list[Any]]
    ) -> Self:
        """Return a batch with `of_tensor` applied to every tensor and `of_list` applied to every list."""
        common_size(self.data)
        mapped = type(self)()
        for key, value in self.data.items():
            mapped[key] = of_tensor(value) if isinstance(value, torch.Tensor) else of_list(value)
        return mapped


def common_size(values: Mapping[str, object]) -> int:
    """Return the common number of sequences of these tensors and lists; 0 if there are none."""
    sizes = {key: _size(key, value) for key, value in values.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"keys disagree on the number of sequences: {sizes}. Every value needs one entry per sequence."
        )
    return next(iter(sizes.values()), 0)


def _size(key: str, value: object) -> int:
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return value.shape[0]
    if isinstance(value, list):
        return len(value)
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    raise TypeError(
        f"key {key!r} holds a {type(value).__name__}{shape}: a batch holds tensors whose first dimension is the "
        f"sequence, and lists with one element per sequence."
    )


def _concatenate(key: str, tensors: list[torch.Tensor], pad_value: int | float) -> torch.Tensor:
    """Return `[Σ B_i, max S_i, …]` of tensors `[B_i, S_i, …]`."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"key {key!r} has dtypes {[str(tensor.dtype) for tensor in tensors]}: convert them to one.")
    if len({len(shape) for shape in shapes}) > 1 or len({shape[2:] for shape in shapes}) > 1:
        raise ValueError(f"key {key!r} has shapes {shapes}: only dimensions 0 (sequences) and 1 (tokens) may differ.")
    if tensors[0].ndim == 1:
        return torch.cat(tensors)
    width = max(shape[1] for shape in shapes)
    joined = tensors[0].new_full((sum(shape[0] for shape in shapes), width, *shapes[0][2:]), pad_value)
    start = 0
    for tensor in tensors:
        joined[start : start + tensor.shape[0], : tensor.shape[1]] = tensor
        start += tensor.shape[0]
    return joined


@dataclass(frozen=True)
class Padding:
    """The rule by which lists of token ids become a tensor `[B, S]`, padded on the right.

    Attributes:
        multiple: S is the length of the longest list, rounded up to a multiple of this.
    """

    pad_id: int
    multiple: int

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {self.multiple}.")

    def collate(self, sequences: list[list[int]]) -> BatchedDataDict:
        """Return `input_ids` `[B, S]` with S ≥ 1, `input_lengths` `[B]` and a `sample_mask` `[B]` of ones."""
        if not sequences:
            raise ValueError("a batch needs at least one sequence, got none.")
        lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
        width = -(-max(int(lengths.max()), 1) // self.multiple) * self.multiple
        return BatchedDataDict(
            input_ids=torch.tensor([sequence + [self.pad_id] * (width - len(sequence)) for sequence in sequences]),
            input_lengths=lengths,
            sample_mask=torch.ones(len(sequences)),
        )


def span_mask(starts: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    """Return a mask `[B, width]` fp32 that is 1 from `starts[b]` to `ends[b] - 1` and 0 elsewhere."""
    positions = torch.arange(width)
    return ((positions >= starts[:, None]) & (positions < ends[:, None])).float()


def score_positions(data: Mapping[str, Any]) -> Int[Tensor, " batch"]:
    """Return the index of each sequence's last token.

    In a batch without `input_lengths`, the last token is the last one with token_mask ≠ 0. The index is 0 for a
    sequence that is empty or has token_mask 0 everywhere.
    """
    if "input_lengths" in data:
        return (data["input_lengths"].long() - 1).clamp(min=0)
    if "token_mask" not in data:
        raise KeyError(
            f"the position of a score needs 'input_lengths' or 'token_mask', but the batch has only {sorted(data)}"
        )
    mask = data["token_mask"]
    if mask.dim() != 2 or not mask.size(1):
        raise ValueError(f"token_mask {tuple(mask.shape)} must be [B, S] with at least one token")
    return torch.where(mask != 0, torch.arange(mask.size(1), device=mask.device), 0).amax(dim=1)
