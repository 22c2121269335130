"""`WeightServers`: the inference servers that take a policy's weights, and the requests to them in a weight sync.

A rollout engine gives rank 0 one `WeightServer` for each server. A `ServerSync` sends the weights, in one of several
ways. It makes HTTP requests only through `WeightServers`, which returns the servers' answers on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from rl_megatron.config.errors import describe_error
from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.process_group import CollectiveFailed, find_free_address

_POLL_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 60.0  # rank 0 tells other ranks at least this often that it still waits


class ServerDied(RuntimeError):
    """The error for a server that cannot be reached or did not answer in time, and for a broken process group.

    A rollout engine may start its servers again, call `ServerSync.connect`, and send the weights again.
    """


class ServerRefused(RuntimeError):
    """The error for a request that a server refuses and would refuse again. The message has the server's own words."""


class Pending(Protocol):
    """An operation in progress with other processes, such as joining a process group or a collective."""

    def is_over(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether the operation is over by then; it may have failed."""
        ...

    def wait(self) -> None:
        """Wait until the operation has succeeded.

        Raises:
            CollectiveFailed: It has failed.
        """
        ...


class WeightServer(Protocol):
    """The interface by which rank 0 makes requests to a server."""

    @property
    def name(self) -> str:
        """Return the server's name for messages, such as "vLLM server 0 (http://127.0.0.1:8000)"."""
        ...

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_seconds: float | None = None
    ) -> Future[Any]:
        """Start an HTTP request, and return the future of the decoded JSON answer without waiting.

        The request is sent once and not repeated. It must not wait for other requests of this process.

        Args:
            method: "GET" or "POST".
            path: The path on the server, with its query.
            body: The JSON body.
            timeout_seconds: The longest time until the answer. None: the server's usual timeout.

        Raises:
            ServerDied: Through the future: there is no answer.
            ServerRefused: Through the future: the status is not 200. The message has the status and the answer's text.
        """
        ...


class ServerSync(Protocol):
    """A way to send weights to servers. Every rank of the policy calls every method at the same time.

    Each method raises its exception on every rank. After an exception, the engine must not generate with any server.
    """

    def connect(self) -> None:
        """Prepare servers that were started or restarted. The connections to earlier servers end.

        Raises:
            ServerDied: A server died or did not answer.
            ServerRefused: A server cannot take weights in this way, or serves another model.
            WeightsRefused: The servers' model differs from the policy's. The message names a tensor or a key.
        """
        ...

    def send(self, version: int) -> dict[str, float]:
        """Send the policy's current weights, and return once every server has confirmed that it serves `version`.

        No server may generate meanwhile: the caller pauses the servers before, and resumes them afterwards. The servers
        drop everything computed with older weights, including the keys and values of unfinished requests.

        Returns:
            The metrics of the weight sync (`refit_bytes`, `refit_seconds`, and those of each phase).

        Raises:
            WeightsRefused: The weights that arrived are not those that were sent. The message names a tensor.
            ServerDied: A server died or did not answer.
            ServerRefused: A server answered with an error.
        """
        ...

    def close(self) -> None:
        """Leave process groups, and free memory and files. Servers that still run continue."""
        ...


@dataclass(frozen=True)
class _Outcome:
    """The answers of all servers, or the worst failure."""

    values: tuple[object, ...] = ()
    died: str | None = None
    refused: str | None = None


class WeightServers:
    """All servers that get a policy's weights. Every rank of the policy calls every method at the same time."""

    def __init__(
        self,
        servers: Sequence[WeightServer],
        ranks: Ranks,
        timeout_seconds: float,
        seconds_after_a_break: float = 5.0,
        hosts: Sequence[str] = (),
    ):
        """Keep the servers.

        Args:
            servers: The servers. Only rank 0 needs them; other ranks pass an empty sequence.
            ranks: The policy's ranks.
            timeout_seconds: The longest time that a request of a weight sync may take.
            seconds_after_a_break: How long servers may take to answer after a collective has failed.
            hosts: The hosts of servers that are not on the nodes of the ranks. Only rank 0 needs it.
        """
        self.ranks = ranks
        self.count = ranks.share(lambda: len(servers))
        self._servers, self._timeout, self._seconds_after_a_break = servers, timeout_seconds, seconds_after_a_break
        self._hosts = hosts
        self._recipients: list[WeightServer] = []  # the servers that got the pending request
        self._pending: list[Future[Any]] = []
        self._server_failed_first = False  # whether a server failed before the collective did

    def find_meeting_point(self) -> tuple[str, int]:
        """Return on every rank an address and a free port of rank 0, at which the servers can meet the ranks."""
        return self.ranks.share(lambda: find_free_address(self._hosts))

    def post(
        self,
        path: str,
        bodies: Sequence[dict[str, Any]] | None = None,
        meanwhile: Callable[[], None] | None = None,
        to: Sequence[bool] | None = None,
    ) -> tuple[Any, ...]:
        """Send a POST request to every server at the same time, and return their answers on every rank.

        Args:
            path: The path.
            bodies: The JSON body for each server; {} if None. Only rank 0's are used.
            meanwhile: A function that all ranks call while the servers work on their answers.
            to: For each server, whether it gets the request; None: all do. The result has the answers of those that do.

        Raises:
            ServerDied: A server died or did not answer, or a collective in `meanwhile` failed.
            ServerRefused: A server answered with an error.
        """
        return self._send("POST", path, bodies or [{}] * self.count, meanwhile, to)

    def get(self, path: str) -> tuple[Any, ...]:
        """Send a GET request to every server at the same time, and return their answers on every rank; see `post`."""
        return self._send("GET", path, [None] * self.count, None)

    def meet(self, pending: Pending) -> None:
        """Wait until this rank's operation with the servers has succeeded; call this in `meanwhile` of a request.

        The operation is usually joining a process group. Ranks exchange their states, so that none waits for a rank
        that cannot join, or for a server that failed.

        Raises:
            CollectiveFailed: On every rank, if a rank cannot join, a server has answered with an error, or the
                operation is still unfinished after all servers have answered.
        """
        joined: tuple[bool, ...] = (False,)
        answered_since: float | None = None
        while not all(joined):
            over, failure = pending.is_over(_POLL_SECONDS), None
            try:
                if over:
                    pending.wait()
            except CollectiveFailed as error:
                failure = str(error)
            if self._pending and all(future.done() for future in self._pending):
                answered_since = answered_since or time.monotonic()
                if not over and time.monotonic() - answered_since > self._seconds_after_a_break:
                    failure = failure or "the servers have answered, but some of their workers did not join"
            states = self.ranks.gather((over, failure, self.has_failed()))
            failures = [failure for _, failure, _ in states if failure is not None]
            if any(server_failed for _, _, server_failed in states):
                self._server_failed_first = True
                raise CollectiveFailed("a server answered with an error")
            if failures:
                raise CollectiveFailed(failures[0])
            joined = tuple(over for over, _, _ in states)

    def has_failed(self) -> bool:
        """Return on rank 0 whether a server has answered the pending request with an error, or has died."""
        return any(future.done() and future.exception() is not None for future in self._pending)

    def _send(
        self,
        method: str,
        path: str,
        bodies: Sequence[dict[str, Any] | None],
        meanwhile: Callable[[], None] | None,
        to: Sequence[bool] | None = None,
    ) -> tuple[Any, ...]:
        if self.ranks.leads:
            chosen = [True] * len(self._servers) if to is None else to
            self._recipients = [server for server, is_chosen in zip(self._servers, chosen, strict=True) if is_chosen]
            self._pending = [
                server.request(method, path, body, self._timeout)
                for server, body, is_chosen in zip(self._servers, bodies, chosen, strict=True)
                if is_chosen
            ]
        deadline = time.monotonic() + self._timeout + self._seconds_after_a_break
        broken, self._server_failed_first = None, False
        if meanwhile is not None:
            try:
                meanwhile()
            except CollectiveFailed as error:
                broken = str(error)
            broken = self.ranks.find_first_failure(broken)
        if broken is not None:
            deadline = time.monotonic() + self._seconds_after_a_break
        outcome = None
        while outcome is None:
            outcome = self.ranks.share(lambda: self._find_outcome(path, deadline))
        if outcome.refused is not None and (self._server_failed_first or outcome.died is broken is None):
            raise ServerRefused(f"the weight sync failed at {path}: {outcome.refused}")
        if outcome.died is not None:
            raise ServerDied(outcome.died)
        if broken is not None:
            raise ServerDied(f"the process group of the policy and the servers failed: {broken}")
        return outcome.values

    def _find_outcome(self, path: str, deadline: float) -> _Outcome | None:
        """Return the outcome once all servers have answered or one has died; None if ranks should ask again."""
        until = min(deadline, time.monotonic() + min(_LONGEST_WAIT_SECONDS, self._timeout / 4))
        died = refused = None
        waiting = list(zip(self._recipients, self._pending, strict=True))
        while waiting and died is None:
            wait([future for _, future in waiting], max(0.0, until - time.monotonic()), return_when="FIRST_COMPLETED")
            for server, future in waiting:
                error = future.exception() if future.done() else None
                if isinstance(error, ServerRefused):
                    refused = refused or str(error)
                elif isinstance(error, ServerDied):
                    died = died or str(error)
                elif error is not None:
                    died = died or f"{server.name}: {describe_error(error)}"
            waiting = [(server, future) for server, future in waiting if not future.done()]
            if waiting and died is None and time.monotonic() >= deadline:
                died = f"{waiting[0][0].name} did not answer {path} in time"
            elif waiting and died is None and time.monotonic() >= until:
                return None
        if died is not None or refused is not None:
            return _Outcome(died=died, refused=refused)
        return _Outcome(tuple(future.result() for future in self._pending))
