"""What fails on one rank fails on all: ranks that part ways wait for each other until time is up."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist


def agreed_failure(failure: str | None) -> str | None:
    """The first rank's that has one, the same on every rank; collective. Without process group this process's own."""
    if not dist.is_initialized():
        return failure
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, message in enumerate(failures):
        if message is not None:
            return message if all(failures) else f"{message} (on rank {rank})"
    return None


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def on_main_rank(action: Callable[[], object], describe: Callable[[Exception], str] = in_words) -> str | None:
    """Does `action` on rank 0; on every rank, what went wrong with it; collective, save without a process group."""
    outcome: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except Exception as error:  # whatever it is: the other ranks wait to hear of it
            outcome = [describe(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    return outcome[0]
