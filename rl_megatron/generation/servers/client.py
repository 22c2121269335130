"""`ServerClient`: requests to one inference server, each with a limit on its time, and errors that name the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import httpx2

from rl_megatron.generation.servers.access import make_headers
from rl_megatron.timing import record_span
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused

_SECONDS_TO_CONNECT = 10.0
_SECONDS_OF_HEALTH = 10.0
_SECONDS_KEPT_ALIVE = 2.0  # shorter than servers keep idle connections, so that no request meets a closing one
_LONGEST_EXCERPT = 400  # characters of a server's own message
_TEMPORARY = (408, 429, 500, 502, 503, 504)


class ConnectionLost(ServerDied):
    """The error if a server cannot be reached, or the connection ends before the whole answer has arrived."""


class RefusedForNow(ServerRefused):
    """The error if a server answers with a status that may be temporary, such as 500 or 503."""


class ServerClient:
    """The client of one server. It can be made on any thread, and works on one asyncio loop.

    Attributes:
        name: The server's name for messages, with its address.
        url: The server's address.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        loop: asyncio.AbstractEventLoop,
        health_path: str,
        timeout_seconds: float,
        token: str = "",
    ):
        """Prepare connections; nothing is sent yet.

        Args:
            kind: The server's name for messages, such as "vLLM server 0".
            url: The server's address, such as http://127.0.0.1:8000.
            loop: The loop that the requests run on.
            health_path: The path that answers 200 if the server can take requests.
            timeout_seconds: Seconds that an answer may take, if a request sets no other limit.
            token: The token that the server requires in the header `Authorization` of each request; empty for none.
        """
        self.url = url.rstrip("/")
        self.name = f"{kind} ({self.url})"
        self._loop, self._health_path, self._timeout_seconds = loop, health_path, timeout_seconds
        limits = httpx2.Limits(max_connections=None, keepalive_expiry=_SECONDS_KEPT_ALIVE)
        timeout = httpx2.Timeout(None, connect=_SECONDS_TO_CONNECT)  # `call` limits the time of the whole answer
        verify = url.startswith("https:")  # certificates take long to load
        self._http = httpx2.AsyncClient(
            limits=limits, timeout=timeout, trust_env=False, verify=verify, headers=make_headers(token)
        )

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_seconds: float | None = None
    ) -> Future[Any]:
        """Start a request from another thread, and return the future of its answer; see `call`."""
        return asyncio.run_coroutine_threadsafe(self.call(method, path, body, timeout_seconds), self._loop)

    async def get(self, path: str, seconds: float | None = None) -> Any:
        """Send a GET request, and return the JSON of the answer; see `call`."""
        return await self.call("GET", path, None, seconds)

    async def post(self, path: str, body: Mapping[str, object] | None = None, seconds: float | None = None) -> Any:
        """Send a POST request, and return the JSON of the answer; see `call`."""
        return await self.call("POST", path, body, seconds)

    async def call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, seconds: float | None = None
    ) -> Any:
        """Send a request once, and return the decoded JSON of the answer; None if the answer is empty.

        An answer without a content type is returned as text. `seconds` limits the time until the whole answer has
        arrived; None means the client's limit.

        Raises:
            ConnectionLost: The server cannot be reached, or closed the connection.
            ServerDied: The answer took longer than the limit.
            RefusedForNow: The status is 500, 503 or another one that may be temporary.
            ServerRefused: The status is another error, or the answer is not JSON.
        """
        timeout_seconds, began = seconds or self._timeout_seconds, time.time_ns()
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._http.request(method, self.url + path, json=body)
        except TimeoutError as error:
            raise ServerDied(f"{self.name} did not answer {method} {path} within {timeout_seconds:g} s") from error
        except httpx2.RequestError as error:
            what = str(error) or type(error).__name__
            raise ConnectionLost(f"{self.name} did not answer {method} {path}: {what}") from error
        record_span(self.name, f"{method} {path}", began)
        status, text = response.status_code, response.text
        if status in _TEMPORARY:
            raise RefusedForNow(f"{self.name} answered {method} {path} with status {status}: {_excerpt(text)}")
        if status != 200:
            raise ServerRefused(f"{self.name} answered {method} {path} with status {status}: {_excerpt(text)}")
        if "content-type" not in response.headers:  # vLLM sends texts without a type
            return text or None
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise ServerRefused(
                f"{self.name} answered {method} {path} with {_excerpt(text)!r}, which is not JSON"
            ) from error

    async def is_healthy(self) -> bool:
        """Return whether the server reports that it can take requests."""
        try:
            await self.call("GET", self._health_path, None, _SECONDS_OF_HEALTH)
        except (ServerDied, ServerRefused):
            return False
        return True

    async def close(self) -> None:
        await self._http.aclose()


def _excerpt(text: str) -> str:
    """Return the error message in a server's answer, or else the answer, cut to `_LONGEST_EXCERPT` characters."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    text = body if isinstance(body, str) else json.dumps(body)
    return text if len(text) <= _LONGEST_EXCERPT else text[:_LONGEST_EXCERPT] + "…"
