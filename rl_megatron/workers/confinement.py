"""Run a Python program that a model has written, under limits, and end all of its processes afterwards.

The limits stop accidents and some attacks. They are not a sandbox; docs/security.md describes what they leave open.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rl_megatron import disk, log
from rl_megatron.workers.linux import adopt_orphans, end_children, list_children

_CONFINED = Path(__file__).with_name("program_limits.py")
# With malloc arenas of its own, each thread would take 64 MiB of address space.
_ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_LOGGED = "RL_MEGATRON_LIMITS_SAID"  # environment variable that is set once the run has logged the missing limits
# What a program can do if the system lacks a limit, by the name of the limit.
_REMARKS = {
    "namespace": "programs of the model are not isolated from the network by a namespace, because this user cannot "
    "create user namespaces",
    "landlock": "programs of the model can change files and reach other processes, because the system has no Landlock, "
    "or a version from before Linux 6.2",
    "filter": "programs of the model can start and end processes, because the system calls of this machine cannot be "
    "filtered",
}


@dataclass(frozen=True)
class Limits:
    """The limits of a program.

    Attributes:
        seconds: CPU time; it is rounded up.
        memory_mb: Address space, in MiB.
    """

    seconds: float
    memory_mb: int


@contextmanager
def run_confined(
    text: int,
    arguments: Sequence[str],
    directory: str,
    limits: Limits,
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    descriptors: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block of a `with` statement, and end it after the block.

    Its working directory is `directory`, and it may not write elsewhere. `text` is a file descriptor of its source,
    `arguments` are its `sys.argv[1:]`, and `descriptors` are further file descriptors that it inherits.
    """
    reading_end, reports = os.pipe()
    others = list_children() if adopt_orphans() else None
    numbers = (math.ceil(limits.seconds), limits.memory_mb << 20, os.getpid(), reports, text)
    with os.fdopen(reading_end, "rb") as names:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(_CONFINED), *map(str, numbers), *arguments],
                stdin=stdin, stdout=stdout, stderr=stderr, cwd=directory, pass_fds=[reports, text, *descriptors],
                env=_ENVIRONMENT | {"HOME": directory, "TMPDIR": directory},
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reports)
        try:
            yield child
        finally:
            with suppress(ProcessLookupError, PermissionError):  # the group has ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            missing = names.read().decode().split()
            if others is not None and "filter" in missing:
                end_children(others)
            if _LOGGED not in os.environ:
                _log(_REMARKS[name] for name in missing)


def log_missing_limits() -> None:
    """Log on rank 0 which limits this system lacks. Child processes on the first node do not log this again."""
    if log.is_main_rank():
        _log(find_missing_limits())
    if os.environ.get("RANK", "0") == os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")):  # the first node
        os.environ[_LOGGED] = "1"


def _log(remarks: Iterable[str]) -> None:
    for remark in remarks:
        log.once(f"{remark}; see docs/security.md")


def find_missing_limits() -> list[str]:
    """Return, for each limit that this system lacks, a sentence about what programs can do without the limit."""
    with make_directory() as directory, open(os.devnull, "r+b") as nothing, tempfile.TemporaryFile() as reports:
        seconds, memory = 1, 1 << 30
        numbers = (seconds, memory, os.getpid(), reports.fileno(), nothing.fileno())
        command = [sys.executable, "-I", str(_CONFINED), *map(str, numbers)]
        subprocess.run(command, cwd=directory, pass_fds=[reports.fileno(), nothing.fileno()], check=True)
        reports.seek(0)
        return [_REMARKS[name] for name in reports.read().decode().split()]


@contextmanager
def make_directory() -> Iterator[str]:
    """Make a directory for the block of a `with` statement. Remove it afterwards, whatever a program left in it."""
    directory = tempfile.mkdtemp(prefix=disk.make_temporary_prefix("program"))
    try:
        yield directory
    finally:
        # `rm` and `chmod` handle directories of any depth; Python's functions do not.
        remove = ["rm", "-rf", "--", directory]
        if subprocess.run(remove, stderr=subprocess.DEVNULL).returncode != 0:  # permissions prevent the removal
            subprocess.run(["chmod", "-R", "u+rwX", "--", directory], stderr=subprocess.DEVNULL)
            if (done := subprocess.run(remove, stderr=subprocess.PIPE, text=True)).returncode != 0:
                log.LOGGER.warning(f"the directory of a program cannot be removed: {done.stderr.strip()[-200:]}")
