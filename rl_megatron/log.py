"""Logging on many ranks: rank 0 logs progress, and every rank logs errors."""

from __future__ import annotations

import logging
import os
import sys
import warnings

LOGGER = logging.getLogger("rl_megatron")
_said: set[str] = set()


def is_main_rank() -> bool:
    """Return whether this process is rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def setup() -> None:
    """Set log levels: INFO on rank 0, ERROR on other ranks, and only errors from torch, megatron-core and transformers.

    Call it before torch and megatron-core are imported, because they warn on import.
    """
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the checkpoint writer's fork
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    LOGGER.setLevel(logging.INFO if is_main_rank() else logging.ERROR)
    for chatty in ("megatron", "torch.distributed", "transformers"):
        logging.getLogger(chatty).setLevel(logging.ERROR)


def once(message: str) -> None:
    """Log a warning, such as a fallback, the first time that it is given in this process."""
    if message not in _said:
        _said.add(message)
        LOGGER.warning(message)


def error(message: object) -> None:
    """Print the final line of a failed run to stderr, from rank 0 only because the error is the same on every rank."""
    if is_main_rank():
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
