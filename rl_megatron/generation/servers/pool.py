"""`ServerPool`: all servers of an engine, whether the run started them or not."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rl_megatron import log
from rl_megatron.config.addresses import is_loopback
from rl_megatron.config.errors import ConfigError, describe_error
from rl_megatron.config.generation import ServersConfig
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.generation.servers.access import TOKEN
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.generation.servers.dialect import ServerDialect, ServerFacts
from rl_megatron.generation.servers.process import LocalServers
from rl_megatron.topology.rank_zero_loop import RankZeroLoop
from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import RefitPlan
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused

_POLL_SECONDS = 0.5
_TOKEN_BYTES = 32


class ServerPool:
    """The servers, which each node's first rank starts, and rank 0's clients. Every rank calls every method.

    Attributes:
        clients: On rank 0, one client for each server; empty on other ranks.
        facts: On rank 0, the properties that each server reported.
    """

    def __init__(
        self,
        dialect: ServerDialect,
        settings: ServersConfig,
        ranks: Ranks,
        loop: RankZeroLoop,
        log_directory: Path,
        timeout_seconds: float,
    ):
        """Keep the settings; nothing is started yet. An answer may take `timeout_seconds`."""
        self.clients: list[ServerClient] = []
        self.facts: list[ServerFacts] = []
        self._dialect, self._settings, self._ranks, self._loop = dialect, settings, ranks, loop
        self._log_directory, self._timeout_seconds = log_directory, timeout_seconds
        self._local: LocalServers | None = None
        self._token = os.environ.get(TOKEN, "")

    def start(
        self,
        plan: RefitPlan,
        devices: Sequence[tuple[int, ...]],
        broken: Collection[str] = (),
        weights: Path | None = None,
    ) -> None:
        """Start the servers that do not run, wait until all are ready, and ask each for its settings.

        Args:
            plan: The model that the servers serve.
            devices: The GPU numbers of each server on a node; empty for the CPU.
            broken: The addresses of servers to start again although their processes run.
            weights: A directory with the weights that servers start with; None if all weights are sent later.

        Raises:
            ServerDied: A server died, and a new start may help.
            EngineFailed: A server cannot be used; the message has the reason.
            ConfigError: A port is in use, or other nodes cannot reach the servers.
        """
        if self._local is None:
            first_on_its_node = os.environ.get("LOCAL_RANK", "0") == "0" and not self._settings.urls
            count = self._settings.num_servers if first_on_its_node else 0
            if not self._settings.urls:
                self._token = self._ranks.share(lambda: secrets.token_urlsafe(_TOKEN_BYTES))
            self._local = LocalServers(
                count, self._dialect, self._settings, plan, devices, self._log_directory, self._token, weights
            )
        self._check_host()
        urls = self._wait(broken)
        self._close_clients()
        if self._ranks.leads:
            self.clients = [self._make_client(index, url) for index, url in enumerate(urls)]
        try:
            self.facts = self._loop.run_for_all_ranks(self._ask_for_facts)
        except ServerRefused as refusal:
            raise EngineFailed(str(refusal)) from refusal

    def find_deaths(self, death: str) -> tuple[list[str], list[str]]:
        """Return the addresses of the servers that cannot take requests, and the ends of their logs, on every rank.

        `death` is the error message about a death, or empty. A server that the message names counts as dead.
        """
        broken = self._loop.run_for_all_ranks(self._find_unhealthy)
        broken += [
            url for url in self._ranks.share(lambda: [client.url for client in self.clients])
            if f"({url})" in death and url not in broken
        ]  # fmt: skip
        local = self._local
        tails = [] if local is None else [tail for url in broken if (tail := local.describe(url)) is not None]
        return broken, [tail for of_rank in self._ranks.gather(tails) for tail in of_rank]

    def end(self) -> None:
        """End the servers that were started here, and close the connections. This is not collective."""
        self._close_clients()
        if self._local is not None:
            self._local.end()

    # --- starting ---

    def _wait(self, broken: Collection[str]) -> list[str]:
        """Return the addresses of all servers, on every rank, once all are ready."""
        assert self._local is not None  # `start` has made it
        began, waits = time.monotonic(), False
        failure: Exception | None = None
        try:
            self._local.start(broken)
        except ConfigError as error:
            failure = error
        except OSError as error:
            failure = EngineFailed(f"{self._dialect.name}s cannot be started: {error}")
        while True:
            ready = False
            try:
                ready = failure is None and self._local.are_ready() and self._others_are_ready(began)
            except (ServerDied, EngineFailed) as error:
                failure = error
            kind_and_message = None if failure is None else (type(failure), str(failure))
            states = self._ranks.gather((ready, kind_and_message, self._local.urls))
            for _, failure_of_rank, _ in states:
                if failure_of_rank is not None:
                    kind, message = failure_of_rank
                    raise kind(message) from failure
            if all(state[0] for state in states):
                return list(self._settings.urls) or [url for state in states for url in state[2]]
            if not waits and self._settings.urls:
                log.LOGGER.info("waiting until %s answer", ", ".join(self._settings.urls))
            waits = True
            time.sleep(_POLL_SECONDS)

    def _others_are_ready(self, began: float) -> bool:
        """Return whether the servers that the run did not start are ready; only rank 0 asks them."""
        if not self._ranks.leads or not self._settings.urls:
            return True
        clients = [self._make_client(index, url) for index, url in enumerate(self._settings.urls)]
        silent = [client.name for client in clients if not self._loop.wait(_check_health_once(client))]
        limit = self._settings.startup_timeout_seconds
        if silent and time.monotonic() - began > limit:
            raise EngineFailed(
                f"{silent[0]} does not answer GET {self._dialect.health_path} with status 200, although the run waited "
                f"{self._dialect.key}.startup_timeout_seconds={limit:g}; start the server, or correct "
                f"{self._dialect.key}.server_urls or server_nodes"
            )
        return not silent

    def _check_host(self) -> None:
        """Raise ConfigError if there are several nodes, but servers would listen at the loopback address."""
        nodes = sum(self._ranks.gather(os.environ.get("LOCAL_RANK", "0") == "0"))
        host, key = self._settings.host, self._dialect.key
        if nodes > 1 and not self._settings.urls and is_loopback(host):
            raise ConfigError(
                f"{key}.host={host}: the run has {nodes} nodes, and rank 0 cannot reach this address of another node; "
                f"set {key}.host to 0.0.0.0, or to an address that the nodes reach"
            )

    def _make_client(self, index: int, url: str) -> ServerClient:
        kind = f"{self._dialect.name} {index}"
        health_path, seconds = self._dialect.health_path, self._timeout_seconds
        return ServerClient(kind, url, self._loop.loop, health_path, seconds, self._token)

    def _close_clients(self) -> None:
        clients, self.clients = self.clients, []
        for client in clients:
            self._loop.wait(client.close())

    async def _ask_for_facts(self) -> list[ServerFacts]:
        return list(await asyncio.gather(*(self._ask_client(client) for client in self.clients)))

    async def _ask_client(self, client: ServerClient) -> ServerFacts:
        try:
            return await self._dialect.facts(client)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerRefused(
                f"{client.name} describes itself in an unexpected form ({describe_error(error)}); check that "
                f"{self._dialect.key}.server_urls are servers of this kind, and of a version that "
                "docs/rollout_engines.md lists"
            ) from error

    async def _find_unhealthy(self) -> list[str]:
        healthy = await asyncio.gather(*(client.is_healthy() for client in self.clients))
        return [client.url for client, is_healthy in zip(self.clients, healthy, strict=True) if not is_healthy]


async def _check_health_once(client: ServerClient) -> bool:
    try:
        return await client.is_healthy()
    finally:
        await client.close()
