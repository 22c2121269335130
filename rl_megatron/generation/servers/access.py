"""`TokenRequired`: lets a server answer only requests that carry the token of the run which started it.

This module runs in the server's process, whose environment may lack this package's dependencies.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN = "RL_MEGATRON_SERVER_TOKEN"  # the variable of servers, and of a run that uses running servers
_OPEN = ("/health",)  # paths that need no token: they report only whether the server is ready
_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]]


def make_headers(token: str) -> dict[str, str]:
    """Return the headers of a request that carries a token; none if the token is empty."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class TokenRequired:
    """ASGI middleware that answers 401 to a request without the token of the environment variable `TOKEN`."""

    def __init__(self, app: _App):
        """Wrap an application. The variable must be set."""
        self._app, self._expected = app, make_headers(os.environ[TOKEN])["Authorization"].encode()

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in _OPEN or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = {"error": f"this server answers only requests with the token of its run, the value of {TOKEN}"}
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    def _is_allowed(self, scope: _Message) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(header, self._expected)
