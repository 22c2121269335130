"""`Router`: gives each request a server, and limits the requests and tokens that each server has in flight."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

# A group moves to another server that has fewer requests in flight by more than this number: recomputing a prompt costs
# less than waiting for that many requests.
_MOST_AHEAD = 16
_REMEMBERED_GROUPS = 4096


@dataclass
class Load:
    """The requests and tokens that one server has in flight, and their limits."""

    max_requests: int
    max_tokens: int | None = None  # of prompts and completions together; None if there is no limit
    requests: int = 0
    tokens: int = 0

    def can_take(self, tokens: int) -> bool:
        """Return whether the server may get a request of this size now. An idle server takes any request."""
        if self.requests == 0:
            return True
        fits = self.max_tokens is None or self.tokens + tokens <= self.max_tokens
        return fits and self.requests < self.max_requests


class Router:
    """An object that chooses the least loaded server, but sends a group's requests to one that has cached their prefix.

    It belongs to one asyncio loop. Requests that no server can take wait in a queue.
    """

    def __init__(self, loads: Sequence[Load]):
        """Start with idle servers; `loads` has one entry for each."""
        self.loads = list(loads)
        self._server_by_group: OrderedDict[Hashable, int] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def assign(self, group: Hashable, tokens: int) -> AsyncIterator[int]:
        """Yield the number of the server for a request, once a server can take it.

        Requests with a common prefix have the same `group`. `tokens` counts the prompt and the longest possible
        completion.
        """
        index = None if self._waiting else self._choose(group, tokens)
        if index is None:
            await self._wait_for_turn()
            while (index := self._choose(group, tokens)) is None:
                await self._wait_for_turn(at_front=True)
        load = self.loads[index]
        load.requests += 1
        load.tokens += tokens
        self._wake_next()  # another request may fit as well
        try:
            yield index
        finally:
            load.requests -= 1
            load.tokens -= tokens
            self._wake_next()

    async def _wait_for_turn(self, at_front: bool = False) -> None:
        """Wait until this request is the first of the queue, and a load may have changed."""
        turn = asyncio.get_running_loop().create_future()
        if at_front:
            self._waiting.appendleft(turn)
        else:
            self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._wake_next()  # the turn passes to the next
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _wake_next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return

    def _choose(self, group: Hashable, tokens: int) -> int | None:
        """Return the server for a request, or None if no server can take it now."""
        able = [index for index, load in enumerate(self.loads) if load.can_take(tokens)]
        if not able:
            return None
        least = min(able, key=lambda number: self.loads[number].requests)
        index = self._server_by_group.get(group)
        if index not in able or self.loads[index].requests - self.loads[least].requests > _MOST_AHEAD:
            index = least
        self._server_by_group[group] = index
        self._server_by_group.move_to_end(group)
        if len(self._server_by_group) > _REMEMBERED_GROUPS:
            self._server_by_group.popitem(last=False)
        return index
