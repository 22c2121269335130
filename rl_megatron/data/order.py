"""The order of a dataset's items: which items a step reads follows from the seed and the step number.

Resuming therefore needs no saved state.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def epoch_order(num_items: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a permutation of the items, `[num_items]` int64.

    It depends on the arguments alone, and differs from epoch to epoch.
    """
    import torch  # here, because it takes seconds, and readers of files and tasks do without it

    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()  # nearby seeds must give unrelated orders
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_items, generator=generator)


class BatchSchedule:
    """The items of every global batch: shuffled epochs one after the other, cut into batches of `batch_size` items.

    Every item comes once per epoch, and none is left out at the end of an epoch: a batch may contain the last items of
    one epoch and the first items of the next. Steps are numbered from 0 without an end.

    Raises:
        ValueError: There are fewer items than `batch_size`, so that a batch would contain an item twice.
    """

    def __init__(self, num_items: int, batch_size: int, seed: int) -> None:
        if batch_size < 1 or num_items < batch_size:
            raise ValueError(
                f"cannot draw batches of {batch_size} different items from {num_items}: lower train.global_batch_size "
                f"or provide more data."
            )
        self.num_items = num_items
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def items_at(self, step: int) -> list[int]:
        """Return the indices of the `batch_size` items of step `step` ≥ 0."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}.")
        first = step * self.batch_size
        return [self._item(position) for position in range(first, first + self.batch_size)]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self.num_items)
        if epoch not in self._orders:
            # A batch spans at most two epochs, so that older orders are not needed again.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = epoch_order(self.num_items, self.seed, epoch).tolist()
        return self._orders[epoch][place]
