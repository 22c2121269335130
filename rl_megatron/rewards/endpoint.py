"""`Endpoint`: JSON requests to a server that may be busy or slow. Requests that fail temporarily are sent again."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import httpx2

from rl_megatron import log

_MAY_PASS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # statuses of temporary failures
_REFUSES_KEY = (401, 403)
_LONGEST_EXCERPT = 300  # characters of a server's answer in a message
T = TypeVar("T")


class EndpointFailed(RuntimeError):
    """The error if an endpoint refuses a request, or gives no usable answer; the message names the endpoint."""


class BadReply(ValueError):
    """The error if an answer does not have the protocol's form; the message completes "its answer …"."""


@dataclass(frozen=True)
class _FailedAttempt:
    """A failed attempt after which another one may succeed.

    Attributes:
        is_late: Whether the attempt timed out.
        wait_seconds: How long the server asks the client to wait, or 0.
    """

    message: str
    is_late: bool = False
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Endpoint:
    """A URL that accepts JSON by POST, and its connections, which are opened by the first request.

    Attributes:
        url: The full URL of the requests.
        api_key_env: The environment variable with the key that is sent as `Authorization: Bearer`. None: no key.
        request_seconds: How long one attempt may take.
        retries: The number of attempts after the first.
        backoff_seconds: The wait before the first retry. It doubles for each further one. A random part, up to half, is
            subtracted, so that requests that failed together are not repeated together.
        longest_wait_seconds: The longest wait, even if the server's header `Retry-After` asks for a longer one.
    """

    url: str
    api_key_env: str | None = None
    request_seconds: float = 30.0
    retries: int = 5
    backoff_seconds: float = 0.5
    longest_wait_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Check the settings, and that the environment variable is set; nothing is sent."""
        try:
            parts = httpx2.URL(self.url)
        except (httpx2.InvalidURL, TypeError) as error:
            raise ValueError(f"url={self.url!r} is not an address: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ValueError(f"url={log.redact(self.url)!r} must be an address such as http://127.0.0.1:8000/v1")
        if parts.userinfo:
            raise ValueError("url has a user or a password, which would be logged; set api_key_env instead")
        for name in ("request_seconds", "longest_wait_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be more than 0")
        for name in ("retries", "backoff_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        self._key  # noqa: B018  # a missing variable is found before the first step

    async def post(self, body: Mapping[str, object], read: Callable[[Any], T]) -> tuple[T, int]:
        """Send a request until it is answered; return the result of `read`, and the number of attempts.

        Args:
            body: The request.
            read: The function that gets the decoded JSON of the answer; it raises BadReply if the form is wrong.

        Raises:
            EndpointFailed: The endpoint refused the request, or no attempt gave a usable answer.
            TimeoutError: The last attempt timed out.
        """
        failed = None
        for attempt in range(self.retries + 1):
            if failed is not None:
                wait = self.backoff_seconds * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                await asyncio.sleep(min(max(wait, failed.wait_seconds), self.longest_wait_seconds))
            answer = await self._attempt(body, read)
            if not isinstance(answer, _FailedAttempt):
                return answer, attempt + 1
            failed = answer
        assert failed is not None  # there is at least one attempt
        error_class = TimeoutError if failed.is_late else EndpointFailed
        raise error_class(f"{failed.message}, in the last of {self.retries + 1} attempts")

    async def _attempt(self, body: Mapping[str, object], read: Callable[[Any], T]) -> T | _FailedAttempt:
        try:
            async with asyncio.timeout(self.request_seconds):
                response = await self._client.post(self.url, json=body)
        except (TimeoutError, httpx2.TimeoutException):
            return _FailedAttempt(
                f"{self._address} did not answer within {self.request_seconds:g} seconds", is_late=True
            )
        except httpx2.RequestError as error:
            return _FailedAttempt(f"{self._address} cannot be reached: {str(error) or type(error).__name__}")
        status = f"{self._address} answered with status {response.status_code}: {self._excerpt(response)}"
        if response.status_code in _MAY_PASS:
            return _FailedAttempt(status, wait_seconds=_read_retry_after(response.headers.get("retry-after")))
        if response.status_code in _REFUSES_KEY:
            raise EndpointFailed(f"{status}; set api_key_env to the name of the variable with its key")
        if response.status_code != 200:
            raise EndpointFailed(status)
        try:
            return read(response.json())
        except BadReply as error:
            return _FailedAttempt(f"{self._address}: its answer {self._hide_key(str(error))}")
        except ValueError:  # invalid JSON or invalid UTF-8
            return _FailedAttempt(f"{self._address}: its answer is not JSON: {self._excerpt(response)}")

    def _excerpt(self, response: httpx2.Response) -> str:
        """Return the beginning of an answer, without the key, which some servers repeat."""
        text = " ".join(self._hide_key(response.text).split())
        return repr(text if len(text) <= _LONGEST_EXCERPT else text[:_LONGEST_EXCERPT] + "…")

    def _hide_key(self, text: str) -> str:
        return log.redact(text.replace(self._key, log.REDACTED) if self._key else text)

    @cached_property
    def _address(self) -> str:
        """Return the URL for messages, without its query, which may contain a key."""
        return self.url.partition("?")[0]

    @cached_property
    def _key(self) -> str:
        """Return the key, or "" if none is sent."""
        if self.api_key_env is None:
            return ""
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(f"api_key_env={self.api_key_env}: the variable is not set; export it with the key")
        if not key.isascii() or not key.isprintable():
            raise ValueError(f"api_key_env={self.api_key_env}: the variable's text is not printable ASCII")
        return key

    @cached_property
    def _client(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)  # `_attempt` limits the whole time


def _read_retry_after(header: str | None) -> float:
    """Return the seconds of a header `Retry-After`, or 0 if it is absent or a date."""
    try:
        return max(float(header or 0), 0.0)
    except ValueError:
        return 0.0
