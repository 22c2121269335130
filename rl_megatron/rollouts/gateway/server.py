"""`Gateway`: the sessions of all running trajectories, and the HTTP server for their agents."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rl_megatron.config.environments import AgentConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.gateway.session import Session, SessionClient
from rl_megatron.rollouts.gateway.tool_calls import choose_parser
from rl_megatron.rollouts.tools.calls import Parser

_SECONDS_TO_END = 3.0
_CONNECTIONS_OF_A_SESSION, _FURTHER_CONNECTIONS = 4, 16
_BACKLOG = 64  # connections that are accepted at once, before those over the limit are closed
_QUEUE = 1024  # connections that may wait to be accepted; beyond them, clients try again after a second
_SWITCH_SECONDS = 0.001  # a thread that reads a long request lets the loop run after this time; 0.005 by default
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # how agents on this machine reach these hosts


class Gateway:
    """The HTTP server on the asyncio loop of rollout workers. It starts with the first session."""

    def __init__(self, settings: AgentConfig, stops_at_strings: bool = True):
        """Start nothing. `stops_at_strings` tells whether the rollout engine supports stop strings."""
        self._settings, self._stops_at_strings = settings, stops_at_strings
        self._sessions: dict[str, Session] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""
        self._switch_seconds = sys.getswitchinterval()

    @asynccontextmanager
    async def session(
        self, client: SessionClient, sampling: Sampling, parser: Parser | None = None
    ) -> AsyncIterator[Session]:
        """Open a session for the block of an `async with` statement. Its key is not accepted afterwards.

        Args:
            client: The client that completes tokens.
            sampling: The values of sampling parameters that a request does not set.
            parser: The parser of tool calls; None: the one that `rollout.agent.tool_format` names.

        Raises:
            ConfigError: The extra `gateway` is not installed, or the server cannot listen.
        """
        if self._serving is None:
            self._start()
        key = secrets.token_urlsafe(32)
        chat = client.prompt.chat()
        parser = parser or choose_parser(self._settings.tool_format, None if chat is None else chat[0])
        session = Session(f"{self._url}/v1", key, client, sampling, parser, self._stops_at_strings)
        self._sessions[key] = session
        try:
            yield session
        finally:
            del self._sessions[key]
            await session.end()

    async def close(self) -> None:
        if self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._serving}, timeout=_SECONDS_TO_END)
        if not done:
            self._serving.cancel()
        self._serving = None
        sys.setswitchinterval(self._switch_seconds)

    def _start(self) -> None:
        try:
            import uvicorn

            from rl_megatron.rollouts.gateway.application import build_application
            from rl_megatron.rollouts.gateway.connections import limit_connections
        except ImportError as error:
            raise ConfigError(
                f"the gateway needs the Python package {error.name}, which is not installed; "
                "pip install 'rl_megatron[gateway]'"
            ) from error
        listening = self._listen()
        options = uvicorn.Config(
            build_application(self._sessions.get), log_config=None, access_log=False, lifespan="off", ws="none",
            http=limit_connections(lambda: _FURTHER_CONNECTIONS + _CONNECTIONS_OF_A_SESSION * len(self._sessions)),
            backlog=_BACKLOG, proxy_headers=False, server_header=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(options)
        sys.setswitchinterval(min(_SWITCH_SECONDS, self._switch_seconds))
        self._serving = asyncio.get_running_loop().create_task(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        serving = asyncio.create_task(self._server.serve([listening]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0)
        listening.listen(_QUEUE)  # asyncio has set the queue to the backlog
        await serving

    def _listen(self) -> socket.socket:
        """Return the socket, which accepts connections from now on."""
        host, port = self._settings.host, self._settings.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            # asyncio sets this only for sockets that name their protocol. Without it, an answer's body waits 40 ms for
            # the client's acknowledgement of the header.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(
                f"the gateway cannot listen at rollout.agent.host={host}, rollout.agent.port={port}: {error}; set "
                "port=0 for a free one"
            ) from error
        address = _EVERYWHERE.get(host, host)
        self._url = f"http://{f'[{address}]' if ':' in address else address}:{listening.getsockname()[1]}"
        return listening
