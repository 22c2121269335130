"""`Setting`: where a part runs, with which shapes and which expected values; and processes in which parts compute."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import math
import multiprocessing
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu_check import forks

EXPECTED, ABOUT = "expected.pt.gz", "about.json"  # files of a bundle
CONTEXT: BaseContext = multiprocessing.get_context("spawn")  # how processes start if nothing forks for this one

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        device: "cuda" or "cpu".
        tiny: Whether shapes are so small that the part takes seconds.
        directory: Where the part may write files.
        bundle: The directory of a bundle, which has expected values, or None.
        ends: When the part is ended, in seconds of `time.monotonic`.
    """

    device: str
    tiny: bool
    directory: Path
    bundle: Path | None = None
    ends: float = math.inf

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def expected(self, key: str, compute: Callable[[], T]) -> T:
        """Return the bundle's value of a key, or compute it if the bundle does not have it.

        The key says all that the value depends on: see `key_of`. A value of another shape has another key.
        """
        if self.bundle is None:
            return compute()
        values = load_expected(self.bundle)
        if key in values:
            return values[key]
        is_stale = any(_name_of(key) == _name_of(other) for other in values)
        why = "is stale: it is of another shape" if is_stale else "is missing"
        print(f"the bundle's expected value of {key!r} {why}; it is computed here", flush=True)
        return compute()


def key_of(name: str, *shape: Any) -> str:
    """Return the key of an expected value: its name, and a digest of all that it depends on.

    Args:
        name: The name, which has no bracket.
        shape: Values whose `repr` is the same in every process.
    """
    return f"{name} [{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}]"


def _name_of(key: str) -> str:
    return key.partition(" [")[0]


@functools.cache
def load_expected(bundle: Path) -> dict[str, Any]:
    """Return the expected values of a bundle; none if they cannot be read."""
    import torch

    try:
        return torch.load(io.BytesIO(gzip.decompress((bundle / EXPECTED).read_bytes())), weights_only=False)
    except Exception as error:  # of any class, if a class of the values has changed
        print(f"{bundle / EXPECTED} cannot be read ({type(error).__name__}: {error}); its values are computed here")
        return {}


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
    request = forks.Request(pickle.dumps((function, args)), {} if sees_gpus else {"CUDA_VISIBLE_DEVICES": ""})
    answer = forks.ask_leader(request) if forks.has_leader() else _in_context(request)
    if answer.status is not None:
        raise ProcessFailed(f"{function.__name__}: its process ended with status {answer.status}")
    if answer.error is not None:
        raise ProcessFailed(f"{function.__name__}:\n{answer.error}")
    return answer.value


def _in_context(request: forks.Request) -> forks.Answer:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=forks.answer, args=(theirs, request))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        return pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        return forks.Answer(status=process.exitcode)
    finally:
        process.join()
