"""Time the phases of a training loop, such as rollout, logprobs and train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class PhaseTime:
    """The time of one phase.

    Attributes:
        seconds: Wall-clock seconds, over all times that the phase ran.
        count: How many times the phase ran to its end.
    """

    seconds: float
    count: int


class PhaseTimer:
    """Wall-clock time by phase. It owns the sums until `collect` returns them.

    Phases may nest. The time of a phase includes that of the phases within it, except of the same phase: a phase that
    is entered while it runs is one run, from the outermost entry to its end. Work that a GPU still has to do when a
    phase ends is not waited for.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        observer: Callable[[str | None], None] = lambda phase: None,
    ):
        """Start without any time.

        Args:
            clock: Returns seconds, and never goes back.
            observer: Is given the innermost phase that runs whenever that changes, and None when none runs. A
                phase that ends by an exception stays until the next one begins, so that the failure is known to be in
                it.
        """
        self._clock, self.observer = clock, observer
        self._running: list[str] = []
        self._times: dict[str, PhaseTime] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block of a `with` statement as a part of phase `name`, also if the block raises."""
        if name in self._running:
            yield
            return
        self._running.append(name)
        self.observer(name)
        began = self._clock()
        try:
            yield
        except BaseException:
            self._end(name, began)
            raise
        self._end(name, began)
        self.observer(self._running[-1] if self._running else None)

    def _end(self, name: str, began: float) -> None:
        self._running.remove(name)
        before = self._times.get(name, PhaseTime(0.0, 0))
        self._times[name] = PhaseTime(before.seconds + self._clock() - began, before.count + 1)

    def collect(self) -> dict[str, PhaseTime]:
        """Return the time of each phase that ended since the last call, in the order of their first ends, and reset.

        A phase that still runs counts in full when it ends.
        """
        times, self._times = self._times, {}
        return times
