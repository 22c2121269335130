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
# It makes only this package importable: the directory above it may hold packages that do not fit the interpreter.
_RUN_MODULE = """
import importlib, importlib.util, os, sys
directory, name = sys.argv.pop(1), sys.argv.pop(1)
package = os.path.basename(directory)
file = os.path.join(directory, "__init__.py")
spec = importlib.util.spec_from_file_location(package, file, submodule_search_locations=[directory])
sys.modules[package] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[package])
importlib.import_module(name).main(sys.argv[1:])
"""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # of Linux's prctl


def module_command(module: str, python: str | None) -> tuple[list[str], dict[str, str]]:
    """Return what starts a module of this package as a program, without its arguments, and its environment.

    Args:
        module: The module, which has a function `main` that takes the arguments.
        python: The interpreter; None for that of this process. Another one imports this package from where it is, and
            all else from its own environment.
    """
    if python is None:
        return [sys.executable, "-m", module], environment_of_a_child()
    package = str(Path(__file__).resolve().parents[1])
    return [python, "-P", "-c", _RUN_MODULE, package, module], environment_of_a_server({}, {})


def own_import_path() -> list[str]:
    """Return the directories of `sys.path` that do not belong to this interpreter or its environment."""
    belonging = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}

    def is_own(entry: str) -> bool:
        place = os.path.realpath(entry)
        is_of_packages = os.path.basename(place) in ("site-packages", "dist-packages")
        belongs = any(os.path.commonpath([place, prefix]) == prefix for prefix in belonging)
        return os.path.isdir(place) and not is_of_packages and not belongs

    return [entry for entry in map(os.path.abspath, sys.path) if is_own(entry)]


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


def hide_memory() -> None:
    """Keep other processes of the user, such as the programs that this one runs, from reading its memory, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def describe_end(status: int) -> str:
    """Return how a process ended, by its status as `subprocess` has it, as in "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def adopt_orphans() -> bool:
    """Make processes whose parents have ended children of this one, if it started the parents; only Linux can do it.

    Returns:
        Whether they are adopted from now on.
    """
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
