"""`Watchdog`: reads the heartbeats of all ranks, and reports once per hang which rank keeps the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_megatron.observability.failure_file import FailureFile
from rl_megatron.observability.hang import Beat, Diagnosis, Seen, diagnose, named_ranks, paragraph
from rl_megatron.observability.heartbeat import answered_stacks, ask_for_stacks, beat_key, read_stacks

_TICKS_FOR_STACKS = 3  # how many heartbeats ranks have to send their stacks


class Watchdog:
    """What ranks 0 and 1 know of all ranks. Rank 1 reports only if rank 0 does not answer. It never ends a process."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        limit: float,
        longest: float,
        file: FailureFile,
        timeout_minutes: float,
        say: Callable[[str], object],
    ):
        """Begin without any heartbeat.

        Args:
            store: A connection to the store that no other thread uses.
            rank: This rank.
            world_size: The number of ranks.
            limit: The seconds after which a rank hangs.
            longest: The most seconds that the time between two calls of `tick` counts.
            file: Where a report is written.
            timeout_minutes: `train.collective_timeout_minutes`, for the message.
            say: Is given what people shall read.
        """
        self._store, self._rank, self._limit, self._longest = store, rank, limit, longest
        self._file, self._timeout_minutes, self._say = file, timeout_minutes, say
        self._keys = [beat_key(each) for each in range(world_size)]
        self.seen = [Seen(each, Beat(), 0.0) for each in range(world_size)]
        self._request: int | None = None
        self._ticks_since = 0
        self._reported: Diagnosis | None = None
        self._content: dict[str, Any] = {}
        self._all_exist = False

    def tick(self, elapsed: float) -> None:
        """Read all heartbeats, `elapsed` seconds after the last call, and report a hang or its end."""
        self._read(min(elapsed, self._longest))
        diagnosis = diagnose(self.seen, self._limit)
        if diagnosis is None:
            self._request = None
            self.went_on()
        elif self._reported is None and (self._rank == 0 or self.seen[0].silent > self._limit):
            self._collect(diagnosis)

    def report(self, diagnosis: Diagnosis, stacks: list[dict[str, Any]]) -> None:
        """Write the report and say it."""
        self._reported = diagnosis
        named = None if diagnosis.rank is None else self.seen[diagnosis.rank].record()
        message = paragraph(diagnosis, self.seen, "").strip()
        content = {"kind": "hang", **(named or {"rank": None}), "message": message}
        content |= {"ranks": [seen.record() for seen in self.seen], "stacks": stacks}
        of = [rank for stack in stacks for rank in stack["ranks"]]
        self._content = content
        written = self._file.write(content, f"the stacks of {named_ranks(sorted(of))}" if of else "this report")
        ending = (
            f"{written}. Nothing is ended yet: if the ranks do not go on, the run fails {self._timeout_minutes:g} "
            "minutes after they began to wait (train.collective_timeout_minutes)"
        )
        self._say(paragraph(diagnosis, self.seen, ending))

    def went_on(self) -> None:
        """Report that the ranks go on, if a hang was reported."""
        if self._reported is None:
            return
        named = "the ranks" if self._reported.rank is None else f"rank {self._reported.rank}"
        self._reported = None
        self._file.write(self._content | {"ended": True}, "the report")
        self._say(f"hang: it has ended, {named} went on")

    def _read(self, elapsed: float) -> None:
        if not self._all_exist:
            self._all_exist = self._store.check(self._keys)
            for key in () if self._all_exist else self._keys:
                self._store.compare_set(key, "", "")  # a key that does not exist would be waited for
        for seen, text in zip(self.seen, self._store.multi_get(self._keys), strict=True):
            beat = Beat.from_json(text)
            silent = 0.0 if beat.count != seen.beat.count else seen.silent + elapsed
            self.seen[seen.rank] = Seen(seen.rank, beat, silent)

    def _collect(self, diagnosis: Diagnosis) -> None:
        """Ask for stacks, and report when all ranks that answer have sent theirs."""
        if self._request is None:
            self._request, self._ticks_since = ask_for_stacks(self._store), 0
            return
        self._ticks_since += 1
        answered = answered_stacks(self._store, self._request)
        if self._ticks_since >= _TICKS_FOR_STACKS or len(answered) == len(self.seen):
            self.report(diagnosis, read_stacks(self._store, self._request, answered))
            self._request = None
