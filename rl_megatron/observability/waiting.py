"""Read from the stacks of Python's threads where a process waits."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DISTRIBUTED = f"{Path('torch') / 'distributed'}/"
_WRAPPERS = ("wrapper", "<lambda>")  # torch logs calls of collectives by a decorator
_MAIN_FRAMES, _OTHER_FRAMES = 40, 8  # the innermost ones that are kept


class Wait(NamedTuple):
    """Where a thread is.

    Attributes:
        collective: The function of torch.distributed in which it waits, or None.
        at: The line of this package, or of the user's code, that it runs: "file:line".
    """

    collective: str | None
    at: str


def main_thread_wait() -> Wait:
    """Return where the main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return wait_of(list(_outwards(frame)))


def wait_of(frames: list[FrameType]) -> Wait:
    """Return where a thread is whose frames these are, the innermost first."""
    collective = None
    for frame in frames:
        if _DISTRIBUTED not in frame.f_code.co_filename:
            break
        if frame.f_code.co_name not in _WRAPPERS:
            collective = frame.f_code.co_name  # the outermost one is what was called
    if collective is None and frames and not _is_library(frames[0].f_code.co_filename, but="megatron/core/"):
        line = linecache.getline(frames[0].f_code.co_filename, _line(frames[0]))
        if ".wait(" in line:  # of a collective that was begun before; torch waits for it outside Python
            collective = f"wait of {frames[0].f_code.co_name}"
    own = [frame for frame in frames if not _is_library(frame.f_code.co_filename)]
    return Wait(collective, _where((own or frames)[0]) if frames else "an unknown line")


def stacks() -> str:
    """Return the stack of every thread of Python, the main thread's first, except the one that asks."""
    frames, main = sys._current_frames(), threading.main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != main.ident):
        if ident != threading.get_ident():
            kept = _MAIN_FRAMES if ident == main.ident else _OTHER_FRAMES
            stack = "".join(traceback.format_stack(frames[ident])[-kept:])
            texts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "".join(texts)


def place_of_error(error: BaseException) -> str:
    """Return "file:line" of the innermost line of this package or of the user's code that raised the error."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [pair for pair in frames if not _is_library(pair[0].f_code.co_filename)]
    if not frames:
        return "an unknown line"
    frame, line = (own or frames)[-1]
    return f"{_short(frame.f_code.co_filename)}:{line}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(path: str, but: str = "/nothing/") -> bool:
    """Return whether a file belongs to Python or to an installed package other than this one."""
    if path.startswith(str(_PACKAGE)) or but in path:
        return False
    return path.startswith((*_LIBRARIES, "<"))


def _where(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{_line(frame)}"


def _line(frame: FrameType) -> int:
    """Return the line that a frame runs. Python gives None at an instruction that belongs to no line."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def _short(path: str) -> str:
    for base in (_PACKAGE.parent, Path.cwd()):
        if path.startswith(f"{base}/"):
            return path.removeprefix(f"{base}/")
    return path
