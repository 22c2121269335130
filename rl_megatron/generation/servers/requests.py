"""`RequestSender`: sends requests to servers, repeats those that a failure left unanswered, and checks answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import describe_error
from rl_megatron.generation.interfaces import Completion, EngineFailed, Request
from rl_megatron.generation.servers.answers import check_answer
from rl_megatron.generation.servers.client import ConnectionLost, RefusedForNow, ServerClient
from rl_megatron.generation.servers.dialect import ServerDialect, ServerFacts
from rl_megatron.generation.servers.routing import Load, Router
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused

_ATTEMPTS = 3


class RequestSender:
    """The sender of rank 0's requests to all servers of an engine. Its coroutines run on one asyncio loop."""

    def __init__(
        self,
        servers: Sequence[ServerClient],
        facts: Sequence[ServerFacts],
        dialect: ServerDialect,
        vocab_size: int,
        max_requests: int,
        seconds_between_attempts: float = 0.5,
    ):
        """Start with idle servers.

        Args:
            servers: The clients.
            facts: The properties of each server.
            dialect: The kind of the servers.
            vocab_size: The number of valid token ids.
            max_requests: The most requests that one server may have in flight.
            seconds_between_attempts: The pause after the first failed attempt; it doubles after every further one.
        """
        self._seconds_between_attempts = seconds_between_attempts
        self.servers, self._dialect, self._vocab_size = list(servers), dialect, vocab_size
        self._open: set[str] = set()  # the ids of requests without a completion
        self._router = Router([Load(max_requests, of_server.max_tokens_in_flight) for of_server in facts])
        self._with_seeds = all(of_server.takes_seeds for of_server in facts)
        if not self._with_seeds:
            why = next(of_server.why_no_seeds for of_server in facts if not of_server.takes_seeds)
            log.once(f"requests to {dialect.name}s have no seeds, so a repeated run samples other tokens: {why}")

    async def complete(self, request: Request) -> Completion:
        """Send a request as soon as a server can take it, and return the completion.

        After a temporary failure the request is sent again, because it changes nothing on a server.

        Raises:
            ServerDied: A server died, or did not answer in time.
            EngineFailed: A server answered with an error, or its answer cannot be used.
            ValueError: Another open request has this id.
        """
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id!r} belongs to a request that has no completion yet")
        self._open.add(request.request_id)
        try:
            return await self._complete(request)
        finally:
            self._open.remove(request.request_id)

    async def _complete(self, request: Request) -> Completion:
        outside = next((token for token in request.prompt if not 0 <= token < self._vocab_size), None)
        if outside is not None:  # it would make vLLM end all its requests
            raise EngineFailed(
                f"the prompt of request {request.request_id!r} has the token id {outside}, but the tokenizer has "
                f"{self._vocab_size} tokens"
            )
        most_tokens = len(request.prompt) + request.sampling.max_new_tokens
        async with self._router.assign(request.prompt, most_tokens) as index:
            server = self.servers[index]
            body = await self._send(server, request)
            try:
                completion = check_answer(request, self._dialect.parse_response(body), self._vocab_size, server.name)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise EngineFailed(
                    f"{server.name} answered request {request.request_id!r} in an unexpected form "
                    f"({describe_error(error)}); check that {self._dialect.key}.server_urls are servers of "
                    "this kind, and of a version that docs/rollout_engines.md lists"
                ) from error
            _report_nan(completion, server)
            return completion

    async def complete_all(self, requests: Sequence[Request], done: dict[str, Completion]) -> list[Completion]:
        """Return the completions of a batch, in order; see `complete`.

        `done` maps request ids to completions. Requests in `done` are not sent. If this raises, `done`
        keeps the completions so far.
        """

        async def complete(request: Request) -> None:
            done[request.request_id] = await self.complete(request)

        tasks = [asyncio.ensure_future(complete(request)) for request in requests if request.request_id not in done]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [done[request.request_id] for request in requests]

    async def call_all(self, call: Callable[[ServerClient], Coroutine[Any, Any, None]]) -> None:
        """Run `call` for all servers at the same time."""
        await asyncio.gather(*(call(server) for server in self.servers))

    async def _send(self, server: ServerClient, request: Request) -> Any:
        """Send a request and return the answer. After a temporary error, send it again, unless the server is dead."""
        path, body = self._dialect.http_request(request, self._with_seeds)
        pause = self._seconds_between_attempts
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await server.post(path, body)
            except (ConnectionLost, RefusedForNow) as error:
                if not await server.is_healthy():
                    raise ServerDied(str(error)) from error
                if attempt == _ATTEMPTS:
                    raise EngineFailed(
                        f"{error}; all {_ATTEMPTS} attempts at request {request.request_id!r} failed, although the "
                        "server reports that it is healthy; look at its log"
                    ) from error
            except ServerRefused as error:
                raise EngineFailed(f"{error}; this is about request {request.request_id!r}") from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


def _report_nan(completion: Completion, server: ServerClient) -> None:
    """Log which server computed logits that are NaN; `make_completion_batch` then ends the run, as for every engine."""
    first = next((index for index, logprob in enumerate(completion.logprobs) if math.isnan(logprob)), None)
    if first is not None:
        log.LOGGER.warning(
            "%s has no logprob for token %d of request %r: its logits are NaN or infinite",
            server.name, first + 1, completion.request_id,
        )  # fmt: skip
