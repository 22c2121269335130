"""Logging for a world of ranks: rank 0 speaks to people, every rank speaks when it fails."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("rl_megatron")
_said: set[str] = set()

# Warnings of libraries that a user of this package cannot act on: message, category and module (regular expressions).
_NOT_FOR_USERS: tuple[tuple[str, type[Warning], str], ...] = (
    # megatron-core looks for GPU packages when it is imported. model/backend.py chooses layers by what is installed.
    (r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back", UserWarning, r"megatron\."),
    # It is about the default of a megatron-core setting that this package does not have.
    (r"full scope is deprecated\. Use empty cuda_graph_scope", UserWarning, r"megatron\."),
    # megatron-core's optimizer asks every parameter whether it has a gradient.
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning, r"megatron\."),
    # megatron-core calls functions that torch has renamed. torch attributes some of these calls to its own logger.
    (r".* is deprecated", FutureWarning, r"megatron\."),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed\.c10d_logger"),
)
# The same for messages that libraries log: logger, and the beginning of the message.
_NOT_FOR_USERS_LOGGED: tuple[tuple[str, str], ...] = (
    # Without a GPU, the "GPU" generator of megatron-core is the CPU's, which changes when it is used.
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
)

Watcher = Callable[[int, int, str, str], None]
_watcher: Watcher | None = None


def is_main_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def setup() -> None:
    """Rank 0 logs from INFO, other ranks from ERROR."""
    if not LOGGER.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a checkpoint writer's fork
    LOGGER.setLevel(logging.INFO if is_main_rank() else logging.ERROR)


def silence_libraries() -> None:
    """Ignore the warnings of libraries that a user cannot act on.

    It is called when the package is imported, because megatron-core warns when it is imported. Filters that the user
    has set come first.
    """
    for message, category, module in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message, category, module, append=True)
    for name, beginning in _NOT_FOR_USERS_LOGGED:
        logging.getLogger(name).addFilter(_Without(beginning))


def silence_gpu_advice() -> None:
    """Ignore advice that only concerns GPUs, in a process that computes on the CPU."""
    advice = "When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE"
    warnings.filterwarnings("ignore", advice, UserWarning, append=True)


def once(message: str) -> None:
    """Logs a fallback or a notice the first time it happens in this process."""
    if message not in _said:
        _said.add(message)
        LOGGER.warning(message)


def error(message: object) -> None:
    """The one line that a failed run ends with: from rank 0, since every rank found the same."""
    if is_main_rank():
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)


def watch_progress(watcher: Watcher | None) -> None:
    """Give `watcher` what this process reports from now on; None ends it."""
    global _watcher
    _watcher = watcher


def is_watched() -> bool:
    """Return whether somebody shows what `report_progress` is given."""
    return _watcher is not None


def report_progress(done: int, total: int, unit: str, detail: str = "") -> None:
    """Report how far a long call is. It costs nothing on ranks where nobody watches.

    Args:
        done: How many are done.
        total: How many there are.
        unit: What they are, such as "sequences".
        detail: More, to be shown if there is space.
    """
    if _watcher is not None:
        _watcher(done, total, unit, detail)


class _StderrHandler(logging.StreamHandler):
    """Write to what `sys.stderr` is at the time: a progress bar replaces it, and prints lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class _Without(logging.Filter):
    """Drop the messages that begin in one way."""

    def __init__(self, beginning: str):
        super().__init__()
        self._beginning = beginning

    def __eq__(self, other: object) -> bool:  # a logger takes equal filters once
        return isinstance(other, _Without) and other._beginning == self._beginning

    def __hash__(self) -> int:
        return hash(self._beginning)

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)
