"""Calls of users' code in a worker process: which call is running, and the times of calls that share an event loop."""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

# Each value is one machine word, so the other process never reads half of it. `struct.pack_into` would write zeros
# first, which the other process could read.
_CALL = struct.Struct("q")
_NO_CALL = -1
_FUNCTIONS = 1 << 16  # a job has fewer functions
_TIME = struct.Struct("d")  # of `time.monotonic`, which all processes of a machine share
_CALL_WORD, _TIME_WORD = slice(0, _CALL.size), slice(_CALL.size, _CALL.size + _TIME.size)


class CallMark:
    """A note of the call that a worker is running, in memory shared with its parent. It survives the worker's death."""

    SIZE = mmap.PAGESIZE

    def __init__(self, shared: mmap.mmap):
        """Use memory of `SIZE` bytes."""
        self._shared, self._pid = shared, os.getpid()

    def clear(self) -> None:
        """Mark that no call runs."""
        self.touch()
        self._shared[_CALL_WORD] = _CALL.pack(_NO_CALL)

    def touch(self) -> None:
        """Record the current time, which shows that the worker makes progress."""
        self._shared[_TIME_WORD] = _TIME.pack(time.monotonic())

    @property
    def touched(self) -> float:
        """Return when a call last began or ended, or the worker's event loop last ran."""
        return _TIME.unpack(self._shared[_TIME_WORD])[0]

    @contextmanager
    def mark_call(self, job: int, index: int) -> Iterator[None]:
        """Mark, during the block of a `with` statement, that function number `index` of a job is running."""
        self.touch()
        self._shared[_CALL_WORD] = _CALL.pack(job * _FUNCTIONS + index)
        try:
            yield
        finally:
            self.end_forked_child()
            self.clear()

    def end_forked_child(self) -> None:
        """End this process if it is a forked child that has returned from the function that forked it."""
        if os.getpid() != self._pid:
            os._exit(0)

    def read(self) -> tuple[int, int] | None:
        """Return the (job, function) of the call that runs, or None if no call runs."""
        (call,) = _CALL.unpack(self._shared[_CALL_WORD])
        return None if call == _NO_CALL else divmod(call, _FUNCTIONS)


class BusyTime:
    """The total time for which the calls of one event loop have blocked it."""

    seconds = 0.0


class TimedCall(Coroutine[Any, Any, Any]):
    """A coroutine that marks its call while it runs, but not while it waits. Its time is counted from its first run."""

    def __init__(self, mark: CallMark, busy: BusyTime, call: tuple[int, int], coroutine: Coroutine[Any, Any, Any]):
        """Wrap the coroutine of `call` (job, function); all calls of an event loop share `busy`."""
        self._mark, self._busy, self._call, self._coroutine = mark, busy, call, coroutine
        self._start = self._busy_of_others = 0.0
        self.has_begun = asyncio.Event()  # set when the coroutine first runs

    @property
    def seconds(self) -> float:
        """Return how long the call has taken, without the time for which other calls blocked the loop."""
        return time.monotonic() - self._start - (self._busy.seconds - self._busy_of_others)

    def send(self, value: object) -> Any:
        """Run the coroutine until it waits."""
        return self._run(lambda: self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        """Raise an exception where the coroutine waits."""
        return self._run(lambda: self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def _run(self, step: Callable[[], Any]) -> object:
        began = time.monotonic()
        if not self.has_begun.is_set():
            self.has_begun.set()
            self._start, self._busy_of_others = began, self._busy.seconds
        try:
            with self._mark.mark_call(*self._call):
                return step()
        finally:
            held = time.monotonic() - began
            self._busy.seconds += held
            self._busy_of_others += held  # only the time of other calls is subtracted


async def finish_within(timed: TimedCall, seconds: float) -> asyncio.Task[Any] | None:
    """Run a call; return its finished task, or None if it took longer than `seconds` and was cancelled."""
    call = asyncio.get_running_loop().create_task(timed)
    try:
        await timed.has_begun.wait()
        while not call.done() and (left := seconds - timed.seconds) > 0:
            await asyncio.wait({call}, timeout=left)
        return call if call.done() else None
    finally:
        call.cancel()  # it has no effect on a task that is done
