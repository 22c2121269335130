"""The tool `python`: runs a program of the model in a limited process.

The limits stop accidents, and some attacks. They are not a sandbox; docs/security.md describes what they leave open.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import tempfile
import time
from contextlib import suppress

from rl_megatron.rollouts.tools.registry import register_tool
from rl_megatron.workers.child_process import describe_end
from rl_megatron.workers.confinement import Limits, make_directory, run_confined

_SECONDS_TO_START = 0.5  # to start Python, and to send the answer back
_LENGTH_OF_REMARKS = 100  # characters
_MOST_BYTES = 4  # of a character in UTF-8


@register_tool("python", settings=("seconds_per_call", "memory_mb", "max_answer_characters"))
def python(code: str, seconds_per_call: float, memory_mb: int, max_answer_characters: int) -> str:
    """Run a Python program, and return what it prints.

    Every call starts a new interpreter, in an empty directory and without a network.

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
    with make_directory() as directory, tempfile.TemporaryFile() as program:
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        printed, ended = _run(program.fileno(), directory, Limits(seconds, memory_mb), most * _MOST_BYTES)
    text = printed.decode("utf-8", "replace")
    if len(text) > most:
        text = f"{text[:most]}…\n(the output is cut after {most} characters)"
    if ended is not None:
        text = f"{text.rstrip()}\n({ended})".lstrip()
    return text


def _run(program: int, directory: str, limits: Limits, most: int) -> tuple[bytes, str | None]:
    """Return the first `most` bytes that a program prints, and how it ended; None if its status is 0 or 1.

    `program` is a file descriptor of its source. `limits.seconds` limits its wall time as well as its CPU time.
    """
    until = time.monotonic() + limits.seconds
    nothing, together = subprocess.DEVNULL, subprocess.STDOUT
    with run_confined(program, (), directory, limits, stdin=nothing, stdout=subprocess.PIPE, stderr=together) as child:
        printed = _read_output(child, until, most)
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(until - time.monotonic(), 0.0))
        status = child.poll()
        assert child.stdout is not None
        child.stdout.close()
    if status is None:
        return printed, f"the program was ended after {limits.seconds:g} seconds"
    return printed, None if status in (0, 1) else f"the program {describe_end(status)}"


def _read_output(child: subprocess.Popen[bytes], until: float, most: int) -> bytes:
    """Return the first `most` bytes that a process prints until it closes its output or its time is over."""
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
