"""Logging for a world of ranks: rank 0 speaks to people, every rank speaks when it fails."""

from __future__ import annotations

import logging
import os
import sys
import warnings

LOGGER = logging.getLogger("rl_megatron")
_said: set[str] = set()


def is_main_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def setup() -> None:
    """Rank 0 logs from INFO, other ranks from ERROR; libraries that warn about their own insides are quietened.

    Called before torch and megatron-core are imported: they warn on import.
    """
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a checkpoint writer's fork
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    LOGGER.setLevel(logging.INFO if is_main_rank() else logging.ERROR)
    for chatty in ("megatron", "torch.distributed", "transformers"):
        logging.getLogger(chatty).setLevel(logging.ERROR)


def once(message: str) -> None:
    """Logs a fallback or a notice the first time it happens in this process."""
    if message not in _said:
        _said.add(message)
        LOGGER.warning(message)


def error(message: object) -> None:
    """The one line that a failed run ends with: from rank 0, since every rank found the same."""
    if is_main_rank():
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
