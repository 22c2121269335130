"""Limits of the number and the idle time of the gateway's connections, which clients open without a key."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

KEY_ACCEPTED = "rl_megatron.key_accepted"  # in a request's ASGI scope: whether its API key is that of a session
SECONDS_TO_ASK = 10.0  # for the header of a request, and then again for its body


def limit_connections(most: Callable[[], int]) -> type[H11Protocol]:
    """Return uvicorn's protocol for at most `most()` connections.

    If a client opens one more, the connection that has been idle longest is closed, among those whose last request had
    no accepted key. If no connection can be replaced so, the new one is closed.
    """

    class Limited(H11Protocol):
        _closing: asyncio.TimerHandle | None = None
        _waits_for: type[h11.IDLE] | type[h11.SEND_BODY] | None = None  # the state that the timer limits
        _without_request_since = 0.0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._without_request_since = self.loop.time()
            if len(self.connections) > most():
                (self._find_longest_silent() or self).transport.abort()
            if not transport.is_closing():
                self._limit_silence()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._limit_silence()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _limit_silence(self) -> None:
            """Close the connection if the header or the body of a request takes longer than `SECONDS_TO_ASK`."""
            state = self.conn.their_state
            if state is self._waits_for:
                return
            self._cancel()
            if state in (h11.IDLE, h11.SEND_BODY):
                self._waits_for = state
                self._closing = self.loop.call_later(SECONDS_TO_ASK, self.transport.abort)

        def on_response_complete(self) -> None:
            self._without_request_since = self.loop.time()
            super().on_response_complete()

        def _find_longest_silent(self) -> Limited | None:
            """Return the replaceable connection without unread bytes that has been idle longest, or None."""
            silent = {
                connection.transport.get_extra_info("socket").fileno(): connection
                for connection in self.connections
                if isinstance(connection, Limited)
                and connection._may_be_replaced()
                and not connection.transport.is_closing()
            }
            poll = select.poll()
            for number in silent:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(0):
                del silent[number]
            return min(silent.values(), key=lambda connection: connection._without_request_since, default=None)

        def _may_be_replaced(self) -> bool:
            return self.cycle is None or (self.cycle.response_complete and not self.cycle.scope.get(KEY_ACCEPTED))

        def _cancel(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
            self._closing = self._waits_for = None

    return Limited
