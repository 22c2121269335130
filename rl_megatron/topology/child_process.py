"""Start a process beside a rank that ends with it: a rollout engine, or a worker that runs reward functions."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def environment_of_a_child() -> dict[str, str]:
    """Return this process's environment without its rank, and with this package first on the import path."""
    kept = _environment_without_the_rank()
    here = str(Path(__file__).resolve().parents[2])
    return kept | {"PYTHONPATH": os.pathsep.join([here, *filter(None, [kept.get("PYTHONPATH")])])}


def environment_of_a_server(defaults: Mapping[str, str], always: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without its rank, for a program with a Python environment of its own.

    Args:
        defaults: Variables to set, unless the user has set them.
        always: Variables to set in any case.
    """
    kept = _environment_without_the_rank()
    for of_this_environment in ("VIRTUAL_ENV", "PYTHONHOME"):
        kept.pop(of_this_environment, None)
    return {**defaults, **kept, **always}


def _environment_without_the_rank() -> dict[str, str]:
    # torch.distributed would look for the store of torchrun's agent if it found one of the TORCHELASTIC variables.
    return {
        key: value for key, value in os.environ.items() if key not in _OF_A_RANK and not key.startswith("TORCHELASTIC")
    }


def die_with(parent: int) -> None:
    """Make this process end with its parent, however the parent ends.

    On Linux the process ends at once; on other systems, when it next reads from its socket. The signal follows the
    thread that started the process, so that must be one which lives as long as the process is needed: the main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone already
        sys.exit(0)


def adopt_orphans() -> bool:
    """Make processes whose parents have ended children of this one, if it started the parents; only Linux can do it.

    Returns:
        Whether they are adopted from now on.
    """
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
