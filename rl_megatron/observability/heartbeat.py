"""`Heartbeat`: the signs of life that a rank writes to the job's store, and its stacks if a watchdog asks."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from rl_megatron.observability.hang import Beat
from rl_megatron.observability.position import Position
from rl_megatron.observability.waiting import main_thread_wait, stacks

_WANTED = "stacks/wanted"  # how often stacks were asked for


def beat_key(rank: int) -> str:
    """Return the key of a rank's newest heartbeat."""
    return f"heartbeat/{rank}"


class Heartbeat:
    """The heartbeats of this rank. A thread of its own calls every method; none of them uses the device."""

    def __init__(self, store: Any, rank: int, position: Position, longest: float):
        """Prepare the first heartbeat.

        Args:
            store: A connection to the store that no other thread uses.
            rank: This rank.
            position: Where the main thread is.
            longest: The most seconds that the time between two heartbeats counts. A process that was stopped and
                goes on does not count the time in between.
        """
        self._store, self._rank, self._position, self._longest = store, rank, position, longest
        self._host, self._answered = socket.gethostname(), 0
        self._changes, self._seconds, self.sent = position.changes, 0.0, 0

    def send(self, elapsed: float, has_ended: bool = False) -> None:
        """Write a heartbeat, `elapsed` seconds after the one before."""
        if self._position.changes != self._changes:
            self._changes, self._seconds = self._position.changes, 0.0
        else:
            self._seconds += min(elapsed, self._longest)
        wait = main_thread_wait()
        beat = Beat(
            self._host,
            os.getpid(),
            self.sent,
            self._position.place,
            round(self._seconds, 3),
            wait.collective,
            wait.at,
            _collectives_begun(),
            has_ended,
        )
        self._store.set(beat_key(self._rank), beat.to_json())
        self.sent += 1

    def answer(self) -> None:
        """Write the stacks of this process's threads if they were asked for since the last call."""
        wanted = self._store.add(_WANTED, 0)
        if wanted > self._answered:
            self._answered = wanted
            self._store.set(f"stacks/{wanted}/{self._rank}", stacks())
            self._store.append(f"stacks/{wanted}/of", f"{self._rank} ")


def ask_for_stacks(store: Any) -> int:
    """Ask all ranks for their stacks. Return the number of the request."""
    return store.add(_WANTED, 1)


def answered_stacks(store: Any, request: int) -> list[int]:
    """Return the ranks that have answered a request."""
    of = f"stacks/{request}/of"
    return sorted(map(int, store.get(of).decode().split())) if store.check([of]) else []


def read_stacks(store: Any, request: int, ranks: list[int]) -> list[dict[str, Any]]:
    """Return the stacks of the ranks, equal ones once, and delete them from the store."""
    keys = [f"stacks/{request}/{rank}" for rank in ranks]
    of_ranks: dict[str, list[int]] = {}
    for rank, text in zip(ranks, store.multi_get(keys) if keys else [], strict=True):
        of_ranks.setdefault(text.decode(), []).append(rank)
    for key in keys:
        store.delete_key(key)
    return [{"ranks": ranks, "stack": text.splitlines()} for text, ranks in of_ranks.items()]


def _collectives_begun() -> int | None:
    """Return how many collectives the group of all ranks has begun, if the installed torch tells."""
    group = dist.group.WORLD if dist.is_initialized() else None
    count = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return None if count is None else int(count())
    except RuntimeError:  # a backend that does not count
        return None
