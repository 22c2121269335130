"""Gloo ranks that outlive a test.

The ranks are forks of `tests.forkserver`, started once per session, and every test borrows as many as it needs: each
call joins the first `world_size` of them in a fresh process group, runs one function on every rank, and takes the group
down again. A function that fails on any rank fails the test with that rank's traceback.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests.forkserver import fork_context

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


class RankFailed(AssertionError):
    """One rank raised; the message carries the rank and its traceback."""


def _serve(rank: int, connection: Connection) -> None:
    """Take (function, arguments) on a rank and answer (ok, result or traceback), until told to stop."""
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
    """Take down megatron-core's groups, which are module globals: the next job must not find this one's."""
    import sys

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


class WorkerPool:
    """Ranks 0 … n-1 as forked processes, grown on demand, and the results of `reference`."""

    def __init__(self) -> None:
        self._context = fork_context()
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._references: dict[bytes, bytes] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="rl_megatron_pool_")
        self._jobs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on `world_size` ranks of one process group and return the results in rank order.

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

    def reference(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(*args)` gives on one rank, computed once per session for the same arguments.

        This is for functions whose result depends on nothing but their arguments, files included. Every caller gets a
        copy of its own.
        """
        key = pickle.dumps((function, args))
        if key not in self._references:
            self._references[key] = pickle.dumps(self.run(1, function, *args)[0])
        return pickle.loads(self._references[key])

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        # Not a daemon: daemons may not have children, and saving a checkpoint starts writers.
        process = self._context.Process(target=_serve, args=(rank, theirs))
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        """End every rank; the next job starts new ones."""
        for process, connection in self._workers:
            process.terminate()
            process.join()
            connection.close()
        self._workers = []
