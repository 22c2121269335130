"""`EngineRequests`: single requests to engine processes, on the policy's rank 0."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from rl_megatron.generation.interfaces import Completion, EngineFailed, EngineLost, Request


class EngineRequests:
    """The requests that engine processes have. It owns their futures, and hears the answers in threads of its own.

    Any thread may call its methods. It ends with the connections: requests without an answer then fail.

    Attributes:
        has_lost_a_process: Whether a process has ended.
    """

    def __init__(self, connections: Sequence[Connection], names: Sequence[str]):
        """Start to listen.

        Args:
            connections: The connections to the processes' `PendingRequests`.
            names: What messages call the processes.
        """
        self._connections, self._names = list(connections), list(names)
        self._lock = threading.Lock()
        self.has_lost_a_process = False
        self._futures: dict[str, tuple[int, Future[Completion]]] = {}  # with the number of the process
        for index in range(len(self._connections)):
            thread = threading.Thread(
                target=self._listen, args=(index,), name=f"answers of {names[index]}", daemon=True
            )
            thread.start()

    def put(self, request: Request) -> Future[Completion]:
        """Send a request to the process that has the fewest, and return the future of its completion.

        Raises:
            ValueError: Another request without a completion has this id.
            EngineLost: The process has ended.
        """
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # a request ends by `abort`, and not by cancelling its future
        with self._lock:
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} belongs to a request that has no completion yet")
            load = [0] * len(self._connections)
            for index, _ in self._futures.values():
                load[index] += 1
            index = load.index(min(load))
            self._futures[request.request_id] = index, future
            try:
                self._connections[index].send(("add", (request,)))
            except OSError as error:
                del self._futures[request.request_id]
                raise EngineLost(f"{self._names[index]} has ended") from error
        return future

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of every process's `PendingRequests`, which has no result.

        Raises:
            EngineLost: A process has ended.
        """
        with self._lock:
            for connection, name in zip(self._connections, self._names, strict=True):
                try:
                    connection.send((method, arguments))
                except OSError as error:
                    raise EngineLost(f"{name} has ended") from error

    def _listen(self, index: int) -> None:
        while True:
            try:
                answers, failure = self._connections[index].recv()
            except (EOFError, OSError):
                self._end(index)
                return
            with self._lock:
                for answer in answers:
                    if failure is None:
                        self._futures.pop(answer.request_id)[1].set_result(answer)
                    else:
                        self._futures.pop(answer)[1].set_exception(EngineFailed(f"{self._names[index]}: {failure}"))

    def _end(self, index: int) -> None:
        """Let the requests of a process that has ended fail."""
        with self._lock:
            self.has_lost_a_process = True
            self._connections[index].close()
            lost = [request_id for request_id, (place, _) in self._futures.items() if place == index]
            for request_id in lost:
                self._futures.pop(request_id)[1].set_exception(EngineLost(f"{self._names[index]} has ended"))
