"""The parent's side: a process that holds objects of users' code, and its calls, in the asyncio loop of rank 0."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

from rl_megatron.config.errors import describe_error
from rl_megatron.rollouts.host_child import LOADING
from rl_megatron.workers.child_process import ChildProcess
from rl_megatron.workers.plain_data import load_plain

_MODULE = "rl_megatron.rollouts.host_child"
_SECONDS_TO_LOAD = 120.0  # of the start of a process, and of the import of a user's module
_SECONDS_BETWEEN_LOOKS = 0.1
_GRACE_SECONDS = 1.0  # a process whose event loop stands still for this time beyond all limits is taken to hang
_MESSAGE_BYTES = 1 << 16  # of a message besides its answer


class HostedCallFailed(RuntimeError):
    """A call of users' code failed: it raised, took too long, ended its process, or its answer cannot be used."""


class HostLost(RuntimeError):
    """The process of an object ended through no fault of the object.

    Attributes:
        by_another_call: Whether another call is known to have ended it.
    """

    def __init__(self, message: str, by_another_call: bool = False):
        super().__init__(message)
        self.by_another_call = by_another_call


@dataclass(frozen=True)
class HostLimits:
    """What a process may use, and what a call may return.

    Attributes:
        memory_mb: The memory of a process in MiB; an allocation beyond it raises MemoryError in the call. None for no
            limit.
        max_answer_bytes: The most bytes that a call returns.
    """

    memory_mb: float | None = None
    max_answer_bytes: int = 1 << 20


@dataclass
class _Call:
    what: str
    timeout: float
    since: float
    answer: asyncio.Future[Any]


class HostProcess:
    """A process that was started, until it ends. All methods run on the loop that made it.

    Attributes:
        objects: The numbers of the objects that it holds.
        has_ended: Whether it cannot be called any more.
    """

    def __init__(self, name: str, limits: HostLimits, python: str | None = None):
        """Start the process, without waiting for it.

        Args:
            name: What it is for, in messages.
            limits: Its limits.
            python: Its interpreter; None for that of this process.
        """
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
        """Return the number of calls that are not answered."""
        return len(self._calls)

    async def ask(
        self, kind: str, owner: int, *arguments: Any, timeout: float, what: str, waits: float | None = None
    ) -> tuple[Any, bool]:
        """Return what a call returns, and whether it was async.

        Args:
            kind: "make", "method", "function" or "drop".
            owner: The number of the object; -1 for a function.
            arguments: What `HostWorker` takes for this kind.
            timeout: The longest time of the call, in seconds. Its clock starts when the call does.
            what: The call, for messages.
            waits: The longest time of an async call that lets others run; None for `timeout`, which is then how long
                it may hold the process.

        Raises:
            HostedCallFailed: The call failed.
            HostLost: The process ended through no fault of the call.
        """
        if self.has_ended:
            raise self._loss()
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
        """Send what is waiting, now and whenever the process takes more."""
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
            self._end(self._marked_call(), f"wrote into the socket of its process: {describe_error(error)}")
            return
        if self._process.has_ended:
            self._end(self._marked_call(), None)

    def _take(self, kind: str, *parts: Any) -> None:
        if kind == "ready":
            self._is_ready = True
            return
        call = self._calls.pop(parts[0], None)
        if call is None or call.answer.done():  # it was too late, or is not waited for
            return
        if kind == "answer":
            call.answer.set_result((parts[1], parts[2]))
        else:
            call.answer.set_exception(_failure(call, parts[1]))

    def _look(self) -> None:
        """Check whether the process has ended, or a call takes too long."""
        now = time.monotonic()
        was_delayed = now - self._looked > _GRACE_SECONDS  # this loop itself was: its answers were not read
        self._looked = now
        self._process.poll()
        self._receive()
        if self.has_ended:
            return
        self._timer = self._loop.call_later(_SECONDS_BETWEEN_LOOKS, self._look)
        marked = self._process.mark.read()
        since = time.monotonic() - self._process.mark.touched  # read behind the call, which may have changed
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

    def _marked_call(self) -> _Call | None:
        """Return the call that the process runs, or ran when it ended."""
        marked = self._process.mark.read()
        return None if marked is None else self._calls.get(marked[0])

    def _end(self, guilty: _Call | None, why: str | None) -> None:
        """Kill the process, and tell every call of it.

        Args:
            guilty: The call that is the cause.
            why: What it did, or what the process did if there is no such call; None: the process has ended by itself.
        """
        if self.has_ended:
            return
        self.has_ended = True
        self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._process.socket)
            self._loop.remove_writer(self._process.socket)
        how = self._process.end()
        said = why or (f"ended its process, which {how}" if guilty is not None else how)
        self._cause = f"it {said}" if guilty is None else f"another call, {guilty.what}, {said}"
        self._by_another_call = guilty is not None
        for call in self._calls.values():
            if call.answer.done():
                continue
            if call is guilty:
                call.answer.set_exception(_failure(call, said))
            else:
                call.answer.set_exception(self._loss())
        self._calls.clear()

    def _loss(self) -> HostLost:
        return HostLost(f"a process for {self._name} ended: {self._cause}", self._by_another_call)


def _failure(call: _Call, said: str) -> HostedCallFailed:
    return HostedCallFailed(f"{call.what} in a worker process {said}")
