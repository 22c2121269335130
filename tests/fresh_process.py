"""A process that has imported torch and megatron-core, but has started no device and joined no process group."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.forkserver import fork_context


def _serve(connection: Connection) -> None:
    while (job := connection.recv()) is not None:
        function, args = job
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class FreshProcess:
    """A fork of `tests.forkserver` that runs functions which put back what they change, such as fake GPUs."""

    def __init__(self) -> None:
        self._connection, theirs = fork_context().Pipe()
        self._process = fork_context().Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`. Both must be importable or picklable, like the result.

        Raises:
            AssertionError: The function raised; the message has its traceback.
        """
        self._connection.send((function, args))
        succeeded, result = self._connection.recv()
        if not succeeded:
            raise AssertionError(result)
        return result

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
