"""Records of how each start of a run ended: attempts.jsonl, failure.json, and the first failure, in the job's store."""

from __future__ import annotations

import json
import os
import re
import socket
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_megatron import disk, log
from rl_megatron.config.errors import describe_error
from rl_megatron.observability.liveness import Place, locate_error
from rl_megatron.observability.run_files import ATTEMPTS, FAILURE

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_EARLIER_FAILURE = "failure.previous.json"  # the failure of the previous attempt
# Keys of the job's store.
_FIRST, _REPORTED, _INFORMED = "failure/first", "failure/reported", "failure/known"
# Parts of torch's messages on a rank whose peer has ended.
_LOST = re.compile(
    r"Connection (closed|reset) by|Connection refused|Broken pipe|Socket (closed|Timeout)|failed to (recv|send)"
    r"|remote process exited|ncclRemoteError|NCCL communicator was aborted",
    re.IGNORECASE,
)


class Attempts:
    """The writer of attempts.jsonl on rank 0, which records when each start of the run began and how it ended.

    A start that was killed has no end. Nothing is written before `begin`.
    """

    def __init__(self, output_dir: Path):
        self._path = output_dir / ATTEMPTS
        self._has_begun = False

    def begin(self, layout: str) -> None:
        """Record that the run was started, with its layout in words."""
        self._has_begun = True
        self._append({"began": _format_now(), "host": socket.gethostname(), "layout": layout})

    def end(self, how: str, place: str = "") -> None:
        """Record how this start ended ("complete", "stopped" or "failed"), and where in the run."""
        if self._has_begun:
            try:
                self._append({"ended": _format_now(), "how": how, "place": place})
            except OSError as error:  # a full disk must not hide why the run ended
                reason = disk.describe(error, self._path)
                log.LOGGER.warning("%s: the end of the run cannot be recorded: %s", self._path, reason)

    def _append(self, line: dict[str, str]) -> None:
        disk.append(self._path, (json.dumps(line) + "\n").encode())


def _format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class FailureFile:
    """The file failure.json of a run: why it failed, or which rank hangs.

    Nothing is written before `begin`, because until then the directory may be another run's.
    """

    def __init__(self, output_dir: Path):
        self.path = output_dir / FAILURE
        self.has_begun = False

    def begin(self, is_writer: bool) -> None:
        """Let `write` write from now on. If `is_writer`, rename the file of an earlier attempt."""
        self.has_begun = True
        if is_writer and self.path.is_file():
            self.path.replace(self.path.with_name(_EARLIER_FAILURE))

    def write(self, content: Mapping[str, object], what: str) -> str:
        """Write the file. Return a sentence that tells which file has `what`, or why no file has it."""
        if not self.has_begun:
            return f"No file has {what}, because the run has not yet written to output_dir"
        try:
            disk.replace_file(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:  # a full disk must not hide the report
            return f"{self.path} could not be written ({disk.describe(error, self.path)})"
        return f"{self.path} has {what}"


def record_failure(error: BaseException, rank: int, place: Place, on_all_ranks: bool) -> dict[str, object]:
    """Return the content of failure.json for an error of a rank; `on_all_ranks` means that all ranks raise it."""
    is_lost = isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    return {
        "kind": "lost" if is_lost else "error",
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "stage": place.stage,
        "step": place.step,
        "phase": place.phase,
        "progress": place.progress,
        "place": place.describe(),
        "at": locate_error(error),
        "message": log.make_printable(" ".join(describe_error(error).split())),
        "on_all_ranks": on_all_ranks,
        "disk_is_full": disk.is_full(error),
        "traceback": log.make_printable("".join(traceback.format_exception(error))).splitlines(),
    }


def describe_failure(failure: dict[str, Any], written: str) -> str:
    """Return the failure in one line for people; `written` tells where its traceback is."""
    rank = f"rank {failure['rank']} on {failure['host']} (process {failure['pid']})"
    if failure["kind"] == "lost":
        what = (
            f"{rank} lost another rank, which ended without a message ({failure['place']}): find the rank that was "
            "killed in the launcher's message and in the log of its node"
        )
    else:
        what = f"{rank} failed ({failure['place']}): {failure['message']}, at {failure['at']}"
    return f"{what}; {written}; the same command continues from the newest checkpoint"


class FirstFailure:
    """The failure that was recorded first in the job's store. Each thread has its own connection to the store."""

    def __init__(self, store: Store):
        self._store = store

    def record(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Record a failure unless one is recorded already, and return the recorded one."""
        return json.loads(self._store.compare_set(_FIRST, "", json.dumps(failure)))

    def get(self) -> dict[str, Any] | None:
        """Return the first failure, or None if none is recorded."""
        return json.loads(self._store.get(_FIRST)) if self._store.check([_FIRST]) else None

    def has_been_reported(self) -> bool:
        """Return whether a rank has written the first failure to the run's directory and printed it."""
        return self._store.check([_REPORTED])

    def mark_reported(self) -> None:
        """Record that the first failure was reported."""
        self._store.set(_REPORTED, "1")

    def count_informed(self, ranks: int = 1) -> int:
        """Add `ranks` to the number of ranks that know of the failure and will end, and return the new number."""
        return self._store.add(_INFORMED, ranks)
