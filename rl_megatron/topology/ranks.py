"""`Ranks`: call a function on rank 0 and share its result, or call it on all ranks and share the first failure."""

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
    """The ranks that act together. All methods except `detect` are collective: every rank must call them.

    A process without a process group is rank 0 of one rank.

    Attributes:
        rank: This process's rank in the default process group.
        device: The device of the broadcasts from rank 0; None for the device of the process group.
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

        If `make` raises one of `errors`, every rank raises it. If the result cannot be sent, every rank raises
        RuntimeError.
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
        """Call `act` on rank 0, and return its result there and None elsewhere. Every rank raises `act`'s `errors`."""
        results: list[_T] = []
        self.share(lambda: results.append(act()), errors)
        return results[0] if results else None

    def try_on_rank0(
        self, act: Callable[[], object], describe: Callable[[Exception], str] = describe_error
    ) -> str | None:
        """Call `act` on rank 0. On every rank, return the description of the error that `act` raised, or None."""

        def describe_failure() -> str | None:
            try:
                act()
            except Exception as error:  # any failure: the other ranks wait for the outcome
                return describe(error)
            return None

        return self.share(describe_failure)

    def all_or_none(self, act: Callable[[], _T]) -> _T:
        """Call `act` on every rank, and return its result. If any rank raises ConfigError, all ranks raise it.

        `act` may fail on one node only, for example if a file is missing. The lowest failed rank's message is used.
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
        """Return the failure of the lowest failed rank, with its number unless all failed, or None if none failed."""
        failures = self.gather(failure)
        for rank, message in enumerate(failures):
            if message is not None:
                return message if all(failures) else f"{message} (on rank {rank})"
        return None


def _pack(value: object) -> tuple[bytes, tuple[type[Exception], str] | None]:
    """Return (the pickled value, None) or, if it cannot be pickled, (b"", the error that all ranks raise)."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # objects from users' code may raise any error
        return b"", (RuntimeError, f"the result of rank 0 cannot be sent to other ranks: {describe_error(error)}")


def leave_together() -> None:
    """Wait up to 30 s for all ranks, because torchrun kills ranks that are still logging when another rank exits."""
    if Ranks.detect().size > 1:
        with suppress(RuntimeError):  # another rank may have ended already
            barrier = dist.barrier(async_op=True)
            if barrier is not None:  # never None on a member of the group
                barrier.wait(_LEAVING_TIMEOUT)
