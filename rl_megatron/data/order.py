"""The order of a dataset's items. It depends only on their number, a seed and the epoch: resuming needs no state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def epoch_order(num_items: int, seed: int | str, epoch: int) -> torch.Tensor:
    """Return a permutation of the items, `[num_items]` int64, which depends on the arguments alone."""
    import torch  # here, because the import takes seconds, and code that only reads files or tasks needs no torch

    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()  # nearby seeds must give unrelated orders
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_items, generator=generator)


class ShuffledEpochs:
    """The items of a data set in endless shuffled epochs, each of which has every item once."""

    def __init__(self, num_items: int, seed: int | str) -> None:
        self.num_items, self.seed = num_items, seed
        self._orders: dict[int, list[int]] = {}

    def items(self, start: int, count: int) -> list[int]:
        """Return the indices of `count` items from position `start` ≥ 0 on."""
        return [self._item(position) for position in range(start, start + count)]

    def _item(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_items)
        if epoch not in self._orders:
            # Positions rise from batch to batch, so only the previous epoch's order may be needed again.
            self._orders = {number: order for number, order in self._orders.items() if number == epoch - 1}
            self._orders[epoch] = epoch_order(self.num_items, self.seed, epoch).tolist()
        return self._orders[epoch][offset]


def check_batch_size(num_items: int, batch_size: int) -> None:
    """Check that there are enough items for a batch without duplicates."""
    if batch_size < 1 or num_items < batch_size:
        raise ValueError(
            f"cannot draw batches of {batch_size} different items from {num_items}: lower train.global_batch_size or "
            "provide more data."
        )
