"""`StepProfiler`: profiles of chosen steps, and one trace of all processes of a step for Perfetto."""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl_megatron import disk, log
from rl_megatron.config.loggers import ProfileConfig
from rl_megatron.timing import Path as Phases
from rl_megatron.timing import PhaseTimer, Span, recording_spans

_MOST_ALLOCATIONS = 200_000  # of a snapshot of memory
# What a full disk raises: Python when it writes, torch by a file without an end, and gzip when it reads such a file.
_UNWRITTEN = (OSError, ValueError, EOFError, zlib.error)


class StepProfiler:
    """What this rank records in the steps of `profile.steps`. A step ends where its metrics are recorded."""

    def __init__(self, config: ProfileConfig, directory: Path, timer: PhaseTimer, rank: int, is_cuda: bool):
        """Record nothing yet.

        Args:
            config: The section `profile`.
            directory: The directory of the stage's profiles.
            timer: The timer of the stage's phases.
            rank: This rank.
            is_cuda: Whether it computes on a GPU.
        """
        self._config, self._directory, self._timer = config, directory, timer
        self._rank, self._is_cuda = rank, is_cuda
        self._is_chosen = rank in config.ranks
        self._open = ExitStack()
        self._step = 0
        self._spans: list[Span] = []
        self._running: list[tuple[str, int]] = []
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Begin to record, if the step is one of those."""
        if step not in self._config.steps:
            return
        self._step = step
        self._spans = self._open.enter_context(recording_spans())
        self._timer.listener = self._change
        if not self._is_chosen:
            return
        if self._is_cuda and self._config.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._is_cuda else []
        self._profiler = torch.profiler.profile(activities=activities, with_stack=self._config.with_stack)
        self._profiler.start()

    def end(self) -> None:
        """Write what was recorded; rank 0 then writes the trace of all ranks. Collective if a step is recorded."""
        if not self._step:
            return
        step, self._step = self._step, 0
        self._timer.listener = None
        self._change(())
        self._open.close()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        try:
            self._write_part(step, profiler)
        except _UNWRITTEN as error:
            self._warn(step, error)
        if self._is_cuda and self._config.memory and profiler is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
        dist.barrier()  # all parts are written
        if self._rank == 0:
            merged = self._directory / f"step-{step:06}.json.gz"
            try:
                _write_trace(merged, [self._part(step, rank) for rank in range(dist.get_world_size())])
            except _UNWRITTEN as error:
                self._warn(step, error)
                return
            log.LOGGER.info("step %d is profiled: open %s at https://ui.perfetto.dev", step, merged)

    def _write_part(self, step: int, profiler: torch.profiler.profile | None) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        events = list(convert_spans(self._spans))
        if profiler is not None:
            path = self._directory / f"step-{step:06}-rank-{self._rank}.json"
            profiler.export_chrome_trace(str(path))
            events += _events_of(json.loads(path.read_text()), f"rank {self._rank}")
            if self._is_cuda and self._config.memory:
                snapshot = self._directory / f"step-{step:06}-rank-{self._rank}-memory.pickle"
                torch.cuda.memory._dump_snapshot(str(snapshot))
        with gzip.open(self._part(step, self._rank), "wt") as file:
            json.dump(events, file)

    def _warn(self, step: int, error: Exception) -> None:
        reason = disk.describe(error, self._directory)
        log.LOGGER.warning("rank %d: the profile of step %d cannot be written: %s", self._rank, step, reason)

    def abandon(self) -> None:
        """Stop to record a step that does not end, and drop what was recorded."""
        if not self._step:
            return
        self._step, self._timer.listener, self._running = 0, None, []
        self._open.close()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._is_cuda and self._config.memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _part(self, step: int, rank: int) -> Path:
        return self._directory / f"step-{step:06}-rank-{rank}.part.gz"

    def _change(self, phases: Phases) -> None:
        """End the phases that no longer run, and begin the new ones."""
        now = time.time_ns()
        names = [name for name, _ in self._running]
        shared = 0
        while shared < min(len(names), len(phases)) and names[shared] == phases[shared]:
            shared += 1
        for name, began in self._running[shared:]:
            self._spans.append(Span(f"rank {self._rank}", name, began, now))
        self._running = [*self._running[:shared], *((name, now) for name in phases[shared:])]


def convert_spans(spans: Iterable[Span]) -> Iterable[dict[str, Any]]:
    """Yield spans as complete events of a trace, in microseconds since 1970.

    Spans of a process that overlap, such as requests to a server, are on tracks of their own, because those of one
    track must be within one another or apart.
    """
    tracks: dict[str, list[list[int]]] = {}  # of each process: the ends of the spans that run, on each track
    for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
        of_process = tracks.setdefault(span.process, [])
        for running in of_process:
            while running and running[-1] <= span.began:
                running.pop()
        place = next((i for i, running in enumerate(of_process) if not running or span.ended <= running[-1]), None)
        if place is None:
            of_process.append([])
            place = len(of_process) - 1
        of_process[place].append(span.ended)
        yield {
            "ph": "X", "cat": "phase", "name": span.name, "process": span.process,
            "tid": f"phases {place + 1}" if place else "phases",
            "ts": span.began / 1000, "dur": max(span.ended - span.began, 1) / 1000,
        }  # fmt: skip


def _events_of(trace: dict[str, Any], process: str) -> list[dict[str, Any]]:
    """Return the events of torch's trace of a process, in microseconds since 1970."""
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    found = []
    for event in trace["traceEvents"]:
        if "ts" in event and event.get("ph") in ("X", "i", "s", "f"):
            device = event.get("pid")
            where = process if device == os.getpid() else f"{process}, {device}"
            placed = {"ts": event["ts"] + base, "process": where, "tid": str(event.get("tid"))}
            if event["ph"] in ("s", "f"):  # an arrow, whose number other ranks have too
                placed["id"] = f"{process} {event.get('id')}"
            found.append(event | placed)
    return found


def _write_trace(path: Path, parts: Iterable[Path]) -> None:
    """Write the events of all parts as one trace whose times begin at 0, and remove the parts."""
    events: list[dict[str, Any]] = []
    for part in parts:
        with gzip.open(part, "rt") as file:
            events += json.load(file)
        part.unlink()
    first = min((event["ts"] for event in events), default=0.0)
    numbers: dict[str, int] = {}
    threads: dict[tuple[int, str], int] = {}
    for event in events:
        event["ts"] -= first
        event["pid"] = numbers.setdefault(event.pop("process"), len(numbers) + 1)
        thread = (event["pid"], event["tid"])
        event["tid"] = threads.setdefault(thread, len(threads) + 1)
    names = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}}
        for process, number in numbers.items()
    ]
    names += [
        {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}}
        for (number, name), thread in threads.items()
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": names + events, "displayTimeUnit": "ms"}, file)
