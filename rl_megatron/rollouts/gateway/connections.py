"""Limits of the gateway's connections, which need no key: how many there are, and how long one may say nothing."""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_TO_ASK = 10.0  # until the header of a request is complete


def limit_connections(most: Callable[[], int]) -> type[H11Protocol]:
    """Return uvicorn's protocol for at most `most()` connections.

    A further one takes the place of the one that has said nothing for the longest time since it was to send the header
    of a request; if there is no such one, it is closed.
    """

    class Limited(H11Protocol):
        _closing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most():
                (self._longest_silent() or self).transport.abort()
            if not transport.is_closing():
                self._limit_silence()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._limit_silence()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _limit_silence(self) -> None:
            """Close the connection later if it still waits for a header by then, however many bytes of it come."""
            waits = self.conn.their_state is h11.IDLE
            if waits and self._closing is None:
                self._closing = self.loop.call_later(SECONDS_TO_ASK, self.transport.abort)
            elif not waits:
                self._cancel()

        def _longest_silent(self) -> Limited | None:
            """Return the connection whose silence ends next, among those of which no byte waits to be read."""
            silent = {
                each.transport.get_extra_info("socket").fileno(): each
                for each in self.connections
                if isinstance(each, Limited) and each._closing is not None and not each.transport.is_closing()
            }
            asked = select.poll()
            for number in silent:
                asked.register(number, select.POLLIN)
            for number, _ in asked.poll(0):
                del silent[number]
            return min(silent.values(), key=Limited._closes_at, default=None)

        def _closes_at(self) -> float:
            return math.inf if self._closing is None else self._closing.when()

        def _cancel(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None

    return Limited
