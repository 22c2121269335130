"""Propagate a failure to all ranks, so that none of them waits in a collective until its timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rl_megatron.config.errors import ConfigError

_T = TypeVar("_T")


def first_failure(failure: str | None) -> str | None:
    """Return the failure of the lowest rank that reports one, or None.

    The call is collective. Without a process group, it returns this process's own failure.
    """
    if not dist.is_initialized():
        return failure
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, message in enumerate(failures):
        if message is not None:
            return message if all(failures) else f"{message} (on rank {rank})"
    return None


def on_all_or_none(action: Callable[[], _T]) -> _T:
    """Return what `action` returns. Collective.

    An action can fail on one node only, for example if a file is missing there. Without this, the other ranks would
    wait.

    Raises:
        ConfigError: `action` raised it on any rank. All ranks raise it, with the message of the lowest such rank.
    """
    try:
        result = action()
    except ConfigError as error:
        raise ConfigError(first_failure(str(error))) from error
    failure = first_failure(None)
    if failure is not None:
        raise ConfigError(failure)
    return result


def in_words(error: Exception) -> str:
    """Return an exception's type and message in one line."""
    return f"{type(error).__name__}: {error}"


def run_on_rank0(action: Callable[[], object], describe: Callable[[Exception], str] = in_words) -> str | None:
    """Run `action` on rank 0, and return its error message, or None, on every rank.

    The call is collective. Without a process group, this process runs the action.

    Args:
        action: What to do on rank 0.
        describe: Turns the exception into the message.
    """
    outcome: list[str | None] = [None]
    if is_rank0():
        try:
            action()
        except Exception as error:  # any failure: the other ranks wait for the outcome
            outcome = [describe(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    return outcome[0]


def is_rank0() -> bool:
    """Return whether this is rank 0. Without a process group, this process is."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_rank0(value: _T) -> _T:
    """Return rank 0's value on every rank. Without a process group, that is this process's. Collective."""
    box: list[Any] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]
