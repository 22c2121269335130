"""`PolicyRanks`: lets all ranks of a policy decide alike, although only rank 0 talks to rollout engines."""

from __future__ import annotations

import pickle
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
        """Call `read` on rank 0, and return its result on every rank.

        Raises:
            RuntimeError: The result cannot be sent. It is raised on every rank.
        """
        result: Any = read() if self.leads else None
        if self._world_size == 1:
            return result
        box: list[Any] = [_packed(result) if self.leads else None]
        dist.broadcast_object_list(box, src=0, device=self._device)
        payload, failure = box[0]
        if failure is not None:
            raise RuntimeError(failure)
        return result if self.leads else pickle.loads(payload)

    def on_rank_0(self, make: Callable[[], _T], foreseen: tuple[type[Exception], ...]) -> _T | None:
        """Call `make` on rank 0, and return its result there, and None on other ranks.

        Args:
            make: What to call.
            foreseen: Errors of `make` that are raised on every rank.
        """
        made: list[_T] = []

        def failure() -> tuple[type[Exception], str] | None:
            try:
                made.append(make())
            except foreseen as error:
                return type(error), str(error)
            return None

        failed = self.from_rank_0(failure)
        if failed is not None:
            kind, message = failed
            raise kind(message)
        return made[0] if made else None

    def of_every_rank(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self._world_size
        if len(values) > 1:
            dist.all_gather_object(values, value)
        return values

    def first_failure(self, failure: str | None) -> str | None:
        """Return the failure of the lowest rank that has one, or None."""
        return next((each for each in self.of_every_rank(failure) if each is not None), None)


def _packed(value: object) -> tuple[bytes, str | None]:
    """Return a value for other ranks, or why it cannot be sent, so that they do not wait for it."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # whatever objects of users' code raise
        return b"", f"what rank 0 has cannot be sent to other ranks: {type(error).__name__}: {error}"
