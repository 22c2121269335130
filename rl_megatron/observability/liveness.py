"""What a rank tells others about itself: its position in the run, its heartbeats, and the stacks of its threads."""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DISTRIBUTED = f"{Path('torch') / 'distributed'}/"
_WRAPPERS = ("wrapper", "<lambda>")  # functions in which torch wraps collectives to log them
_UNKNOWN_LINE = "an unknown line"
_MAIN_FRAMES, _OTHER_FRAMES = 40, 8  # how many of a stack's innermost frames are kept
_STACK_REQUESTS = "stacks/wanted"  # the store's key for the number of requests for stacks


# --- where a rank is in the run ---


class Place(NamedTuple):
    """A place in a run.

    Attributes:
        stage: The stage's name; empty before the first one.
        stage_number: How many stages have begun.
        step: The step, from 1; 0 before the first one.
        steps: How many steps the stage has.
        phase: The innermost phase that runs, or None between two phases.
        phase_number: How often the phase has changed since the stage began.
        done: How many items the running call has done, as it reported (`log.report_progress`).
        total: How many items that call has; 0 if no call of this phase has reported.
        noun: What the items are, such as "microbatches".
    """

    stage: str = ""
    stage_number: int = 0
    step: int = 0
    steps: int = 0
    phase: str | None = None
    phase_number: int = 0
    done: int = 0
    total: int = 0
    noun: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """Return a sort key: the smaller, the further behind a rank is. Progress within a phase does not count."""
        return self.stage_number, self.step, self.phase_number

    @property
    def progress(self) -> str | None:
        """Return a text such as "3 of 8 microbatches", or None if no call of this phase has reported."""
        return f"{self.done} of {self.total} {self.noun}" if self.total else None

    def describe(self) -> str:
        """Return the place in words."""
        if not self.stage:
            return "before the first stage"
        parts = [f"stage {self.stage}", f"step {self.step} of {self.steps}"]
        parts.append(f"phase {self.phase}" if self.phase else "between two phases")
        if self.progress is not None:
            parts.append(self.progress)
        return ", ".join(parts)


class Position:
    """The place of the main thread. `changes` counts its moves and progress reports, which are signs of life."""

    def __init__(self) -> None:
        self.place = Place()
        self.changes = 0

    def begin_stage(self, stage: str, steps: int) -> None:
        """Begin a stage that has `steps` steps."""
        self._move_to(Place(stage=stage, stage_number=self.place.stage_number + 1, steps=steps))

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        self._move_to(self.place._replace(step=step))

    def enter(self, phase: str | None) -> None:
        """Begin a phase; None means between two phases."""
        number = self.place.phase_number + 1
        self._move_to(self.place._replace(phase=phase, phase_number=number, done=0, total=0, noun=""))

    def update_progress(self, done: int, total: int, noun: str, detail: str = "") -> None:
        """Record a progress report (`log.report_progress`)."""
        self._move_to(self.place._replace(done=done, total=total, noun=noun))

    def _move_to(self, place: Place) -> None:
        self.place = place
        self.changes += 1


# --- heartbeats ---


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        count: How many heartbeats the rank has sent before this one.
        place: The place of the rank's main thread.
        seconds: For how long that place has not changed.
        collective: The function of torch.distributed in which the main thread waits, or None if it runs other code.
        at: The line that the main thread runs, "file:line".
        sequence: How many collectives of the group of all ranks have begun, or None if torch does not count them.
        has_ended: Whether the run has ended on this rank.
    """

    host: str = "an unknown host"
    pid: int = 0
    count: int = -1
    place: Place = field(default_factory=Place)
    seconds: float = 0.0
    collective: str | None = None
    at: str = _UNKNOWN_LINE
    sequence: int | None = None
    has_ended: bool = False

    def to_json(self) -> str:
        """Return the heartbeat as text for the store."""
        return json.dumps(asdict(self) | {"place": list(self.place)})

    @classmethod
    def from_json(cls, text: bytes) -> Beat:
        """Parse a heartbeat from the store; the text is empty before the rank's first heartbeat."""
        if not text:
            return cls()
        values = json.loads(text)
        return cls(**values | {"place": Place(*values["place"])})


def beat_key(rank: int) -> str:
    """Return the store's key of a rank's newest heartbeat."""
    return f"heartbeat/{rank}"


class Heartbeat:
    """The sender of this rank's heartbeats. The same thread calls all methods, and none of them uses the device."""

    def __init__(self, store: Any, rank: int, position: Position, longest_interval: float):
        """Prepare the first heartbeat.

        Args:
            store: A connection to the store that no other thread uses.
            rank: This rank.
            position: The position of the main thread.
            longest_interval: The most seconds that are counted between two heartbeats, because a longer interval means
                that the process was suspended.
        """
        self._store, self._rank, self._position, self._longest_interval = store, rank, position, longest_interval
        self._host, self._answered_requests = socket.gethostname(), 0
        self._changes, self._seconds, self.sent = position.changes, 0.0, 0

    def send(self, elapsed: float, has_ended: bool = False) -> None:
        """Write a heartbeat, `elapsed` seconds after the previous one."""
        if self._position.changes != self._changes:
            self._changes, self._seconds = self._position.changes, 0.0
        else:
            self._seconds += min(elapsed, self._longest_interval)
        wait = find_wait(list(_walk_outwards(sys._current_frames().get(threading.main_thread().ident or 0))))
        beat = Beat(
            self._host,
            os.getpid(),
            self.sent,
            self._position.place,
            round(self._seconds, 3),
            wait.collective,
            wait.at,
            _count_collectives(),
            has_ended,
        )
        self._store.set(beat_key(self._rank), beat.to_json())
        self.sent += 1

    def send_requested_stacks(self) -> None:
        """Write the stacks of this process's threads if a watchdog has asked for them since the last call."""
        request = self._store.add(_STACK_REQUESTS, 0)
        if request > self._answered_requests:
            self._answered_requests = request
            self._store.set(f"stacks/{request}/{self._rank}", format_stacks())
            self._store.append(f"stacks/{request}/of", f"{self._rank} ")


def _count_collectives() -> int | None:
    """Return how many collectives of the group of all ranks have begun, or None if torch does not count them."""
    group = dist.group.WORLD if dist.is_initialized() else None
    count = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return None if count is None else int(count())
    except RuntimeError:  # a backend that does not count
        return None


# --- requests for stacks ---


def request_stacks(store: Store) -> int:
    """Ask all ranks for their stacks. Return the number of the request."""
    return store.add(_STACK_REQUESTS, 1)


def list_answers(store: Store, request: int) -> list[int]:
    """Return the ranks that have answered a request for stacks."""
    key = f"stacks/{request}/of"
    return sorted(map(int, store.get(key).decode().split())) if store.check([key]) else []


def take_stacks(store: Store, request: int, ranks: list[int]) -> list[dict[str, object]]:
    """Return the ranks' stacks, with one entry for all ranks whose stacks are equal, and delete them from the store."""
    keys = [f"stacks/{request}/{rank}" for rank in ranks]
    ranks_by_stack: dict[str, list[int]] = {}
    for rank, text in zip(ranks, store.multi_get(keys) if keys else [], strict=True):
        ranks_by_stack.setdefault(text.decode(), []).append(rank)
    for key in keys:
        store.delete_key(key)
    return [{"ranks": ranks, "stack": text.splitlines()} for text, ranks in ranks_by_stack.items()]


# --- stacks of this process ---


class Wait(NamedTuple):
    """The activity of a thread.

    Attributes:
        collective: The function of torch.distributed in which the thread waits, or None if it runs other code.
        at: "file:line" of the innermost line of this package or of the user's code that it runs.
    """

    collective: str | None
    at: str


def find_wait(frames: list[FrameType]) -> Wait:
    """Return what a thread with these frames does. The innermost frame comes first."""
    collective = None
    for frame in frames:
        if _DISTRIBUTED not in frame.f_code.co_filename:
            break
        if frame.f_code.co_name not in _WRAPPERS:
            collective = frame.f_code.co_name  # the loop keeps the outermost, which other code called
    if collective is None and frames and not _is_library(frames[0].f_code.co_filename, but="megatron/core/"):
        line = linecache.getline(frames[0].f_code.co_filename, _get_line(frames[0]))
        if ".wait(" in line:  # the collective has begun earlier, and torch waits for it in C++, without a frame
            collective = f"wait of {frames[0].f_code.co_name}"
    if not frames:
        return Wait(collective, _UNKNOWN_LINE)
    frame = next((frame for frame in frames if not _is_library(frame.f_code.co_filename)), frames[0])
    return Wait(collective, f"{_shorten(frame.f_code.co_filename)}:{_get_line(frame)}")


def format_stacks() -> str:
    """Return the stacks of all Python threads except the calling thread, the main thread's first."""
    frames, main = sys._current_frames(), threading.main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != main.ident):
        if ident != threading.get_ident():
            depth = _MAIN_FRAMES if ident == main.ident else _OTHER_FRAMES
            stack = "".join(traceback.format_stack(frames[ident])[-depth:])
            texts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "".join(texts)


def locate_error(error: BaseException) -> str:
    """Return "file:line" of the innermost frame of the error that is in this package or in the user's code."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not lines:
        return _UNKNOWN_LINE
    path, line = ([pair for pair in lines if not _is_library(pair[0])] or lines)[-1]
    return f"{_shorten(path)}:{line}"


def _walk_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(path: str, but: str = "/nothing/") -> bool:
    """Return whether a file belongs to Python or to another installed package, unless its path contains `but`."""
    if path.startswith(str(_PACKAGE)) or but in path:
        return False
    return path.startswith((*_LIBRARIES, "<"))


def _get_line(frame: FrameType) -> int:
    """Return the line that a frame runs. `f_lineno` is None at an instruction that belongs to no line."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def _shorten(path: str) -> str:
    for base in (_PACKAGE.parent, Path.cwd()):
        if path.startswith(f"{base}/"):
            return path.removeprefix(f"{base}/")
    return path
