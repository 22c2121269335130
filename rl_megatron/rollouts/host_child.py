"""The child process of `hosts`: it runs the calls of users' code that it gets over a socket.

Users' code may do anything: raise, print, wait, hang, or end the process. Every call is marked in shared memory while
it runs, so that the parent process knows which call was running if the process ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError, describe_with_place
from rl_megatron.config.loading.import_strings import load_object
from rl_megatron.rollouts.user_calls import call_user_code
from rl_megatron.workers.calls import BusyTime, CallMark, TimedCall, finish_within
from rl_megatron.workers.child import serve_user_code
from rl_megatron.workers.frames import read_frame, write_frame
from rl_megatron.workers.plain_data import BadAnswer, dump_plain, to_plain

LOADING, RUNNING = 0, 1  # whether a call imports the user's module, or runs the user's code
_SECONDS_BETWEEN_TOUCHES = 0.1  # if nothing blocks the event loop
_LONGEST_MESSAGE = 4000  # characters of an error


class HostWorker:
    """The objects of one process, its event loop, and its end of the socket.

    Calls of plain methods run one after another. Those of async methods run at the same time.
    """

    def __init__(self, connection: socket.socket, mark: CallMark):
        self._connection, self._mark = connection, mark
        self._loop = asyncio.new_event_loop()
        self._objects: dict[int, object] = {}
        self._calls: dict[int, set[asyncio.Task[None]]] = {}  # those of each object; -1: of functions
        self._touching: asyncio.Task[None] | None = None
        self._busy, self._most_bytes = BusyTime(), 0

    def serve(self) -> None:
        """Answer messages until the other end closes the socket, which ends this process."""
        (self._most_bytes,) = read_frame(self._connection)
        self._send("ready")
        self._loop.add_reader(self._connection, self._receive)
        self._loop.run_forever()

    def _receive(self) -> None:
        message = read_frame(self._connection)
        if message is None:
            os._exit(0)  # do not wait for threads of the user's code
        kind, number, owner, *arguments, timeout = message
        work = {
            "make": self._load_class,
            "method": self._find_method,
            "function": self._load_function,
            "drop": self._drop,
        }[kind]
        calls = self._calls.setdefault(owner, set())
        if kind == "drop":
            for call in calls:
                call.cancel()
        task = self._loop.create_task(self._call(number, timeout, lambda: work(number, owner, *arguments)))
        calls.add(task)
        task.add_done_callback(functools.partial(self._forget, number, owner))
        if self._touching is None:
            self._touching = self._loop.create_task(self._touch())

    def _forget(self, number: int, owner: int, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # its object is dropped
            self._send("failed", number, "was cancelled")
        self._calls[owner].discard(task)
        if not self._calls[owner]:
            del self._calls[owner]

    async def _touch(self) -> None:
        """Mark the time repeatedly while there are calls, to show that the loop runs."""
        while self._calls:
            self._mark.touch()
            await asyncio.sleep(_SECONDS_BETWEEN_TOUCHES)
        self._touching = None

    async def _call(self, number: int, timeout: float, work: Callable[[], Callable[[], Any]]) -> None:
        """Run a call, and send its answer or its failure."""
        try:
            with self._mark.mark_call(number, LOADING):
                call = work()
        except BaseException as error:  # also SystemExit, with which a module would end this process
            self._send("failed", number, _describe(error))
            return
        timed = TimedCall(self._mark, self._busy, (number, RUNNING), self._answer(number, call))
        if await finish_within(timed, timeout) is None:
            self._send("failed", number, f"took longer than {timeout:g} seconds")

    async def _answer(self, number: int, call: Callable[[], object]) -> None:
        """Call the user's code, and send its result. The call stays marked until then: its code may close the socket.

        A result is also sent after the time limit; the parent process ignores it.
        """
        try:
            result, is_async = await call_user_code(call)
            payload = dump_plain(("answer", number, to_plain(result), is_async))
            if len(payload) > self._most_bytes:
                raise BadAnswer(f"returned {len(payload)} bytes, but may return at most {self._most_bytes}")
        except GeneratorExit:  # this coroutine is closed
            raise
        except BaseException as error:  # also SystemExit and asyncio.CancelledError, which would end the loop
            self._send("failed", number, _describe(error))
        else:
            self._write(payload)

    def _load_class(
        self, number: int, owner: int, target: str, kwargs: Mapping[str, object], imports: list[str]
    ) -> Callable[[], Any]:
        for import_string in imports:
            load_object(import_string, import_string)
        function = load_object(target, target)

        async def make() -> None:
            self._objects[owner], _ = await call_user_code(function, **kwargs)

        return make

    def _find_method(self, number: int, owner: int, name: str, arguments: tuple[object, ...]) -> Callable[[], Any]:
        return functools.partial(getattr(self._objects[owner], name), *arguments)

    def _load_function(self, number: int, owner: int, target: str, kwargs: Mapping[str, object]) -> Callable[[], Any]:
        return functools.partial(load_object(target, target), **kwargs)

    def _drop(self, number: int, owner: int) -> Callable[[], Any]:
        dropped = self._objects.pop(owner, None)  # None: it could not be created
        return getattr(dropped, "close", lambda: None)

    def _send(self, *message: object) -> None:
        self._mark.end_forked_child()
        self._write(dump_plain(message))

    def _write(self, payload: bytes) -> None:
        self._mark.end_forked_child()
        try:
            write_frame(self._connection, payload)
        except OSError:  # the other end is gone, or the user's code closed the socket
            os._exit(1)


def _describe(error: BaseException) -> str:
    message = str(error) if isinstance(error, BadAnswer | ConfigError) else f"raised {describe_with_place(error)}"
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} …"


def main(arguments: list[str]) -> None:
    """Serve the parent process, a `ChildProcess`."""
    serve_user_code(arguments, lambda connection, mark: HostWorker(connection, mark).serve())


if __name__ == "__main__":
    main(sys.argv[1:])
