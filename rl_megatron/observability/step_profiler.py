"""`StepProfiler`: profiles of chosen steps, and a trace for Perfetto of all processes in one step."""

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
from rl_megatron.timing import Phases, PhaseTimer, Span, collect_spans

_MAX_ALLOCATIONS = 200_000  # in a snapshot of memory
# The errors that a full disk causes: in writing, and in reading a truncated JSON or gzip file.
_WRITE_ERRORS = (OSError, ValueError, EOFError, zlib.error)


class StepProfiler:
    """The profiler of the steps `profile.steps` on this rank. A step ends when its metrics are recorded."""

    def __init__(self, config: ProfileConfig, directory: Path, timer: PhaseTimer, rank: int, is_cuda: bool):
        """Prepare to write profiles to `directory`; `timer` times the stage's phases."""
        self._config, self._directory, self._timer = config, directory, timer
        self._rank, self._is_cuda = rank, is_cuda
        self._is_chosen = rank in config.ranks
        self._open = ExitStack()
        self._step = 0
        self._spans: list[Span] = []
        self._running: list[tuple[str, int]] = []
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Begin to record if the step is one of `profile.steps`."""
        if step not in self._config.steps:
            return
        self._step = step
        self._spans = self._open.enter_context(collect_spans())
        self._timer.listener = self._switch_phases
        if not self._is_chosen:
            return
        if self._is_cuda and self._config.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._is_cuda else []
        self._profiler = torch.profiler.profile(activities=activities, with_stack=self._config.with_stack)
        self._profiler.start()

    def end(self) -> None:
        """Write what was recorded; rank 0 then writes the trace of all ranks. Collective if a step was recorded."""
        if not self._step:
            return
        step, self._step = self._step, 0
        self._timer.listener = None
        self._switch_phases(())
        self._open.close()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        try:
            self._write_part(step, profiler)
        except _WRITE_ERRORS as error:
            self._warn(step, error)
        if self._is_cuda and self._config.memory and profiler is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
        dist.barrier()  # wait until all parts are written
        if self._rank == 0:
            merged = self._directory / f"step-{step:06}.json.gz"
            try:
                _merge_parts(merged, [self._get_part(step, rank) for rank in range(dist.get_world_size())])
            except _WRITE_ERRORS as error:
                self._warn(step, error)
                return
            log.LOGGER.info("step %d is profiled: open %s at https://ui.perfetto.dev", step, merged)

    def _write_part(self, step: int, profiler: torch.profiler.profile | None) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        events = list(convert_spans(self._spans))
        if profiler is not None:
            path = self._directory / f"step-{step:06}-rank-{self._rank}.json"
            profiler.export_chrome_trace(str(path))
            events += _convert_events(json.loads(path.read_text()), f"rank {self._rank}")
            if self._is_cuda and self._config.memory:
                snapshot = self._directory / f"step-{step:06}-rank-{self._rank}-memory.pickle"
                torch.cuda.memory._dump_snapshot(str(snapshot))
        with gzip.open(self._get_part(step, self._rank), "wt") as file:
            json.dump(events, file)

    def _warn(self, step: int, error: Exception) -> None:
        reason = disk.describe(error, self._directory)
        log.LOGGER.warning("rank %d: the profile of step %d cannot be written: %s", self._rank, step, reason)

    def abandon(self) -> None:
        """Stop recording a step that will not be completed, and drop what was recorded."""
        if not self._step:
            return
        self._step, self._timer.listener, self._running = 0, None, []
        self._open.close()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._is_cuda and self._config.memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _get_part(self, step: int, rank: int) -> Path:
        return self._directory / f"step-{step:06}-rank-{rank}.part.gz"

    def _switch_phases(self, phases: Phases) -> None:
        """End the phases that no longer run, and begin the new ones."""
        now = time.time_ns()
        names = [name for name, _ in self._running]
        shared = 0
        while shared < min(len(names), len(phases)) and names[shared] == phases[shared]:
            shared += 1
        for name, began in self._running[shared:]:
            self._spans.append(Span(f"rank {self._rank}", name, began, now))
        self._running = [*self._running[:shared], *((name, now) for name in phases[shared:])]


def convert_spans(spans: Iterable[Span]) -> Iterable[dict[str, object]]:
    """Yield spans as complete events of a trace, in microseconds since 1970.

    If spans of a process overlap without being nested, such as requests to a server, they are put on different tracks,
    because one track cannot show them.
    """
    tracks_by_process: dict[str, list[list[int]]] = {}  # for each track, the ends of its open spans
    for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
        tracks = tracks_by_process.setdefault(span.process, [])
        for ends in tracks:
            while ends and ends[-1] <= span.began:
                ends.pop()
        index = next((i for i, ends in enumerate(tracks) if not ends or span.ended <= ends[-1]), None)
        if index is None:
            tracks.append([])
            index = len(tracks) - 1
        tracks[index].append(span.ended)
        yield {
            "ph": "X", "cat": "phase", "name": span.name, "process": span.process,
            "tid": f"phases {index + 1}" if index else "phases",
            "ts": span.began / 1000, "dur": max(span.ended - span.began, 1) / 1000,
        }  # fmt: skip


def _convert_events(trace: dict[str, Any], process: str) -> list[dict[str, object]]:
    """Return the events of torch's trace of a process, in microseconds since 1970."""
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    events = []
    for event in trace["traceEvents"]:
        if "ts" in event and event.get("ph") in ("X", "i", "s", "f"):
            device = event.get("pid")
            name = process if device == os.getpid() else f"{process}, {device}"
            changes = {"ts": event["ts"] + base, "process": name, "tid": str(event.get("tid"))}
            if event["ph"] in ("s", "f"):  # an arrow, whose id must differ from those of other ranks
                changes["id"] = f"{process} {event.get('id')}"
            events.append(event | changes)
    return events


def _merge_parts(path: Path, parts: Iterable[Path]) -> None:
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
