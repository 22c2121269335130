"""A server process, one per test session, that has imported torch and megatron-core; every rank and run is its fork.

The imports take seconds and are the same for all. A fork has its own memory and exit status, but starts after the
imports. The server itself never joins a process group and never starts a thread.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Return this process's environment without the variables of a rank, and with the repository on PYTHONPATH."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def fork_context() -> ForkServerContext:
    """Return the multiprocessing context whose processes are forks of the server; the first call starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with _in_environment(environment()):
        forkserver.ensure_running()
    return context


@contextmanager
def _in_environment(variables: dict[str, str]):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
