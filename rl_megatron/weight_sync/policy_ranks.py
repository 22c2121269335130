"""`PolicyRanks`: lets all ranks of a policy decide alike, although only rank 0 talks to rollout engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

_T = TypeVar("_T")


class PolicyRanks:
    """The exchange of small Python objects among a policy's ranks. Every rank calls every method at the same time."""

    def __init__(self, rank: int, world_size: int, device: torch.device):
        """Keep the identity of this rank.

        Args:
            rank: This process's rank in the default process group.
            world_size: The number of the policy's ranks.
            device: The device of the collectives.
        """
        self.leads = rank == 0
        self._world_size, self._device = world_size, device

    def from_rank_0(self, read: Callable[[], _T]) -> _T:
        """Call `read` on rank 0, and return its result on every rank."""
        box: list[Any] = [read() if self.leads else None]
        if self._world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self._device)
        return box[0]

    def of_every_rank(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self._world_size
        if len(values) > 1:
            dist.all_gather_object(values, value)
        return values

    def first_failure(self, failure: str | None) -> str | None:
        """Return the failure of the lowest rank that has one, or None."""
        return next((each for each in self.of_every_rank(failure) if each is not None), None)
