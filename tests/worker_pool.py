"""Gloo ranks that outlive a test.

Importing torch and megatron-core takes seconds, so the ranks are started once per session and every test borrows as
many as it needs: each call joins the first `world_size` of them in a fresh process group, runs one function on every
rank, and takes the group down again. A function that fails on any rank fails the test with that rank's traceback.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests import shape_checks

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


class RankFailed(AssertionError):
    """One rank raised; the message carries the rank and its traceback."""


def _serve(rank: int, connection: Connection) -> None:
    """Runs on a rank: take (function, arguments), answer (ok, result or traceback), until told to stop."""
    os.environ["OMP_NUM_THREADS"] = "1"
    shape_checks.install()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        function, args, world_size, store_path = job
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            store = dist.FileStore(store_path, world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
            dist.barrier()  # a rank that never communicates must not leave while others still connect
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                _leave_topology()
                dist.destroy_process_group()
            gc.collect()  # models and their groups refer to each other, and a group has threads that poll
        connection.send(answer)


def _leave_topology() -> None:
    """megatron-core keeps its groups in module globals; the next job must not find this one's."""
    import sys

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


class WorkerPool:
    """Ranks 0 … n-1 as spawned processes, grown on demand."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="rl_megatron_pool_")
        self._jobs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on `world_size` ranks of one process group; the results in rank order.

        `function` must be importable (module level) and its arguments and results picklable.
        """
        while len(self._workers) < world_size:
            self._start(len(self._workers))
        self._jobs += 1
        store_path = os.path.join(self._scratch.name, f"store_{self._jobs}")
        connections = [connection for _, connection in self._workers[:world_size]]
        for connection in connections:
            connection.send((function, args, world_size, store_path))
        results: list[Any] = [None] * world_size
        waiting = {id(connection): rank for rank, connection in enumerate(connections)}
        while waiting:
            for connection in wait([connections[rank] for rank in waiting.values()]):
                rank = waiting.pop(id(connection))
                try:
                    ok, result = connection.recv()
                except EOFError:
                    ok, result = False, "the rank's process ended"
                if not ok:  # the others may wait for this rank in a collective: start afresh next time
                    self.close()
                    raise RankFailed(f"rank {rank} of {world_size}:\n{result}")
                results[rank] = result
        return results

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        # Not a daemon: daemons may not have children, and saving a checkpoint starts writers.
        process = self._context.Process(target=_serve, args=(rank, theirs))
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        for process, connection in self._workers:
            process.terminate()
            process.join()
            connection.close()
        self._workers = []
