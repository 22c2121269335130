"""`RankZeroLoop`: an asyncio event loop on rank 0 that returns the results of coroutines on every rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from rl_megatron.config.errors import describe_error
from rl_megatron.topology.ranks import Ranks

_T = TypeVar("_T")
_SECONDS_TO_END = 5.0
_TICK_SECONDS = 0.2


class RankZeroLoop:
    """An asyncio event loop that runs in a daemon thread of rank 0. Other ranks have no loop."""

    def __init__(self, ranks: Ranks, collective_timeout: float, name: str, foreseen: tuple[type[Exception], ...]):
        """Start the thread.

        Args:
            ranks: The policy's ranks.
            collective_timeout: Seconds after which a collective fails. Rank 0 answers the waiting ranks before that.
            name: The purpose of the loop, for messages.
            foreseen: Errors that every rank raises as they are; others become RuntimeError.
        """
        self._ranks, self._longest_silence, self._name = ranks, collective_timeout / 4, name
        self._foreseen = foreseen
        self._loop: asyncio.AbstractEventLoop | None = None
        if ranks.leads:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
            self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop. It exists on rank 0 until `close`."""
        if self._loop is None:
            raise RuntimeError(f"the loop for {self._name} runs on rank 0 of the policy only, until it is closed")
        return self._loop

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on rank 0's loop, and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on rank 0's loop, and return its result on rank 0. Do not call it from the loop's thread."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # it has no effect on a future that is done

    def run_for_all_ranks(
        self, work: Callable[[], Coroutine[Any, Any, _T]], tick: Callable[[], None] | None = None
    ) -> _T:
        """Run a coroutine on rank 0's loop, and return its result, or raise its exception, on every rank.

        Collective. Only rank 0 calls `work`. It also calls `tick` a few times per second until the coroutine ends.
        """
        future = self.start(work()) if self._ranks.leads else None
        try:
            results = ()
            while not results:
                results = self._ranks.share(lambda: self._wait_a_while(future, tick), (*self._foreseen, RuntimeError))
            return results[0]
        finally:
            if future is not None:
                future.cancel()

    def _wait_a_while(self, future: Future[_T] | None, tick: Callable[[], None] | None) -> tuple[_T, ...]:
        """Return (the result,) of a coroutine on rank 0, or () if it takes longer than other ranks may wait."""
        assert future is not None  # only rank 0 calls it
        until = time.monotonic() + self._longest_silence
        while time.monotonic() < until:
            try:
                return (future.result(_TICK_SECONDS),)
            except concurrent.futures.TimeoutError:
                if future.done() and isinstance(future.exception(), TimeoutError):
                    raise RuntimeError(f"{self._name}: the coroutine raised TimeoutError without a message") from None
                if not self._thread.is_alive():
                    raise RuntimeError(f"the loop for {self._name} has ended") from None
                if tick is not None:
                    tick()
            except self._foreseen:
                raise
            except Exception as error:  # a bug in this package must end the run on every rank
                raise RuntimeError(describe_error(error)) from error
        return ()

    def close(self) -> None:
        """End the running coroutines, and the thread."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(_SECONDS_TO_END)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_SECONDS_TO_END)


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
