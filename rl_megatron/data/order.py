"""Which items of a dataset belong to which step: a function of the seed and the step number.

Resuming therefore needs no saved state.
"""

from __future__ import annotations

import hashlib

import torch


def epoch_order(num_items: int, seed: int, epoch: int) -> torch.Tensor:
    """Return a permutation of the items, `[num_items]` int64.

    It is the same for the same arguments, and another one for every epoch.
    """
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()  # so that neighbouring seeds share nothing
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_items, generator=generator)


class BatchSchedule:
    """The items of every global batch: the shuffled epochs laid end to end, cut every `batch_size` items.

    Each item comes once per epoch, and none is left out at an epoch's end: a batch may hold the last items of one epoch
    and the first of the next. Step numbers count from 0 and never end.

    Raises:
        ValueError: There are no items, or fewer than `batch_size` (every batch would hold some item twice).
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
        """Return the numbers of the `batch_size` items of step `step` ≥ 0."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}.")
        first = step * self.batch_size
        return [self._item(position) for position in range(first, first + self.batch_size)]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self.num_items)
        if epoch not in self._orders:
            # A batch spans two epochs at most: older orders are never asked for again.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = epoch_order(self.num_items, self.seed, epoch).tolist()
        return self._orders[epoch][place]
