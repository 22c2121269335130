"""`Setting`: where a part runs and with which shapes; and processes in which parts compute."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

CONTEXT: BaseContext = multiprocessing.get_context("spawn")  # how processes start


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        device: "cuda" or "cpu".
        tiny: Whether shapes are so small that the part takes seconds.
        directory: Where the part may write files.
    """

    device: str
    tiny: bool
    directory: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class ProcessFailed(RuntimeError):
    """A function raised in its process, or its process ended."""


def in_new_process(function: Callable[..., Any], *args: Any, sees_gpus: bool = True) -> Any:
    """Return `function(*args)`, computed in a process of its own.

    A process can use only one kind of device: the CPU, a GPU, or fake GPUs. The function is at module level.

    Args:
        function: The function.
        args: Its arguments.
        sees_gpus: Whether the process sees GPUs.

    Raises:
        ProcessFailed: The function raised, or its process ended.
    """
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_answer, args=(theirs, function, args))  # type: ignore[attr-defined]
    with _environment({} if sees_gpus else {"CUDA_VISIBLE_DEVICES": ""}):
        process.start()
    theirs.close()
    try:
        succeeded, answer = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        raise ProcessFailed(f"{function.__name__}: its process ended with status {process.exitcode}") from None
    process.join()
    if not succeeded:
        raise ProcessFailed(f"{function.__name__}:\n{answer}")
    return answer


@contextmanager
def _environment(variables: dict[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answer(connection: Connection, function: Callable[..., Any], args: tuple) -> None:
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # `send` would share the memory of tensors, and the sender ends before it is read.
    connection.send_bytes(pickle.dumps(answer))
    connection.close()
