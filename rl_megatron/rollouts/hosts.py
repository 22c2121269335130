"""Processes that hold objects of users' code (environments and tools), and are restarted after they have ended.

They are called on rank 0's asyncio loop. Each runs the module `host_child`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import describe_error
from rl_megatron.rollouts.host_child import LOADING
from rl_megatron.workers.child_process import ChildProcess
from rl_megatron.workers.plain_data import load_plain

_MODULE = "rl_megatron.rollouts.host_child"
_SECONDS_TO_LOAD = 120.0  # for the start of a process, and for the import of a user's module
_SECONDS_BETWEEN_LOOKS = 0.1
_GRACE_SECONDS = 1.0  # a process counts as hung if its event loop has not run for this long beyond all limits
_MESSAGE_BYTES = 1 << 16  # of a message, in addition to its answer
_SECONDS_TO_CLOSE = 10.0
_FUNCTION_OWNER = -1  # the owner of calls of functions


class HostedCallFailed(RuntimeError):
    """A call of users' code failed: it raised, took too long, ended its process, or its answer cannot be used."""


class HostLost(RuntimeError):
    """The process of an object ended, but not because of the object. `by_another_call`: another call was the cause."""

    def __init__(self, message: str, by_another_call: bool = False):
        super().__init__(message)
        self.by_another_call = by_another_call


@dataclass(frozen=True)
class HostLimits:
    """The limits of a process and of the answers of its calls.

    Attributes:
        memory_mb: The memory of a process in MiB; an allocation beyond it raises MemoryError in the call. None for no
            limit.
    """

    memory_mb: float | None = None
    max_answer_bytes: int = 1 << 20


@dataclass
class _Call:
    what: str
    timeout: float
    since: float
    answer: asyncio.Future[tuple[Any, bool]]


class HostProcess:
    """A started process. All its methods run on the asyncio loop that created it.

    Attributes:
        objects: The numbers of the objects that it holds.
    """

    def __init__(self, name: str, limits: HostLimits, python: str | None = None):
        """Start the process, without waiting for it; see `ProcessHosts` for the arguments."""
        self._name, self._loop = name, asyncio.get_running_loop()
        self.objects: set[int] = set()
        self.has_ended, self._cause = False, ""
        self._by_another_call = self._is_ready = False
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._started = self._looked = time.monotonic()
        most_bytes = limits.max_answer_bytes + _MESSAGE_BYTES
        self._process = ChildProcess(_MODULE, python=python, loads=load_plain, most_bytes=most_bytes)
        self._process.prepare(limits.memory_mb)
        self._process.send(limits.max_answer_bytes)
        self._loop.add_reader(self._process.socket, self._receive)
        self._timer = self._loop.call_later(_SECONDS_BETWEEN_LOOKS, self._look)

    @property
    def num_calls(self) -> int:
        """Return the number of calls that are not answered yet."""
        return len(self._calls)

    async def ask(
        self, kind: str, owner: int, *arguments: object, timeout: float, what: str, waits: float | None = None
    ) -> tuple[object, bool]:
        """Return what a call returns, and whether it was async.

        Args:
            kind: "make", "method", "function" or "drop".
            owner: The number of the object; -1 for a function.
            arguments: The arguments of `HostWorker` for this kind.
            timeout: The longest time of the call, in seconds, from when the process begins it.
            what: The call, for messages.
            waits: See `HostedObject.call`.
        """
        if self.has_ended:
            raise self._build_loss()
        number = next(self._numbers)
        self._process.send(kind, number, owner, *arguments, timeout if waits is None else waits)
        call = _Call(what, timeout, time.monotonic(), self._loop.create_future())
        self._calls[number] = call
        self._write()
        return await call.answer

    def end(self, why: str = "it is closed") -> None:
        """Kill the process with its children."""
        self._end(None, why)

    def _write(self) -> None:
        """Send waiting messages, now and whenever the socket accepts more."""
        self._process.flush()
        if self._process.wants_to_write:
            self._loop.add_writer(self._process.socket, self._write)
        else:
            self._loop.remove_writer(self._process.socket)

    def _receive(self) -> None:
        try:
            for message in self._process.receive():
                self._take(*message)
        except Exception as error:  # whatever users' code has written into the socket
            self._end(self._find_marked_call(), f"wrote into the socket of its process: {describe_error(error)}")
            return
        if self._process.has_ended:
            self._end(self._find_marked_call(), None)

    def _take(self, kind: str, *parts: Any) -> None:
        if kind == "ready":
            self._is_ready = True
            return
        call = self._calls.pop(parts[0], None)
        if call is None or call.answer.done():  # the answer is late, or the caller has given up
            return
        if kind == "answer":
            call.answer.set_result((parts[1], parts[2]))
        else:
            call.answer.set_exception(_build_failure(call, parts[1]))

    def _look(self) -> None:
        """Check whether the process has ended or a call takes too long."""
        now = time.monotonic()
        was_delayed = now - self._looked > _GRACE_SECONDS  # this loop was blocked, and may not have read answers
        self._looked = now
        self._process.poll()
        self._receive()
        if self.has_ended:
            return
        self._timer = self._loop.call_later(_SECONDS_BETWEEN_LOOKS, self._look)
        marked = self._process.mark.read()
        # This is read after the mark: if a new call begins in between, `since` is too short, but never too long.
        since = time.monotonic() - self._process.mark.touched
        if marked is not None:
            number, doing = marked
            call = self._calls.get(number)
            limit = _SECONDS_TO_LOAD if doing == LOADING else call.timeout if call is not None else None
            if limit is not None and since > limit:
                loading = " to be imported" if doing == LOADING else ""
                self._end(call, f"took longer than {limit:g} seconds{loading}")
        elif self._calls and not was_delayed:
            oldest = min(call.since for call in self._calls.values())
            longest = max(call.timeout for call in self._calls.values()) + _GRACE_SECONDS
            if not self._is_ready:
                longest = max(longest, _SECONDS_TO_LOAD)
            if min(since, now - oldest) > longest:
                self._end(None, f"did nothing for {longest:g} seconds")

    def _find_marked_call(self) -> _Call | None:
        """Return the call that the process runs, or ran when it ended."""
        marked = self._process.mark.read()
        return None if marked is None else self._calls.get(marked[0])

    def _end(self, guilty: _Call | None, why: str | None) -> None:
        """Kill the process, and let all its calls fail.

        Args:
            guilty: The call that is the cause.
            why: What the guilty call (or the process, if there is none) did; None: the process has ended by itself.
        """
        if self.has_ended:
            return
        self.has_ended = True
        self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._process.socket)
            self._loop.remove_writer(self._process.socket)
        how = self._process.end()
        failure = why or (f"ended its process, which {how}" if guilty is not None else how)
        self._cause = f"it {failure}" if guilty is None else f"another call, {guilty.what}, {failure}"
        self._by_another_call = guilty is not None
        for call in self._calls.values():
            if call.answer.done():
                continue
            if call is guilty:
                call.answer.set_exception(_build_failure(call, failure))
            else:
                call.answer.set_exception(self._build_loss())
        self._calls.clear()

    def _build_loss(self) -> HostLost:
        return HostLost(f"a process for {self._name} ended: {self._cause}", self._by_another_call)


def _build_failure(call: _Call, failure: str) -> HostedCallFailed:
    return HostedCallFailed(f"{call.what} in a worker process {failure}")


class ProcessHosts:
    """Processes that hold objects of users' code. Each starts when it is needed, and again after it has ended.

    Calls of plain methods of the objects of one process run one after another, and calls of async methods at the same
    time. All calls are made on one asyncio loop, whose thread must live as long as the processes.

    Attributes:
        processes: The processes; None instead of one that was not started.
    """

    def __init__(self, count: int, limits: HostLimits, name: str, python: str | None = None):
        """Start no process yet.

        Args:
            count: The most processes.
            limits: The limits of each of them.
            name: Their purpose, for messages.
            python: Their interpreter; None for that of this process.
        """
        self._limits, self._name, self._python = limits, name, python
        self.processes: list[HostProcess | None] = [None] * count
        self._numbers = itertools.count()
        self._async: set[str] = set()  # functions that are known to be async
        self._plain_calls = asyncio.Semaphore(count)  # for other functions: at most one runs per process

    async def make(
        self,
        target: str,
        kwargs: Mapping[str, object],
        timeout: float,
        shown: str | None = None,
        imports: Sequence[str] = (),
    ) -> HostedObject:
        """Create an object in the process with the fewest objects.

        Args:
            target: Its class, as "file.py:Name" or "package.module:Name".
            kwargs: The arguments of the class.
            timeout: The longest time of its creation, in seconds, without the import of its module and of `imports`.
            shown: Its name in messages; None: the target.
            imports: Import strings that the target loads. They are loaded first, without this time limit.
        """
        process = self._choose_process(by_objects=True)
        number, shown = next(self._numbers), shown or target
        hosted = HostedObject(process, number, shown)
        process.objects.add(number)
        try:
            what = f"{shown}()"
            await process.ask("make", number, target, dict(kwargs), list(imports), timeout=timeout, what=what)
        except asyncio.CancelledError:
            await hosted.close()
            raise
        except (HostedCallFailed, HostLost):
            process.objects.discard(number)
            raise
        return hosted

    async def call(self, target: str, kwargs: Mapping[str, object], timeout: float) -> Any:
        """Call the function `target` in the process with the fewest calls, and return its result.

        A function that is not async waits for a process that runs no other such function. `timeout` is in seconds,
        without the import of the function's module.
        """
        if target in self._async:
            return await self._call_function(target, kwargs, timeout)
        async with self._plain_calls:
            return await self._call_function(target, kwargs, timeout)

    def close(self) -> None:
        """End all processes. Call this on the loop, or when the loop has ended."""
        for process in self.processes:
            if process is not None:
                process.end()
        self.processes = [None] * len(self.processes)

    async def _call_function(self, target: str, kwargs: Mapping[str, object], timeout: float) -> object:
        process, what = self._choose_process(by_objects=False), f"{target}()"
        result, is_async = await process.ask(
            "function", _FUNCTION_OWNER, target, dict(kwargs), timeout=timeout, what=what
        )
        if is_async:
            self._async.add(target)
        return result

    def _choose_process(self, by_objects: bool) -> HostProcess:
        """Return the process with the fewest objects, or with the fewest calls; prefer one that already runs."""
        best, least = 0, None
        for index, process in enumerate(self.processes):
            if process is None or process.has_ended:
                load = (0, 0, 1)
            elif by_objects:
                load = (len(process.objects), process.num_calls, 0)
            else:
                load = (process.num_calls, len(process.objects), 0)
            if least is None or load < least:
                best, least = index, load
        chosen = self.processes[best]
        if chosen is None or chosen.has_ended:
            chosen = self.processes[best] = HostProcess(self._name, self._limits, self._python)
        return chosen


class HostedObject:
    """An object of users' code in another process."""

    def __init__(self, process: HostProcess, number: int, shown: str):
        """Use the process in which `ProcessHosts.make` creates the object."""
        self._process, self._number, self._shown = process, number, shown

    async def call(self, method: str, *args: object, timeout: float, waits: float | None = None) -> Any:
        """Return what a method returns.

        Args:
            method: Its name.
            args: Its arguments.
            timeout: The longest time of the call, in seconds. If a plain method takes longer, its process is killed; an
                async method that waits is cancelled.
            waits: The longest time of an async method, including its waits; `timeout` then limits how long it may block
                the process. None: `timeout`.

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
