"""A pool of gloo ranks that all tests of a session share.

The ranks are forks of `tests.forkserver`, and every test uses as many as it needs. Each call forms a new process group
of the first `world_size` ranks, runs one function on each of them, and destroys the group. If the function fails on a
rank, the test fails with that rank's traceback.
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

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # a rank waits while rank 0 uses servers on a loaded machine


class RankFailed(AssertionError):
    """The error if a rank raises; its message has the rank and the traceback."""


def _serve(rank: int, connection: Connection) -> None:
    """Run jobs on a rank and answer each with (whether it succeeded, result or traceback), until a job is None."""
    import torch
    import torch.distributed as dist

    from rl_megatron.topology.device import share_gloo_device

    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        function, args, world_size, store_path = job
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({key: str(value) for key, value in place.items()})
        try:
            share_gloo_device()
            store = dist.FileStore(store_path, world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
            dist.barrier()  # a rank that never communicates must not leave while other ranks still connect
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                _leave_topology()
                dist.destroy_process_group()
            gc.collect()  # models and their groups refer to each other, and a group has polling threads
        connection.send(answer)


def _leave_topology() -> None:
    """Destroy megatron-core's groups. They are module globals, and the next job must not find those of this job."""
    import sys

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


class WorkerPool:
    """Ranks 0 … n-1 as forked processes, more of which are started on demand, and the results of `reference`."""

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
                if not ok:  # other ranks may wait for this one in a collective, so the next job needs new ranks
                    self.close()
                    raise RankFailed(f"rank {rank} of {world_size}:\n{result}")
                results[rank] = result
        return results

    def reference(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `function(*args)` on one rank, computed once per session for the same arguments.

        The result must depend on the arguments only, and not on files that change. Every caller gets its own copy.
        """
        key = pickle.dumps((function, args))
        if key not in self._references:
            self._references[key] = pickle.dumps(self.run(1, function, *args)[0])
        return pickle.loads(self._references[key])

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        # Not a daemon, because a daemon may not have children, and saving a checkpoint starts writer processes.
        process = self._context.Process(target=_serve, args=(rank, theirs))
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def close(self) -> None:
        """End every rank; the next job starts new ranks."""
        for process, connection in self._workers:
            process.terminate()
            process.join()
            connection.close()
        self._workers = []
