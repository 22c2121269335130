"""Run functions, Python blocks and scripts in forks, so that a page's imports, plugins and directory are its own."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

from tests.docs.collector import Block
from tests.docs.learning import steps_file, watch
from tests.docs.small_runs import load_small_configs

TIMEOUT = 300  # seconds


class Fork:
    """A process that runs functions of modules, one after the other, in one directory."""

    def __init__(self, context: ForkServerContext, directory: Path):
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, directory))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns.

        Raises:
            AssertionError: it raised, ended its process or took too long; the message has the traceback.
        """
        self._connection.send((function, arguments))
        assert self._connection.poll(TIMEOUT), f"no answer after {TIMEOUT} s"
        try:
            succeeded, result = self._connection.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"the process ended with status {self._process.exitcode}") from None
        assert succeeded, result
        return result


def _serve(connection: Connection, directory: Path) -> None:
    os.chdir(directory)
    while True:
        function, arguments = connection.recv()
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


_names: dict[str, Any] = {"__name__": "__main__"}  # of the Python blocks that this process has run


def run_block(block: Block) -> None:
    """Run a Python block with the names of the blocks that this process ran before. Its runs are small, and watched."""
    if "__file__" not in _names:
        _names["__file__"] = block.page
        sys.path.insert(0, os.getcwd())
        load_small_configs()
        watch(steps_file(Path.cwd()))
    exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), _names)


def run_script(arguments: list[str]) -> int:
    """Run a Python file with its arguments, as `python FILE …` does, and return its exit status. Its runs are small."""
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    load_small_configs()
    runpy.run_path(arguments[0], run_name="__main__")
    return 0
