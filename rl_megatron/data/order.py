"""Which rows belong to which step: a function of the seed and the step number, so resuming needs no saved state."""

from __future__ import annotations

import hashlib

import torch


def epoch_order(num_rows: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of the rows, `[num_rows]` int64: the same for the same arguments, another one for every epoch."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()  # so that neighbouring seeds share nothing
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(num_rows, generator=generator)


class BatchSchedule:
    """The rows of every global batch: the shuffled epochs laid end to end, cut every `batch_size` rows.

    Each row comes once per epoch, and no row is left out at an epoch's end: a batch may hold the last rows of one epoch
    and the first of the next. Step numbers count from 0 and never end.

    Raises:
        ValueError: no rows, or fewer than `batch_size` (every batch would hold some row twice).
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if batch_size < 1 or num_rows < batch_size:
            raise ValueError(
                f"cannot draw batches of {batch_size} different rows from {num_rows}: lower train.global_batch_size "
                f"or provide more data."
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def rows_at(self, step: int) -> list[int]:
        """The `batch_size` rows of step `step` ≥ 0."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}.")
        first = step * self.batch_size
        return [self._row(position) for position in range(first, first + self.batch_size)]

    def epochs_at(self, step: int) -> float:
        """Epochs completed before step `step`; 1.5 is the middle of the second."""
        return step * self.batch_size / self.num_rows

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self.num_rows)
        if epoch not in self._orders:
            # a batch spans two epochs at most: older orders are never asked for again
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = epoch_order(self.num_rows, self.seed, epoch).tolist()
        return self._orders[epoch][place]
