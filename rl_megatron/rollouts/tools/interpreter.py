"""The tool `python`: runs a program of the model in a limited process.

The limits stop accidents, and some of what means harm. They are no sandbox; docs/security.md says what they leave open.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rl_megatron import log
from rl_megatron.rollouts.tools.registry import register_tool

_CONFINED = Path(__file__).with_name("confined.py")
_SECONDS_TO_START = 0.5  # of Python, and for the way of the answer back
_LENGTH_OF_REMARKS = 100  # characters
_MOST_BYTES = 4  # of a character in UTF-8
# What the log says if the system does not have a limit.
_REMARKS = {
    "namespace": "the tool python cannot give programs of the model a network of their own, because the system has no "
    "user namespaces for this user; see docs/security.md",
    "landlock": "the tool python cannot keep programs of the model from changing files, because the system has no "
    "Landlock; see docs/security.md",
    "filter": "the tool python cannot keep programs of the model from starting and ending processes, because it "
    "cannot filter the system calls of this machine; see docs/security.md",
}


@register_tool("python", settings=("seconds_per_call", "memory_mb", "max_answer_characters"))
def python(code: str, seconds_per_call: float, memory_mb: int, max_answer_characters: int) -> str:
    """Run a Python program, and return what it prints.

    Every call starts anew, in an empty directory and without a network.

    Args:
        code: The program. Print what you want to see.
        seconds_per_call: How long it may take.
        memory_mb: Its memory, in MiB.
        max_answer_characters: The most characters of its output that are returned.

    Returns:
        What the program prints, with the traceback of an error.
    """
    seconds = max(seconds_per_call - _SECONDS_TO_START, seconds_per_call / 2)
    most = max(max_answer_characters - _LENGTH_OF_REMARKS, max_answer_characters // 2)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory, tempfile.TemporaryFile() as program:
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        printed, ended = _run(program.fileno(), directory, seconds, memory_mb, most * _MOST_BYTES)
    text = printed.decode("utf-8", "replace")
    if len(text) > most:
        text = f"{text[:most]}…\n(the output is cut after {most} characters)"
    if ended is not None:
        text = f"{text.rstrip()}\n({ended})".lstrip()
    return text


def _run(program: int, directory: str, seconds: float, memory_mb: int, most: int) -> tuple[bytes, str | None]:
    """Return the first bytes that a program prints, and how it ended, if not with the status 0 or 1.

    Args:
        program: The descriptor of the program's text.
        directory: The directory in which it runs.
        seconds: How long it may take.
        memory_mb: Its memory.
        most: The most bytes.
    """
    until = time.monotonic() + seconds
    reported, reports = os.pipe()
    limits = (math.ceil(seconds), memory_mb << 20, os.getpid(), reports)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(_CONFINED), *map(str, limits)],
            stdin=program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=directory, pass_fds=[reports],
            env={"PATH": os.defpath, "HOME": directory, "TMPDIR": directory, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(reports)
    try:
        printed = _output(child, until, most)
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(until - time.monotonic(), 0.0))
    finally:
        with suppress(ProcessLookupError, PermissionError):  # it has not been waited for, or there is no such group
            os.killpg(child.pid, signal.SIGKILL)
        has_ended = child.poll() is not None
        status = child.wait()
        assert child.stdout is not None
        child.stdout.close()
        _report(reported)
    if not has_ended:
        return printed, f"the program was ended after {seconds:g} seconds"
    if status < 0:
        return printed, f"the program was ended by {signal.Signals(-status).name}"
    return printed, None if status in (0, 1) else f"the program exited with status {status}"


def _output(child: subprocess.Popen[bytes], until: float, most: int) -> bytes:
    """Return the first bytes that a process prints until it closes its output or its time is over."""
    printed = bytearray()
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if not selector.select(left):
                break
            part = os.read(child.stdout.fileno(), 1 << 16)
            if not part:
                break
            printed += part[: most - len(printed)]
    return bytes(printed)


def _report(reported: int) -> None:
    """Log, once, which limits the system does not have."""
    with os.fdopen(reported, "rb") as lines:
        os.set_blocking(lines.fileno(), False)
        for name in (lines.read() or b"").decode().split():
            log.once(_REMARKS[name])
