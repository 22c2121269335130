"""The order of a dataset's items: which items a step reads follows from the seed and the step number.

Resuming therefore needs no saved state.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def epoch_order(num_items: int, seed: int | str, epoch: int) -> torch.Tensor:
    """Return a permutation of the items, `[num_items]` int64.

    It depends on the arguments alone, and differs from epoch to epoch.
    """
    import torch  # here, because it takes seconds, and readers of files and tasks do without it

    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()  # nearby seeds must give unrelated orders
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_items, generator=generator)


class ShuffledEpochs:
    """The items of a data set in shuffled epochs, one after the other without an end. Every item is once in each."""

    def __init__(self, num_items: int, seed: int | str) -> None:
        self.num_items, self.seed = num_items, seed
        self._orders: dict[int, list[int]] = {}

    def items(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` items from place `start` ≥ 0 on."""
        return [self._item(place) for place in range(start, start + count)]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self.num_items)
        if epoch not in self._orders:
            # Neighbouring items span at most two epochs, so that older orders are not needed again.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = epoch_order(self.num_items, self.seed, epoch).tolist()
        return self._orders[epoch][place]


class BatchSchedule:
    """The items of every global batch: shuffled epochs one after the other, cut into batches of `batch_size` items.

    Every item comes once per epoch, and none is left out at the end of an epoch: a batch may contain the last items of
    one epoch and the first items of the next. Steps are numbered from 0 without an end.

    Raises:
        ValueError: There are fewer items than `batch_size`, so that a batch would contain an item twice.
    """

    def __init__(self, num_items: int, batch_size: int, seed: int) -> None:
        check_batch_size(num_items, batch_size)
        self.num_items, self.batch_size = num_items, batch_size
        self._epochs = ShuffledEpochs(num_items, seed)

    def items_at(self, step: int) -> list[int]:
        """Return the indices of the `batch_size` items of step `step` ≥ 0."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}.")
        return self._epochs.items(step * self.batch_size, self.batch_size)


def check_batch_size(num_items: int, batch_size: int) -> None:
    """Check that a batch can have different items.

    Raises:
        ValueError: There are fewer items than `batch_size`.
    """
    if batch_size < 1 or num_items < batch_size:
        raise ValueError(
            f"cannot draw batches of {batch_size} different items from {num_items}: lower train.global_batch_size or "
            "provide more data."
        )
