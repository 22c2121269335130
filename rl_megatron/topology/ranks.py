"""`Ranks`: rank 0 acts and all ranks hear of it, or all ranks act and a failure of one is raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rl_megatron.config.errors import ConfigError, describe_error

_T = TypeVar("_T")
_LEAVING_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Ranks:
    """The ranks that act together. All ranks call a method at the same time, so that none waits for another.

    A process without a process group is rank 0 of one.

    Attributes:
        rank: This process's rank in the default process group.
        device: The device of the collectives that send values of rank 0; None for that of the process group.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @classmethod
    def detect(cls) -> Ranks:
        """Return the ranks of the default process group, or this process alone if there is none."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def share(self, make: Callable[[], _T], errors: tuple[type[Exception], ...] = ()) -> _T:
        """Call `make` on rank 0, and return its result on every rank.

        Every rank raises those of the `errors` that `make` raises, and RuntimeError if the result cannot be sent.
        """
        if self.size == 1:
            return make()
        result: Any = None
        error: Exception | None = None
        box: list[Any] = [None]
        if self.leads:
            try:
                result = make()
                box = [_pack(result)]
            except errors as expected:
                error, box = expected, [(b"", (type(expected), str(expected)))]
        dist.broadcast_object_list(box, src=0, device=self.device)
        payload, failure = box[0]
        if failure is not None:
            kind, message = failure
            raise kind(message) from error
        return result if self.leads else pickle.loads(payload)

    def run_on_rank0(self, act: Callable[[], _T], errors: tuple[type[Exception], ...] = (ConfigError,)) -> _T | None:
        """Call `act` on rank 0, and return its result there; elsewhere return None. Every rank raises the `errors`."""
        results: list[_T] = []
        self.share(lambda: results.append(act()), errors)
        return results[0] if results else None

    def try_on_rank0(
        self, act: Callable[[], object], describe: Callable[[Exception], str] = describe_error
    ) -> str | None:
        """Call `act` on rank 0, and return the description of any error that it raised, or None, on every rank."""

        def describe_failure() -> str | None:
            try:
                act()
            except Exception as error:  # any failure: the other ranks wait for the outcome
                return describe(error)
            return None

        return self.share(describe_failure)

    def all_or_none(self, act: Callable[[], _T]) -> _T:
        """Call `act` on every rank, and return its result. If any rank raises ConfigError, all ranks raise it.

        It can fail on one node only, for example if a file is missing there. The message is that of the lowest rank.
        """
        try:
            result = act()
        except ConfigError as error:
            raise ConfigError(self.find_first_failure(str(error))) from error
        failure = self.find_first_failure(None)
        if failure is not None:
            raise ConfigError(failure)
        return result

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def find_first_failure(self, failure: str | None) -> str | None:
        """Return the failure of the lowest rank that has one, or None. It names the rank unless all ranks failed."""
        failures = self.gather(failure)
        for rank, message in enumerate(failures):
            if message is not None:
                return message if all(failures) else f"{message} (on rank {rank})"
        return None


def _pack(value: object) -> tuple[bytes, tuple[type[Exception], str] | None]:
    """Return a value for other ranks, or why it cannot be sent, so that they do not wait for it."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # whatever objects of users' code raise
        return b"", (RuntimeError, f"what rank 0 has cannot be sent to other ranks: {describe_error(error)}")


def leave_together() -> None:
    """Wait for all ranks, but not for long: when one rank exits, torchrun kills others that are still logging."""
    if Ranks.detect().size > 1:
        with suppress(RuntimeError):  # another rank may have ended in another way
            barrier = dist.barrier(async_op=True)
            if barrier is not None:  # never None on a member of the group
                barrier.wait(_LEAVING_TIMEOUT)
