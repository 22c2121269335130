"""`Router`: gives each request a server, and lets no server have more requests or tokens in flight than it may."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

# A group leaves its server if that has so many more requests in flight than another: recomputing a prompt costs less
# than to wait for that many.
_MOST_AHEAD = 16
_REMEMBERED_GROUPS = 4096


@dataclass
class Load:
    """The requests that one server has in flight, and how many it may have.

    Attributes:
        max_requests: The most requests.
        max_tokens: The most tokens of prompts and completions together; None if there is no limit.
    """

    max_requests: int
    max_tokens: int | None = None
    requests: int = 0
    tokens: int = 0

    def takes(self, tokens: int) -> bool:
        """Return whether the server may get a request of so many tokens now. An idle server takes any request."""
        if self.requests == 0:
            return True
        fits = self.max_tokens is None or self.tokens + tokens <= self.max_tokens
        return fits and self.requests < self.max_requests


class Router:
    """Chooses the least loaded server. Requests of one group go to one server, which keeps their prefix.

    It belongs to one asyncio loop. Requests that no server can take wait, and get their turn in order.
    """

    def __init__(self, loads: Sequence[Load]):
        """Start with idle servers; `loads` has one entry for each."""
        self.loads = list(loads)
        self._server_of: OrderedDict[Hashable, int] = OrderedDict()
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def place(self, group: Hashable, tokens: int) -> AsyncIterator[int]:
        """Yield the number of the server for a request, once a server can take it.

        Args:
            group: What requests with a common prefix share.
            tokens: The tokens of the prompt and of the longest completion.
        """
        index = None if self._waiting else self._choose(group, tokens)
        if index is None:
            await self._turn()
            while (index := self._choose(group, tokens)) is None:
                await self._turn(again=True)
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

    async def _turn(self, again: bool = False) -> None:
        """Wait until this request is the first of the queue, and something may have changed.

        Args:
            again: Whether it was the first already.
        """
        mine = asyncio.get_running_loop().create_future()
        if again:
            self._waiting.appendleft(mine)
        else:
            self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._wake_next()  # the turn passes to the next
            raise
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)

    def _wake_next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                return

    def _choose(self, group: Hashable, tokens: int) -> int | None:
        """Return the server for a request, or None if none takes it now."""
        able = [index for index, load in enumerate(self.loads) if load.takes(tokens)]
        if not able:
            return None
        least = min(able, key=lambda index: self.loads[index].requests)
        kept = self._server_of.get(group)
        if kept not in able or self.loads[kept].requests - self.loads[least].requests > _MOST_AHEAD:
            kept = least
        self._server_of[group] = kept
        self._server_of.move_to_end(group)
        if len(self._server_of) > _REMEMBERED_GROUPS:
            self._server_of.popitem(last=False)
        return kept
