"""What a fault does within a rank: it counts calls, and strikes a moment after the chosen one has begun."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.faults.cases import Fault
from rl_megatron.algorithms.checkpointer import Checkpointer
from rl_megatron.algorithms.synced_engine import SyncedEngine
from rl_megatron.policy.megatron_policy import MegatronPolicy
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.async_rollouts import AsyncRollouts

STRUCK = "struck"  # the file that says that the fault has come, so that it does not come again after a restart
# moment → the class and the method whose calls are counted
MOMENTS = {
    "load": (MegatronPolicy, "__init__"),
    "generate": (SyncedEngine, "complete_on_rank_0"),
    "reward": (Scorer, "score_samples"),
    "logprobs": (MegatronPolicy, "get_logprobs"),
    "train": (MegatronPolicy, "train"),
    "refit": (SyncedEngine, "update_weights"),
    "save": (Checkpointer, "save"),
    "wait": (AsyncRollouts, "take"),
}
_ENGINES = ("rl_megatron.generation.transformers.worker", "vllm.entrypoints.cli.main")  # in their command lines
_HOSTS = ("rl_megatron.rollouts.host_worker",)
_CHILD_STARTS_SECONDS = 300.0
_LEFT_ON_DISK = 20_000  # bytes that a file may have on a full disk: enough for metrics, and too few for weights


def arm(fault: Fault, directory: Path) -> None:
    """Let the fault strike in this process, unless it has come or belongs to another rank."""
    if int(os.environ["RANK"]) != fault.rank or (directory / STRUCK).exists():
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
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LEFT_ON_DISK, _LEFT_ON_DISK))  # Python ignores its signal
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
