"""Time the phases of a step, such as train and, within it, forward and backward, without gaps, and their peak memory.

Every moment belongs to the innermost phase that runs then, or to none. So the times of all phases and of the rest add
up to the time of the step. In a profiled step, processes also record spans of time with names, on the wall clock.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import torch

Path = tuple[str, ...]  # the names of nested phases, the outermost first; () between phases

_RESET = "/proc/self/clear_refs"
_RESET_PEAK = b"5"  # sets the largest resident set to the present one


class Clock(Protocol):
    """What makes marks, and tells the time between two of them."""

    def mark(self) -> Any:
        """Return a mark of this moment."""
        ...

    def seconds(self, began: Any, ended: Any) -> float | None:
        """Return the seconds between two marks, or None if they are not known yet."""
        ...


class HostClock:
    """The wall clock of this process."""

    def mark(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """Return the difference of two times."""
        return ended - began


class StreamClock:
    """The time at which a GPU's current stream gets to a mark: when it has done what was queued before it.

    Nobody waits for the GPU. The time between two marks is known once the GPU has reached the second.
    """

    def mark(self) -> torch.cuda.Event:
        """Return an event, which is queued."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float | None:
        """Return the seconds between two events, or None if the GPU has not reached the second."""
        return began.elapsed_time(ended) / 1000 if ended.query() else None


class PeakMemory(Protocol):
    """A meter of memory."""

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if it is not known."""
        ...


class DevicePeak:
    """The memory of tensors on this process's GPU, as torch's allocator counts it."""

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class HostPeak:
    """The resident set of this process, which Linux counts. It owns the file that resets it."""

    def __init__(self) -> None:
        self._reset: BinaryIO | None = None
        with suppress(OSError):  # another system, or a container that does not allow it
            self._reset = open(_RESET, "wb", buffering=0)  # noqa: SIM115  # opening takes longer

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if the system does not tell it."""
        if self._reset is None:
            return None
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            self._reset.write(_RESET_PEAK)
        except OSError:
            self._reset = None
        return peak


@dataclass(frozen=True)
class StepTimes:
    """The times of a step, or of whatever was between two calls of `PhaseTimer.collect`.

    Attributes:
        seconds: The seconds of each path of phases, without those of phases within it; `()` has those between phases.
        peak_bytes: The most memory that was in use during each outermost phase.
        tokens: The tokens that each outermost phase worked on, as far as it said so.
    """

    seconds: dict[Path, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return sum(self.seconds.values())

    def of_phase(self, name: str) -> float:
        """Return the seconds of an outermost phase, with those of all phases within it."""
        return sum(seconds for path, seconds in self.seconds.items() if path[:1] == (name,))

    def within(self, name: str) -> dict[str, float]:
        """Return the seconds by innermost phase of an outermost phase, without those that belong to it alone."""
        found: dict[str, float] = {}
        for path, seconds in self.seconds.items():
            if path[:1] == (name,) and len(path) > 1:
                found[path[-1]] = found.get(path[-1], 0.0) + seconds
        return found


class PhaseTimer:
    """The times of phases, which may nest. It owns the marks until `collect` returns the times between them.

    A phase that is entered while it runs is not entered again.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        memory: PeakMemory | None = None,
        observer: Callable[[str | None], None] = lambda phase: None,
    ):
        """Start without any time.

        Args:
            clock: What the times are measured with; by default the wall clock.
            memory: What measures the peak memory of outermost phases, or None.
            observer: Is given the outermost phase that runs whenever that changes, and None when none runs. A
                phase that ends by an exception stays until the next one begins, so that the failure is known to be in
                it.
        """
        self._clock: Clock = clock or HostClock()
        self._memory, self.observer = memory, observer
        self.listener: Callable[[Path], None] | None = None  # is given all running phases whenever they change
        self.path: Path = ()  # the phases that run now
        self._marks: deque[tuple[Any, Path]] = deque()  # each with the phases that run from it on
        self._peaks: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Drop all times before now."""
        self._marks = deque([(self._clock.mark(), self.path)])
        self._peaks, self._tokens = {}, {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block of a `with` statement as a part of phase `name`, also if the block raises."""
        outer = self.begin(name)
        try:
            yield
        except BaseException:
            self._go_to(outer)
            raise
        self.end(outer)

    def count_tokens(self, number: int) -> None:
        """Count tokens that the outermost phase works on. Those of phases within it do not count."""
        if len(self.path) == 1:
            self._tokens[self.path[0]] = self._tokens.get(self.path[0], 0) + number

    def begin(self, name: str) -> Path:
        """Begin a phase, and return what `end` needs."""
        outer = self.path
        if name not in outer:
            self._go_to((*outer, name))
            if not outer:
                self.observer(name)
        return outer

    def end(self, outer: Path) -> None:
        """End the phase whose `begin` returned `outer`, and those within it that still run."""
        if self.path != outer:
            self._go_to(outer)
            if not outer:
                self.observer(None)

    def collect(self) -> StepTimes:
        """Return the times since the last call, without what a GPU has not done yet: that is in the next call's."""
        self._go_to(self.path)
        seconds: dict[Path, float] = {}
        while len(self._marks) > 1:
            (began, path), (ended, _) = self._marks[0], self._marks[1]
            between = self._clock.seconds(began, ended)
            if between is None:
                break
            seconds[path] = seconds.get(path, 0.0) + between
            self._marks.popleft()
        peaks, tokens, self._peaks, self._tokens = self._peaks, self._tokens, {}, {}
        return StepTimes(seconds, peaks, tokens)

    def _go_to(self, path: Path) -> None:
        self._marks.append((self._clock.mark(), path))
        if self._memory is not None and path[:1] != self.path[:1]:
            peak = self._memory.peak_and_reset()
            if self.path and peak is not None:
                self._peaks[self.path[0]] = max(peak, self._peaks.get(self.path[0], 0))
        self.path = path
        if self.listener is not None:
            self.listener(path)


_IN_USE: list[PhaseTimer] = []


@contextmanager
def timing(timer: PhaseTimer) -> Iterator[None]:
    """Let `phase` in this process time phases with `timer` during the block of a `with` statement."""
    _IN_USE.append(timer)
    try:
        yield
    finally:
        _IN_USE.remove(timer)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Time the block of a `with` statement as a phase of the timer that is in use, if one is."""
    if not _IN_USE:
        yield
        return
    with _IN_USE[-1].phase(name):
        yield


def count_tokens(number: int) -> None:
    """Count tokens of the phase of the timer that is in use; see `PhaseTimer.count_tokens`."""
    if _IN_USE:
        _IN_USE[-1].count_tokens(number)


# --- megatron-core's work ---

_PHASES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "collectives",
    "params-all-gather": "collectives",
    "embedding-grads-all-reduce": "collectives",
    "non-tensor-parallel-grads-all-reduce": "collectives",
}
_BETWEEN_STAGES = ("-recv", "-send")  # at the end of the names of what pipeline stages wait for


class MegatronTimers:
    """The object that megatron-core tells about its work, which becomes phases of the timer in use.

    It is the attribute `timers` of a configuration: `timers(name, log_level=2).start()`, and `.stop()`.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[PhaseTimer, Path]] = {}

    def __call__(self, name: str, log_level: int = 0) -> _NamedTimer:
        """Return what times one kind of work. Every level is timed."""
        return _NamedTimer(self._running, name)


class _NamedTimer:
    def __init__(self, running: dict[str, tuple[PhaseTimer, Path]], name: str):
        self._running, self._name = running, name

    def start(self, barrier: bool = False) -> None:
        """Begin the phase, if a timer is in use and knows this work. There is never a barrier."""
        work = "pipeline_wait" if self._name.endswith(_BETWEEN_STAGES) else _PHASES.get(self._name)
        if _IN_USE and work is not None:
            self._running[self._name] = (_IN_USE[-1], _IN_USE[-1].begin(work))

    def stop(self, barrier: bool = False) -> None:
        """End the phase, if it was begun."""
        timer, outer = self._running.pop(self._name, (None, ()))
        if timer is not None:
            timer.end(outer)


MEGATRON_TIMERS = MegatronTimers()


# --- spans of a profiled step ---


@dataclass(frozen=True)
class Span:
    """A time in which a process did something.

    Attributes:
        process: What people call the process, such as "rank 0" or "rollout engine 0 (process 17)".
        name: What it did.
        began: The begin, in nanoseconds since 1970.
        ended: The end.
    """

    process: str
    name: str
    began: int
    ended: int


_RECORDED: list[list[Span]] = []


@contextmanager
def recording_spans() -> Iterator[list[Span]]:
    """Yield a list to which the spans of this process are added during the block of a `with` statement."""
    spans: list[Span] = []
    _RECORDED.append(spans)
    try:
        yield spans
    finally:
        _RECORDED.remove(spans)


def record_span(process: str, name: str, began: int) -> None:
    """Add a span that ends now, if spans are recorded.

    Args:
        process: The process.
        name: What it did.
        began: What `time.time_ns` returned at its begin.
    """
    if _RECORDED:
        _RECORDED[-1].append(Span(process, name, began, time.time_ns()))
