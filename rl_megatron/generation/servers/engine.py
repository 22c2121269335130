"""`ServerEngine`: a rollout engine on inference servers, which the run starts or which already run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig, ServersConfig
from rl_megatron.generation.completion_batch import check_requests
from rl_megatron.generation.interfaces import Completion, EngineFailed, EngineLost, Request, Served
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.generation.servers.dialect import ServerDialect
from rl_megatron.generation.servers.pool import ServerPool
from rl_megatron.generation.servers.requests import RequestSender
from rl_megatron.topology.rank_zero_loop import RankZeroLoop
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused, ServerSync, WeightServers
from rl_megatron.weight_sync.stock_sync import BaseOnDisk

_T = TypeVar("_T")
_FORESEEN = (ServerDied, ServerRefused, EngineFailed, ConfigError)
_SECONDS_TO_NOTICE = 0.5  # a guardian notices within this time that its server has ended


@dataclass(frozen=True)
class ServerKind:
    """The parts of a `ServerEngine` that depend on the kind of its servers."""

    dialect: ServerDialect
    settings: ServersConfig
    make_sync: Callable[[WeightServers], ServerSync]
    max_tokens: int  # of a prompt with its completion
    devices: Sequence[tuple[int, ...]] = ()  # the GPU numbers of each server on a node; empty for the CPU
    sleeps: bool = False  # whether servers release their memory while the policy trains
    base: BaseOnDisk | None = None  # the weights that servers start with, if only an adapter is sent to them


class ServerEngine:
    """A `RolloutEngine` on inference servers. The first weight sync starts them, or connects to running ones.

    Only rank 0 sends requests and gets the answers, on an asyncio loop in a separate thread. Failures are raised on
    every rank. All ranks take part in weight syncs. If a server dies, it is started again, all servers get the weights
    again, and the requests that were not answered are sent again.
    """

    def __init__(
        self,
        policy: MegatronPolicy,
        generation: GenerationConfig,
        kind: ServerKind,
        directory: Path,
        collective_timeout_minutes: float = 10.0,
    ):
        """Keep the settings; no server is started yet.

        Servers write their logs into `directory`/servers. The timeout is for each collective, and for each
        request of a weight sync.
        """
        self.policy, self.settings = policy, generation
        self._kind, self._timeout = kind, 60 * collective_timeout_minutes
        topology = policy.topology
        self._ranks = topology.ranks
        self._loop = RankZeroLoop(self._ranks, self._timeout, "requests to servers", _FORESEEN)
        timeout_seconds = 60 * generation.engine_timeout_minutes
        self._pool = ServerPool(
            kind.dialect, kind.settings, self._ranks, self._loop, directory / "servers", timeout_seconds
        )  # fmt: skip
        self._sender: RequestSender | None = None  # on rank 0
        self._sync: ServerSync | None = None
        self._broken: list[str] = []  # addresses of servers to start again
        self._served: Served | None = None
        self._starts = self._restarts = 0
        self._asleep = False
        self._has_lost_a_server = False  # on rank 0, the only one that takes single requests
        self._sync_metrics: dict[str, float] = {}  # of a weight sync that was not reported yet

    @property
    def served(self) -> Served | None:
        """Return the copy of the weights that all servers serve, or None if they serve none."""
        return self._served

    def sync(self) -> dict[str, float]:
        """Send the policy's current weights to the servers; see `RolloutEngine.sync`.

        Raises:
            WeightsRefused: On every rank, if the weights that arrived are not those that were sent.
            EngineFailed: On every rank, if servers die more often than `generation.max_engine_restarts`, or a server
                cannot be used.
        """
        if self._ranks.share(lambda: self._has_lost_a_server):
            self._served, self._has_lost_a_server = None, False
        if self._served is None or self._served.version != self.policy.weight_version:
            self._served = None
            self._run_with_restarts(self._sync_weights)
        metrics, self._sync_metrics = self._sync_metrics, {}
        return metrics

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete the requests of rank 0 together; see `RolloutEngine.complete`."""
        self.policy.model.require_head("lm", "generate")
        self._ranks.run_on_rank0(lambda: self._check_lengths(requests), (ConfigError,))
        if self._served is None:
            raise EngineFailed("the rollout engine serves no weights; call sync() first")
        done: dict[str, Completion] = {}
        self._run_with_restarts(lambda: self._complete_all(requests, done))
        completions = [done[request.request_id] for request in requests]
        self._ranks.run_on_rank0(lambda: self._check_versions(completions), (EngineFailed,))
        return completions

    async def submit(self, request: Request) -> Completion:
        """Return the completion of one request on rank 0; see `RolloutEngine`.

        Raises:
            ConfigError: The prompt is too long for `max_new_tokens`.
            EngineFailed: The answer cannot be used.
            EngineLost: The server died. After `sync` has started it again, the request may be repeated.
            ValueError: Another open request has this id.
        """
        if self._served is None or self._has_lost_a_server:
            raise EngineLost("the rollout engine serves no weights; call sync() first")
        self._check_lengths([request])
        try:
            return await asyncio.wrap_future(self._loop.start(self._get_sender().complete(request)))
        except ServerDied as death:
            self._has_lost_a_server = True  # the next `sync` tells all ranks
            raise EngineLost(f"{death}; sync() starts the server again") from death

    def sleep(self) -> None:
        """Let the servers release their memory, so that the policy can train on the same GPUs.

        The next `sync` wakes them. Every rank calls it. It does nothing if no server runs, or if the servers sleep
        already or cannot sleep.
        """
        if self._kind.sleeps and self._sync is not None and not self._asleep:
            self._served, self._asleep = None, True
            try:
                self._tell_all(self._kind.dialect.sleep)
            except ServerRefused as refusal:
                raise EngineFailed(str(refusal)) from refusal
            except ServerDied as death:
                log.LOGGER.warning("%s; the next weight sync starts it again", death)

    def close(self) -> None:
        """End the servers that the run has started, and close the connections to others. It is not collective."""
        self._served = None
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        self._pool.end()
        if self._kind.base is not None:
            self._kind.base.close()
        self._loop.close()

    # --- work that is repeated if a server dies ---

    def _run_with_restarts(self, attempt: Callable[[], _T]) -> _T:
        """Return what `attempt` returns. If a server dies meanwhile, note which servers to restart, and try again."""
        while True:
            try:
                return attempt()
            except (ServerDied, ServerRefused) as failure:
                self._served = None
                time.sleep(_SECONDS_TO_NOTICE)
                self._broken, tails = self._pool.find_deaths(str(failure) if isinstance(failure, ServerDied) else "")
                if isinstance(failure, ServerRefused) and not self._broken:
                    raise EngineFailed(str(failure)) from failure
                self._restarts += 1
                allowed, message = self.settings.max_engine_restarts, "; ".join([str(failure), *tails])
                if self._restarts > allowed:
                    raise EngineFailed(
                        f"{message}; generation.max_engine_restarts={allowed} does not allow another restart"
                    ) from failure
                log.LOGGER.warning("%s; starting again (%d of at most %d times)", message, self._restarts, allowed)
                self._forget_servers()

    def _complete_all(self, requests: Sequence[Request], done: dict[str, Completion]) -> None:
        """Add the completions of rank 0's requests to rank 0's `done`. All ranks wait for the completions."""
        if self._served is None:  # servers died in the last attempt
            self._sync_weights()

        async def complete() -> None:
            await self._get_sender().complete_all(requests, done)

        self._loop.run_for_all_ranks(complete, lambda: log.report_progress(len(done), len(requests), "sequences"))

    def _check_versions(self, completions: Sequence[Completion]) -> None:
        """Check that every token was generated with the policy's current weights, and that no request was aborted."""
        current = self.policy.weight_version
        for completion in completions:
            wrong = next((span for span in completion.versions if span.version != current), None)
            if wrong is not None:
                raise EngineFailed(
                    f"request {completion.request_id!r}: the rollout engine generated tokens {wrong.start + 1} to "
                    f"{wrong.end} with version {wrong.version} of the weights, but the policy's is {current}; call "
                    "sync() first"
                )
            if completion.reason == "abort":
                raise EngineFailed(
                    f"request {completion.request_id!r} was aborted at token {len(completion.ids)}, and not by this "
                    "run; let nothing else abort the requests of its servers"
                )

    # --- weights ---

    def _sync_weights(self) -> None:
        """Start servers if needed, send them the policy's current weights, and keep the metrics."""
        if self._kind.sleeps:  # the servers are about to allocate memory
            self.policy.offload_after_refit()
        if self._sync is None:
            self._start()
        assert self._sync is not None  # `_start` has made it
        version, dialect = self.policy.weight_version, self._kind.dialect
        self._tell_all(dialect.pause)
        if self._asleep:
            self._tell_all(lambda server: dialect.wake(server, "weights"))
        metrics = self._sync.send(version)
        if self._kind.sleeps:
            self.policy.offload_after_refit()
        if self._asleep:
            self._tell_all(lambda server: dialect.wake(server, "kv_cache"))
            self._asleep = False
        self._tell_all(dialect.resume)
        self._served, self._sync_metrics = Served(version, self._starts), metrics

    def _start(self) -> None:
        """Start the servers that do not run, and prepare all servers for weights."""
        self.policy.prepare_weights_for_ipc(int(self.settings.refit_bucket_mb * (1 << 20)))
        plan = self.policy.weights.plan
        self._starts += 1
        base, runs_already = self._kind.base, bool(self._kind.settings.server_urls)
        weights = None if base is None or runs_already else base.write()
        self._pool.start(plan, self._kind.devices, self._broken, weights)
        self._broken = []
        if self._ranks.leads:
            settings, clients, facts = self._kind.settings, self._pool.clients, self._pool.facts
            dialect = self._kind.dialect
            self._sender = RequestSender(clients, facts, dialect, plan.vocab_size, settings.max_requests_in_flight)
        hosts = [urlsplit(client.url).hostname or "" for client in self._pool.clients]
        self._sync = self._kind.make_sync(WeightServers(self._pool.clients, self._ranks, self._timeout, hosts=hosts))
        self._sync.connect()

    def _get_sender(self) -> RequestSender:
        """Return the sender of requests, on rank 0; raise EngineLost if no server runs or one has died."""
        if self._sender is None:
            raise EngineLost("no server runs; sync() starts the servers")
        return self._sender

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError if a prompt with its completion may become longer than the policy or the servers allow."""
        check_requests(requests, self.policy.model_config.max_sequence_length, self.policy.vocab_size)
        longest = max(len(request.prompt) + request.sampling.max_new_tokens for request in requests)
        most = self._kind.max_tokens
        if longest > most:
            raise ConfigError(
                f"a prompt with its completion can have {longest} tokens, but the servers take {most}: raise their "
                f"limit in {self._kind.dialect.key}, or lower generation.max_new_tokens"
            )

    def _tell_all(self, call: Callable[[ServerClient], Coroutine[Any, Any, None]]) -> None:
        """Run `call` for every server; all ranks wait until these calls have finished."""
        self._loop.run_for_all_ranks(lambda: self._get_sender().call_all(call))

    def _forget_servers(self) -> None:
        """End the connections between the policy and the servers, because one of them died."""
        self._sender = None
        if self._sync is not None:
            self._sync.close()
            self._sync = None
