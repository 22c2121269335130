"""Start the processes of a case: one that plans all ranks, and one for each rank that is measured."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from benchmarks.plan_against_measured.cases import Case
from benchmarks.plan_against_measured.memory import OfRank

_PLAN = "rl_megatron.plan"


class ProcessFailed(RuntimeError):
    """The error if a process raised; its message has the traceback."""


def context() -> ForkServerContext:
    """Return the context whose processes are forks of a server that has imported what the measured ranks need."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["benchmarks.plan_against_measured.measured"])
    return made


def predicted(case: Case, server: ForkServerContext) -> list[OfRank]:
    """Return what the plan says of every rank."""
    return _results(server, [(_plan, (case,))])[0]


def measured(case: Case, server: ForkServerContext, onednn: bool = True) -> list[OfRank]:
    """Return what every rank allocates. Without `onednn`, torch multiplies matrices in bf16 by itself."""
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        return _results(server, [(_rank, (case, rank, store, onednn)) for rank in range(case.world_size)])


def _results(server: ForkServerContext, jobs: list[tuple[Callable, tuple]]) -> list[Any]:
    """Run each job in a process of its own, all at once.

    Raises:
        ProcessFailed: At least one of them raised or ended.
    """
    started = []
    for function, args in jobs:
        ours, theirs = server.Pipe()
        process = server.Process(target=_serve, args=(theirs, function, args))
        process.start()
        theirs.close()
        started.append((ours, process))
    results, failures = [], []
    for connection, process in started:
        try:
            succeeded, result = connection.recv()
        except EOFError:
            succeeded, result = False, "the process ended"
        (results if succeeded else failures).append(result)
        process.join()
    if failures:
        raise ProcessFailed("\n".join(failures))  # the others of a group fail because the first one has left
    return results


def _serve(connection: Connection, function: Callable, args: tuple) -> None:
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send(answer)


def _plan(case: Case) -> list[OfRank]:
    from benchmarks.plan_against_measured.predicted import predict

    return [predict(case, rank) for rank in range(case.world_size)]


def _rank(case: Case, rank: int, store: str, onednn: bool) -> OfRank:
    import torch
    import torch.distributed as dist

    from benchmarks.plan_against_measured.measured import measure

    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = onednn
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{case.world_size}")
    opened = dist.FileStore(store, case.world_size)  # pyright: ignore[reportPrivateImportUsage]  # documented
    dist.init_process_group("gloo", store=opened, rank=rank, world_size=case.world_size)
    dist.barrier()
    result = measure(case)
    dist.barrier()
    dist.destroy_process_group()
    shared = [name for name in sys.modules if name.startswith(_PLAN)]
    if shared:
        raise RuntimeError(f"the measured rank has imported {', '.join(shared)}, so it is no independent measurement")
    return result
