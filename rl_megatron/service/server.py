"""Run the training service: rank 0 answers clients, and all ranks execute the same operations in the same order."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.disk import sync_directory
from rl_megatron.rollouts.gateway.connections import limit_connections
from rl_megatron.service.api import Api, Base
from rl_megatron.service.executor import Executor
from rl_megatron.service.operations import Operation, Outcome, Save
from rl_megatron.service.registry import Registry
from rl_megatron.service.requests import Refused
from rl_megatron.service.saved_weights import remove_gone
from rl_megatron.topology.rank_zero_loop import RankZeroLoop
from rl_megatron.topology.ranks import Ranks

_BACKLOG, _CONNECTIONS = 1024, 1024
_STATE = "state"
_SECONDS_OF_A_LOOK = 60.0


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of a service.

    Attributes:
        host: The address at which it listens.
        port: The port; 0: a free one.
        directory: The directory of its journal, states and saved weights.
        keys: The name of the owner of each key.
        seed: The seed of everything that is drawn without a client's seed.
        most_pending: How many unfinished requests a key may have.
        most_bytes: The most bytes of a request's body.
        most_pending_bytes: The most bytes of all unfinished requests of a key.
        keep_seconds: The seconds of work after which states are kept, so that less work is repeated after a crash.
        silent_seconds: The seconds after which the runs of a session that is not heard of are unloaded.
        exact_samples: Whether the samples of each request are decoded alone.
    """

    host: str
    port: int
    directory: Path
    keys: Mapping[str, str]
    seed: int = 0
    most_pending: int = 4096
    most_bytes: int = 256 * 2**20
    most_pending_bytes: int = 2**30
    keep_seconds: float = 300.0
    silent_seconds: float = 86400.0
    exact_samples: bool = False


class Service:
    """The service on this rank. All ranks make one, and call `run`."""

    def __init__(
        self, executor: Executor, base: Base, settings: ServiceSettings, ranks: Ranks, collective_timeout: float
    ):
        """Start listening on rank 0, after reading the journal. No other server may use the directory.

        Raises:
            ConfigError: On every rank, if rank 0 cannot listen, or the journal cannot be read.
        """
        self._executor, self._base, self._settings, self._ranks = executor, base, settings, ranks
        self._loop = RankZeroLoop(ranks, collective_timeout, "the training service", (ConfigError,))
        self._registry: Registry | None = None
        self._server: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self.url = ""
        ranks.run_on_rank0(self._start, (ConfigError,))

    def run(self) -> None:
        """Execute operations until the service is stopped, and keep all states at the end."""
        busy = 0.0
        while True:
            operations = self._loop.run_for_all_ranks(self._next_operations)
            if operations is None:
                break
            began = time.monotonic()
            if self._ranks.share(lambda o=operations: _replaces_weights(o)):
                self._keep()  # what has read the weights that are replaced is not executed again
            outcomes = self._executor.execute(operations)
            busy += time.monotonic() - began
            if self._ranks.share(lambda o=operations, r=outcomes, s=busy: self._finish(o, r, s), (RunFailed,)):
                self._keep()
                busy = 0.0
        if self._ranks.share(lambda: self._registry is not None and not self._registry.is_replaying):
            self._keep()

    def stop(self) -> None:
        """Let `run` return after the operation that it executes. It may be called on rank 0, by a signal."""
        if self._registry is not None:
            self._loop.loop.call_soon_threadsafe(self._registry.stop)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.should_exit = True
            time.sleep(0.1)
        self._loop.close()

    # --- rank 0 ---

    def _start(self) -> None:
        import uvicorn

        from rl_megatron.service.application import build_application

        settings, directory = self._settings, self._settings.directory
        listening = _listen(settings.host, settings.port)

        async def begin() -> None:
            self._registry = Registry(
                directory / "journal", settings.most_pending, settings.most_pending_bytes, settings.exact_samples
            )
            api = Api(self._registry, self._base, directory / "saved", settings.seed)
            try:
                self._registry.recover(api.accept_again)
            except ValueError as error:
                raise ConfigError(f"{directory}: {error}") from error
            application = build_application(api, settings.keys, settings.most_bytes, settings.most_pending_bytes)
            options = uvicorn.Config(
                application, log_config=None, access_log=False, lifespan="off", ws="none", backlog=_BACKLOG,
                http=limit_connections(lambda: _CONNECTIONS), proxy_headers=False, server_header=False,
                timeout_graceful_shutdown=1,
            )  # fmt: skip
            self._server = uvicorn.Server(options)
            self._tasks = [
                asyncio.create_task(self._server.serve([listening])),
                asyncio.create_task(_unload_silent_runs(api, settings.silent_seconds)),
            ]

        self._loop.wait(begin())
        host, port = listening.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _next_operations(self) -> Sequence[Operation] | None:
        assert self._registry is not None  # rank 0 alone calls it
        return await self._registry.next_operations()

    def _finish(self, operations: Sequence[Operation], outcomes: Sequence[Outcome], busy: float) -> bool:
        """Give clients the outcomes, and return whether the states of runs are to be kept now."""
        assert self._registry is not None
        try:
            self._loop.wait(self._registry.finish(operations, outcomes))
        except OSError as error:
            raise RunFailed(f"the journal cannot be written: {error}; free space and start the server again") from error
        return busy > self._settings.keep_seconds and not self._registry.is_replaying

    def _keep(self) -> None:
        """Keep the states of all runs, and begin a new journal from them. Collective.

        If they cannot be written, the old states and the journal stay.
        """
        root = self._settings.directory / _STATE
        path = self._ranks.share(lambda: str(root / f"{time.time_ns():020d}"))
        failure = self._executor.keep(Path(path))
        if failure is not None:
            log.LOGGER.warning("the states of runs cannot be kept, so that the journal grows: %s", failure)
            self._ranks.run_on_rank0(lambda: shutil.rmtree(path, ignore_errors=True))
            return
        self._ranks.run_on_rank0(lambda: self._begin_journal(Path(path)), (RunFailed,))

    def _begin_journal(self, path: Path) -> None:
        assert self._registry is not None
        try:
            path.mkdir(parents=True, exist_ok=True)
            for directory in (path, path.parent, path.parent.parent):
                sync_directory(directory)
            self._loop.wait(self._registry.keep(path))
        except OSError as error:
            log.LOGGER.warning("the journal cannot be replaced, so that it grows: %s", error)
            return
        for older in path.parent.iterdir():
            if older.name < path.name:
                shutil.rmtree(older, ignore_errors=True)
        remove_gone(self._settings.directory / "saved")


async def _unload_silent_runs(api: Api, seconds: float) -> None:
    """Unload the runs of silent sessions again and again."""
    while True:
        await asyncio.sleep(min(_SECONDS_OF_A_LOOK, seconds))
        try:
            await api.unload_silent_runs(time.time() - seconds)
        except Refused as error:
            log.once(f"the runs of silent sessions are not unloaded: {error}")


def _replaces_weights(operations: Sequence[Operation]) -> bool:
    works = [operation.work for operation in operations]
    return any(isinstance(work, Save) and work.overwrite and Path(work.path).exists() for work in works)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        remedy = "choose another --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        raise ConfigError(f"the server cannot listen at --host {host}, --port {port}: {error}; {remedy}") from error
    return listening
