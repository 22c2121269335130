"""The first failure of a run, which all ranks learn of through the job's store."""

from __future__ import annotations

import json
import os
import re
import socket
import traceback
from typing import Any

from rl_megatron import disk, log
from rl_megatron.config.errors import describe_error
from rl_megatron.observability.position import Place
from rl_megatron.observability.waiting import place_of_error

_FIRST, _REPORTED, _KNOWN = "failure/first", "failure/reported", "failure/known"
# What torch says on a rank whose peer has ended.
_LOST = re.compile(
    r"Connection (closed|reset) by|Connection refused|Broken pipe|Socket (closed|Timeout)|failed to (recv|send)"
    r"|remote process exited|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)


def failure_of(error: BaseException, rank: int, place: Place, on_all_ranks: bool) -> dict[str, Any]:
    """Return what failure.json says of an error.

    Args:
        error: The error.
        rank: The rank that raised it.
        place: Where in the run it was.
        on_all_ranks: Whether it is an error that all ranks raise alike.
    """
    lost = isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    message = log.make_printable(" ".join(describe_error(error).split()))
    return {
        "kind": "lost" if lost else "error",
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "stage": place.stage,
        "step": place.step,
        "phase": place.phase,
        "progress": f"{place.done} of {place.total} {place.noun}" if place.total else None,
        "place": place.describe(),
        "at": place_of_error(error),
        "message": message,
        "on_all_ranks": on_all_ranks,
        "disk_is_full": disk.is_full(error),
        "traceback": log.make_printable("".join(traceback.format_exception(error))).splitlines(),
    }


def describe_failure(failure: dict[str, Any], written: str) -> str:
    """Return the failure in one line for people; `written` says where its traceback is."""
    named = f"rank {failure['rank']} on {failure['host']} (process {failure['pid']})"
    if failure["kind"] == "lost":
        what = (
            f"{named} lost another rank, which ended without a message ({failure['place']}): look for a rank that was "
            "killed, in the line of the launcher and in the log of its node"
        )
    else:
        what = f"{named} failed ({failure['place']}): {failure['message']}, at {failure['at']}"
    return f"{what}; {written}; the same command goes on from the newest checkpoint"


class FirstFailure:
    """The failure that was recorded first, as one thread sees it. It owns a connection to the store."""

    def __init__(self, store: Any):
        self._store = store

    def record(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Record a failure unless there is one. Return that which is recorded then."""
        return json.loads(self._store.compare_set(_FIRST, "", json.dumps(failure)))

    def get(self) -> dict[str, Any] | None:
        """Return the first failure, or None."""
        return json.loads(self._store.get(_FIRST)) if self._store.check([_FIRST]) else None

    def has_been_reported(self) -> bool:
        """Return whether a rank has written it to the run's directory and told people."""
        return self._store.check([_REPORTED])

    def add_known(self, ranks: int = 1) -> int:
        """Count ranks that know of the failure and end. Return how many there are."""
        return self._store.add(_KNOWN, ranks)

    def set_reported(self) -> None:
        """Record that it was reported."""
        self._store.set(_REPORTED, "1")
