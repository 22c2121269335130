"""Time the calls of async functions that share one event loop, without the time in which others hold the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator
from typing import Any

from rl_megatron.rewards.frames import CallMark


class BusyTime:
    """The seconds in which the calls of one event loop have held it."""

    seconds = 0.0


class TimedCall(Coroutine[Any, Any, Any]):
    """A coroutine that marks its call whenever it runs, and not while it waits. Its clock starts when it first runs.

    Attributes:
        has_begun: Is set when it first runs.
    """

    def __init__(self, mark: CallMark, busy: BusyTime, call: tuple[int, int], coroutine: Coroutine[Any, Any, Any]):
        """Wrap a coroutine.

        Args:
            mark: Notes which call runs.
            busy: Is shared by all calls of the loop.
            call: The job and the function.
            coroutine: The coroutine.
        """
        self._mark, self._busy, self._call, self._coroutine = mark, busy, call, coroutine
        self._start = self._busy_of_others = 0.0
        self.has_begun = asyncio.Event()

    @property
    def seconds(self) -> float:
        """Return how long the call has taken, without the time in which other calls held the loop."""
        return time.monotonic() - self._start - (self._busy.seconds - self._busy_of_others)

    def send(self, value: Any) -> Any:
        """Run the coroutine until it waits."""
        return self._run(lambda: self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise an exception where the coroutine waits."""
        return self._run(lambda: self._coroutine.throw(*error))

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        """Return the coroutine's iterator."""
        return self._coroutine.__await__()

    def _run(self, step: Any) -> Any:
        began = time.monotonic()
        if not self.has_begun.is_set():
            self.has_begun.set()
            self._start, self._busy_of_others = began, self._busy.seconds
        try:
            with self._mark.of(*self._call):
                return step()
        finally:
            held = time.monotonic() - began
            self._busy.seconds += held
            self._busy_of_others += held  # its own time is no other's


async def finished_within(timed: TimedCall, seconds: float) -> asyncio.Task[Any] | None:
    """Run a call; return its task, which is done, or None if it takes longer than so many seconds and is cancelled."""
    call = asyncio.get_running_loop().create_task(timed)
    try:
        await timed.has_begun.wait()
        while not call.done() and (left := seconds - timed.seconds) > 0:
            await asyncio.wait({call}, timeout=left)
        return call if call.done() else None
    finally:
        call.cancel()  # it has no effect on a task that is done
