"""Measure time and peak memory of a step's phases, which may nest: the phase train contains forward and backward.

Every moment counts for the innermost running phase, or as time between phases. So these times add up to the time of the
step. In a profiled step, processes also record named spans of time on the wall clock.
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

Phases = tuple[str, ...]  # the names of nested phases, the outermost first; () between phases

_RESET = "/proc/self/clear_refs"
_RESET_PEAK = b"5"  # resets the peak resident set size to the current size


class Clock(Protocol):
    """A clock that makes marks, and measures the time between two of them."""

    def mark(self) -> Any:
        """Return a mark of this moment."""
        ...

    def seconds(self, began: Any, ended: Any) -> float | None:
        """Return the seconds between two marks, or None if the time is not known yet."""
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
    """The clock of a GPU's current stream: the time of a mark is when the work queued before it has ended.

    The host does not wait for the GPU. The time between two marks is known once the GPU has reached the later mark.
    """

    def mark(self) -> torch.cuda.Event:
        """Return an event, which is queued in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float | None:
        """Return the seconds between two events, or None if the GPU has not reached the later event."""
        return began.elapsed_time(ended) / 1000 if ended.query() else None


class PeakMemory(Protocol):
    """A meter of peak memory."""

    def take_peak(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if it is not known."""
        ...


class DevicePeak:
    """The memory of tensors on this process's GPU, as torch's allocator counts it."""

    def take_peak(self) -> int | None:
        """Return the largest number of bytes since the last call."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class HostPeak:
    """The peak resident set size of this process, as Linux counts it. It owns the file that resets the peak."""

    def __init__(self) -> None:
        self._reset: BinaryIO | None = None
        with suppress(OSError):  # not Linux, or a container that forbids it
            self._reset = open(_RESET, "wb", buffering=0)  # noqa: SIM115  # opening it for each reset takes longer

    def take_peak(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if the system does not count it."""
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
    """The times between two calls of `PhaseTimer.collect`, such as those of a step.

    Attributes:
        seconds: The seconds of each (nested) phase, without those of phases within it; `()` is the time between phases.
        peak_bytes: The peak memory of each outermost phase.
        tokens: The number of tokens of each outermost phase, from `count_tokens`.
    """

    seconds: dict[Phases, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return sum(self.seconds.values())

    def sum_phase(self, name: str) -> float:
        """Return the seconds of an outermost phase, with those of all phases within it."""
        return sum(seconds for phases, seconds in self.seconds.items() if phases[:1] == (name,))

    def split_phase(self, name: str) -> dict[str, float]:
        """Return the seconds of each innermost phase within an outermost phase, without the time between these."""
        inner: dict[str, float] = {}
        for phases, seconds in self.seconds.items():
            if phases[:1] == (name,) and len(phases) > 1:
                inner[phases[-1]] = inner.get(phases[-1], 0.0) + seconds
        return inner


class PhaseTimer:
    """The timer of phases, which may nest. It owns the marks until `collect` returns the times between them.

    Beginning a phase that already runs has no effect.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        memory: PeakMemory | None = None,
        observer: Callable[[str | None], None] = lambda phase: None,
    ):
        """Start with no recorded times.

        Args:
            clock: Measures the times; by default the wall clock.
            memory: Measures the peak memory of outermost phases; None: it is not measured.
            observer: Is called with an outermost phase when it begins, and with None when it ends. If an exception ends
                the phase, the observer is not called, so that the failure can be attributed to the phase.
        """
        self._clock: Clock = clock or HostClock()
        self._memory, self.observer = memory, observer
        self.listener: Callable[[Phases], None] | None = None  # is called with all running phases when they change
        self.phases: Phases = ()  # the phases that run now
        self._marks: deque[tuple[Any, Phases]] = deque()  # (mark, the phases that run after it)
        self._peaks: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Drop all times before now."""
        self._marks = deque([(self._clock.mark(), self.phases)])
        self._peaks, self._tokens = {}, {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block of a `with` statement as phase `name`, also if the block raises."""
        outer = self.begin(name)
        try:
            yield
        except BaseException:
            self._go_to(outer)
            raise
        self.end(outer)

    def count_tokens(self, number: int) -> None:
        """Count tokens that the outermost phase works on. Calls within inner phases are ignored."""
        if len(self.phases) == 1:
            self._tokens[self.phases[0]] = self._tokens.get(self.phases[0], 0) + number

    def begin(self, name: str) -> Phases:
        """Begin a phase, and return the phases that ran before, which `end` needs."""
        outer = self.phases
        if name not in outer:
            self._go_to((*outer, name))
            if not outer:
                self.observer(name)
        return outer

    def end(self, outer: Phases) -> None:
        """End the phase whose `begin` returned `outer`, and those within it that still run."""
        if self.phases != outer:
            self._go_to(outer)
            if not outer:
                self.observer(None)

    def collect(self) -> StepTimes:
        """Return the times since the last call. A later call returns the time of unfinished GPU work."""
        self._go_to(self.phases)
        seconds: dict[Phases, float] = {}
        while len(self._marks) > 1:
            (began, phases), (ended, _) = self._marks[0], self._marks[1]
            elapsed = self._clock.seconds(began, ended)
            if elapsed is None:
                break
            seconds[phases] = seconds.get(phases, 0.0) + elapsed
            self._marks.popleft()
        peaks, tokens, self._peaks, self._tokens = self._peaks, self._tokens, {}, {}
        return StepTimes(seconds, peaks, tokens)

    def _go_to(self, phases: Phases) -> None:
        self._marks.append((self._clock.mark(), phases))
        if self._memory is not None and phases[:1] != self.phases[:1]:
            peak = self._memory.take_peak()
            if self.phases and peak is not None:
                self._peaks[self.phases[0]] = max(peak, self._peaks.get(self.phases[0], 0))
        self.phases = phases
        if self.listener is not None:
            self.listener(phases)


_IN_USE: list[PhaseTimer] = []


@contextmanager
def use_timer(timer: PhaseTimer) -> Iterator[None]:
    """Let the function `phase` use `timer` during the block of a `with` statement."""
    _IN_USE.append(timer)
    try:
        yield
    finally:
        _IN_USE.remove(timer)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Time the block of a `with` statement as a phase of the timer that is in use, if there is one."""
    if not _IN_USE:
        yield
        return
    with _IN_USE[-1].phase(name):
        yield


def count_tokens(number: int) -> None:
    """Count tokens with the timer that is in use, if there is one; see `PhaseTimer.count_tokens`."""
    if _IN_USE:
        _IN_USE[-1].count_tokens(number)


# --- the work of megatron-core ---

_PHASES = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "all-grads-sync": "collectives",
    "params-all-gather": "collectives",
    "embedding-grads-all-reduce": "collectives",
    "non-tensor-parallel-grads-all-reduce": "collectives",
}
_BETWEEN_STAGES = ("-recv", "-send")  # suffixes of megatron-core's timers of communication between pipeline stages


class MegatronTimers:
    """The timers that megatron-core starts and stops around its work, which is timed as phases of the timer in use.

    megatron-core calls the attribute `timers` of a configuration: `timers(name, log_level=2).start()`, and `.stop()`.
    """

    def __init__(self) -> None:
        self._running: dict[str, tuple[PhaseTimer, Phases]] = {}

    def __call__(self, name: str, log_level: int = 0) -> _NamedTimer:
        """Return the timer of one kind of work. Every level is timed."""
        return _NamedTimer(self._running, name)


class _NamedTimer:
    def __init__(self, running: dict[str, tuple[PhaseTimer, Phases]], name: str):
        self._running, self._name = running, name

    def start(self, barrier: bool = False) -> None:
        """Begin the phase, if a timer is in use and this kind of work is a phase. `barrier` has no effect."""
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
    """A span of time that a process spent on one thing.

    Attributes:
        process: The process, such as "rank 0" or "rollout engine 0 (process 17)".
        name: What the process did.
        began: The beginning, in nanoseconds since 1970.
        ended: The end, in the same unit.
    """

    process: str
    name: str
    began: int
    ended: int


_COLLECTED: list[list[Span]] = []


@contextmanager
def collect_spans() -> Iterator[list[Span]]:
    """Yield a list to which the spans of this process are added during the block of a `with` statement."""
    spans: list[Span] = []
    _COLLECTED.append(spans)
    try:
        yield spans
    finally:
        _COLLECTED.remove(spans)


def record_span(process: str, name: str, began: int) -> None:
    """Add a span from `began` (nanoseconds since 1970) to now, if spans are collected."""
    if _COLLECTED:
        _COLLECTED[-1].append(Span(process, name, began, time.time_ns()))
