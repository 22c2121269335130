"""Start processes that hold objects of users' code, environments and tools, and others after one has ended.

The asyncio loop of rank 0 calls them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.rollouts.host_process import HostedCallFailed, HostLimits, HostLost, HostProcess

__all__ = ["HostLimits", "HostLost", "HostedCallFailed", "HostedObject", "ProcessHosts"]

_SECONDS_TO_CLOSE = 10.0
_OF_FUNCTIONS = -1  # the owner of calls of functions


class ProcessHosts:
    """Processes that hold objects of users' code. Each is started when it is needed, and again after it has ended.

    Calls of plain methods of the objects of one process run one after another, and calls of async methods at the same
    time. All calls are made on one asyncio loop, whose thread must live as long as the processes.

    Attributes:
        processes: The processes; None in the place of one that was not started.
    """

    def __init__(self, count: int, limits: HostLimits, name: str, python: str | None = None):
        """Start no process yet.

        Args:
            count: The most processes.
            limits: The limits of each of them, and of its answers.
            name: What they are for, in messages.
            python: Their interpreter; None for that of this process.
        """
        self._limits, self._name, self._python = limits, name, python
        self.processes: list[HostProcess | None] = [None] * count
        self._numbers = itertools.count()
        self._async: set[str] = set()  # functions that are known to be async
        self._places = asyncio.Semaphore(count)  # for other functions: each has a process without another of them

    async def make(
        self,
        target: str,
        kwargs: Mapping[str, Any],
        timeout: float,
        shown: str | None = None,
        imports: Sequence[str] = (),
    ) -> HostedObject:
        """Return an object that is made in the process with the fewest objects.

        Args:
            target: Its class, as "file.py:Name" or "package.module:Name".
            kwargs: The arguments of the class.
            timeout: The longest time of making it, in seconds, without the import of its module and of `imports`.
            shown: Its name in messages; None: the target.
            imports: Import strings that are loaded before, because the target loads them.

        Raises:
            HostedCallFailed: The class cannot be loaded or raised an error, or the time was not enough.
            HostLost: The process ended through no fault of the object.
        """
        process = self._process(by_objects=True)
        number, shown = next(self._numbers), shown or target
        made = HostedObject(process, number, shown)
        process.objects.add(number)
        try:
            what = f"{shown}()"
            await process.ask("make", number, target, dict(kwargs), list(imports), timeout=timeout, what=what)
        except asyncio.CancelledError:
            await made.close()
            raise
        except (HostedCallFailed, HostLost):
            process.objects.discard(number)
            raise
        return made

    async def call(self, target: str, kwargs: Mapping[str, Any], timeout: float) -> Any:
        """Return what a function returns that is called in a process with the fewest calls.

        A function that is not async waits until no other one runs in a process.

        Args:
            target: The function, as "file.py:name" or "package.module:name".
            kwargs: Its arguments.
            timeout: The longest time of the call, in seconds, without the import of its module.

        Raises:
            HostedCallFailed: The function cannot be loaded or raised an error, or the time was not enough, or its
                answer cannot be sent.
            HostLost: The process ended through no fault of the function.
        """
        if target in self._async:
            return await self._call(target, kwargs, timeout)
        async with self._places:
            return await self._call(target, kwargs, timeout)

    def close(self) -> None:
        """End all processes. Call it on the loop, or when the loop has ended."""
        for process in self.processes:
            if process is not None:
                process.end()
        self.processes = [None] * len(self.processes)

    async def _call(self, target: str, kwargs: Mapping[str, Any], timeout: float) -> Any:
        process, what = self._process(by_objects=False), f"{target}()"
        result, is_async = await process.ask(
            "function", _OF_FUNCTIONS, target, dict(kwargs), timeout=timeout, what=what
        )
        if is_async:
            self._async.add(target)
        return result

    def _process(self, by_objects: bool) -> HostProcess:
        """Return the process with the fewest objects, or with the fewest calls; one that runs, of several."""
        best, least = 0, None
        for place, process in enumerate(self.processes):
            if process is None or process.has_ended:
                load = (0, 0, 1)
            elif by_objects:
                load = (len(process.objects), process.num_calls, 0)
            else:
                load = (process.num_calls, len(process.objects), 0)
            if least is None or load < least:
                best, least = place, load
        found = self.processes[best]
        if found is None or found.has_ended:
            found = self.processes[best] = HostProcess(self._name, self._limits, self._python)
        return found


class HostedObject:
    """An object of users' code in another process."""

    def __init__(self, process: HostProcess, number: int, shown: str):
        """Keep where it is; `ProcessHosts.make` makes it there."""
        self._process, self._number, self._shown = process, number, shown

    async def call(self, method: str, *args: Any, timeout: float, waits: float | None = None) -> Any:
        """Return what a method returns.

        Args:
            method: Its name.
            args: Its arguments.
            timeout: The longest time of the call, in seconds. A plain method that takes longer ends its process, and an
                async one that waits is cancelled.
            waits: The longest time of an async method that lets others run; None for `timeout`.

        Raises:
            HostedCallFailed: The method raised an error, took longer, or its answer cannot be sent.
            HostLost: The process ended through no fault of this object.
        """
        what = f"{self._shown}.{method}()"
        result, _ = await self._process.ask(
            "method", self._number, method, args, timeout=timeout, what=what, waits=waits
        )
        return result

    async def close(self) -> None:
        """Call the object's own method `close`, if it has one, and forget the object. A failure is logged."""
        what = f"{self._shown}.close()"
        try:
            await self._process.ask("drop", self._number, timeout=_SECONDS_TO_CLOSE, what=what)
        except HostedCallFailed as error:
            log.LOGGER.warning("%s", error)
        except HostLost:
            pass  # the object is gone with its process
        finally:
            self._process.objects.discard(self._number)
