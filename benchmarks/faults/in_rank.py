"""What a fault does within a rank: it counts calls, and strikes a moment after the chosen one has begun."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.faults.cases import FULL_FOR_A_WHILE, Fault
from benchmarks.faults.full_disk import fill_disk, free_disk
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.async_rollouts import AsyncRollouts
from rl_megatron.runs.checkpointer import Checkpointer
from rl_megatron.training.megatron_policy import MegatronPolicy

STRUCK = "struck"  # the file that says that the fault has come, so that it does not come again after a restart
# moment → the class and the method whose calls are counted
MOMENTS = {
    "load": (MegatronPolicy, "__init__"),
    "generate": (SyncedEngine, "complete"),
    "reward": (Scorer, "score_samples"),
    "logprobs": (MegatronPolicy, "get_logprobs"),
    "train": (MegatronPolicy, "train"),
    "refit": (SyncedEngine, "sync"),
    "record": (MetricsLogger, "record"),
    "save": (Checkpointer, "save"),
    "finish": (MetricsLogger, "finish"),
    "wait": (AsyncRollouts, "take"),
}
_ENGINES = ("rl_megatron.generation.transformers.worker", "vllm.entrypoints.cli.main")  # in their command lines
_HOSTS = ("rl_megatron.rollouts.host_child",)
_CHILD_STARTS_SECONDS = 300.0
_LONGEST_FULL_SECONDS = 3.0


def arm(fault: Fault, directory: Path) -> None:
    """Let the fault strike in this process, unless it has come or belongs to another rank."""
    if int(os.environ["RANK"]) != fault.rank or (directory / STRUCK).exists():
        return
    if fault.moment == "start":
        _strike(fault, directory)
        return
    owner, method = MOMENTS[fault.moment]
    original, calls = getattr(owner, method), 0

    def counted(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == fault.call:
            threading.Timer(fault.delay, _strike, (fault, directory)).start()
        return original(*arguments, **keywords)

    setattr(owner, method, counted)


def _strike(fault: Fault, directory: Path) -> None:
    if fault.target == "disk":
        (directory / STRUCK).touch()
        fill_disk(directory)
        if fault.action == FULL_FOR_A_WHILE:
            threading.Timer(fault.chance * _LONGEST_FULL_SECONDS, free_disk, (directory,)).start()
        return
    if fault.target == "file":
        pid, number = os.getppid(), signal.SIGTERM  # the run is saved and ends; the campaign then damages a file
    else:
        find = {
            "engine": lambda: _child(_ENGINES, fault.chance), "environment": lambda: _child(_HOSTS, fault.chance),
            "launcher": os.getppid,
        }  # fmt: skip
        pid = find.get(fault.target, os.getpid)()
        number = signal.Signals[fault.action]
    (directory / STRUCK).touch()
    os.kill(pid, number)


def _child(modules: Sequence[str], chance: float) -> int:
    """Return a process of this rank that runs one of these modules, and that may be about to start.

    A server has several processes: its guardian and all below that. `chance`, from 0 to 1, chooses one of them.
    """
    deadline = time.monotonic() + _CHILD_STARTS_SECONDS
    while time.monotonic() < deadline:
        for child in psutil.Process().children(recursive=True):
            if any(module in child.cmdline() for module in modules):
                every = [child, *child.children(recursive=True)]
                return every[int(chance * len(every))].pid
        time.sleep(0.01)
    raise RuntimeError(f"rank 0 started no process of {modules[0]}")
