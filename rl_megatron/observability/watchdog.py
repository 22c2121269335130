"""`Watchdog`: reads the heartbeats of all ranks, and reports once per hang which rank keeps the others waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_megatron.observability.failures import FailureFile
from rl_megatron.observability.liveness import Beat, beat_key, list_answers, request_stacks, take_stacks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_MAX_LISTED = 8  # the most ranks that are listed one by one
_TICKS_FOR_STACKS = 3  # after this many ticks, a report is written without the missing stacks


@dataclass(frozen=True)
class RankState:
    """The state of a rank: its newest heartbeat, and for how many seconds it has sent no newer one."""

    rank: int
    beat: Beat
    silent_seconds: float

    @property
    def wait(self) -> str | None:
        """Return the collective in which the rank waits and the line that called it, or None if it runs other code."""
        return f"{self.beat.collective}, called at {self.beat.at}" if self.beat.collective else None

    @property
    def activity(self) -> str:
        """Return where the rank's main thread is: in a collective or at a line."""
        return f"in {self.wait}" if self.wait else f"at {self.beat.at}"

    def to_record(self) -> dict[str, object]:
        """Return the entry of failure.json about the rank."""
        place = self.beat.place
        return {
            "rank": self.rank,
            "host": self.beat.host,
            "pid": self.beat.pid,
            "stage": place.stage,
            "step": place.step,
            "phase": place.phase,
            "progress": place.progress,
            "at": self.beat.at,
            "collective": self.beat.collective,
            "unchanged_seconds": round(self.beat.seconds, 1),
            "silent_seconds": round(self.silent_seconds, 1),
        }


@dataclass(frozen=True)
class Diagnosis:
    """The rank that hangs.

    Attributes:
        rank: The rank, or None if nothing tells the ranks apart.
        seconds: How long it has hung.
        reason: What the rank does, in words that follow "rank N on HOST (process P)".
    """

    rank: int | None
    seconds: float
    reason: str


def diagnose(states: Sequence[RankState], limit: float) -> Diagnosis | None:
    """Return which rank hangs, or None if no rank hangs.

    A rank whose heartbeat stopped is named first. If no rank has made progress for `limit` seconds, the rank at the
    earliest place is named. Among ranks at the same place, one that does not wait in a collective is named, then the
    one with the fewest microbatches done, then one that waits in another collective than most. Microbatches come
    second, because a pipeline stage with fewer microbatches done may only wait for the previous stage.

    Args:
        states: The states of all ranks.
        limit: The seconds after which a rank hangs (`train.hang_report_seconds`).
    """
    running = [state for state in states if not state.beat.has_ended]
    silent = [state for state in running if state.silent_seconds > limit]
    if silent:
        first = min(silent, key=lambda state: (-state.silent_seconds, state.beat.place.order, state.rank))
        return Diagnosis(first.rank, first.silent_seconds, f"has not answered for {first.silent_seconds:.0f} s")
    if not running or any(state.beat.seconds <= limit for state in running):
        return None
    return _find_blocker(running, min(state.beat.seconds for state in running))


def _find_blocker(running: Sequence[RankState], seconds: float) -> Diagnosis:
    """Return which rank keeps the others waiting. No rank has made progress for `seconds`."""
    since = f"for {seconds:.0f} s"
    lagging = f"is behind the others, and no rank has made progress {since}"
    earliest = min(state.beat.place.order for state in running)
    last = [state for state in running if state.beat.place.order == earliest]
    working = [state for state in last if not state.wait]
    if len(last) < len(running):
        return Diagnosis(_find_slowest(working or last).rank, seconds, lagging)
    if working and (len(working) < len(last) or len(running) == 1):
        reason = "" if len(running) == 1 else ", while others wait for it in a collective"
        return Diagnosis(_find_slowest(working).rank, seconds, f"has made no progress {since}{reason}")
    first = _find_slowest(last)
    if any(state.beat.place.done > first.beat.place.done for state in last):
        return Diagnosis(first.rank, seconds, lagging)
    calls = [(state.wait, state.beat.sequence) for state in last]
    most_common = Counter(calls).most_common(1)[0][0]
    for state, call in zip(last, calls, strict=True):
        if call != most_common:
            reason = f"waits in another collective than most, and no rank has made progress {since}"
            return Diagnosis(state.rank, seconds, reason)
    return Diagnosis(None, seconds, f"no rank has made progress {since}, and all are at the same place")


def _find_slowest(states: Sequence[RankState]) -> RankState:
    return min(states, key=lambda state: (state.beat.place.done, state.rank))


def describe_hang(diagnosis: Diagnosis, states: Sequence[RankState], ending: str) -> str:
    """Return a report for people in one line, which ends with `ending`."""
    if diagnosis.rank is None:
        culprit = f"{diagnosis.reason}: {states[0].beat.place.describe()}"
    else:
        state = next(state for state in states if state.rank == diagnosis.rank)
        beat = state.beat
        culprit = (
            f"rank {state.rank} on {beat.host} (process {beat.pid}) {diagnosis.reason}: {beat.place.describe()}, "
            f"{state.activity}"
        )
    others = [state for state in states if state.rank != diagnosis.rank and not state.beat.has_ended]
    return f"hang: {culprit}. {_describe_others(others)}{ending}"


def _describe_others(others: Sequence[RankState]) -> str:
    """Return what the other ranks do, the most common activity first."""
    if not others:
        return ""
    ranks_by_activity: dict[str, list[int]] = {}
    for state in others:
        ranks_by_activity.setdefault(state.activity, []).append(state.rank)
    groups = sorted(ranks_by_activity.items(), key=lambda item: -len(item[1]))
    clauses = [
        f"{format_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} {activity}" for activity, ranks in groups[:3]
    ]
    more = sum(len(ranks) for _, ranks in groups[3:])
    text = "; ".join(clauses) + (f"; {more} more are elsewhere" if more else "") + ". "
    return text[0].upper() + text[1:]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 2 and 3" or, for many ranks, "16 ranks (0 … 15)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MAX_LISTED:
        return f"{len(ranks)} ranks ({min(ranks)} … {max(ranks)})"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}"


class Watchdog:
    """The watchdog on ranks 0 and 1. Rank 1 reports only if rank 0 does not answer. Neither ends a process."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        limit: float,
        longest_interval: float,
        file: FailureFile,
        timeout_minutes: float,
        print_line: Callable[[str], object],
    ):
        """Prepare the watchdog. No heartbeat has been read yet.

        Args:
            store: A connection to the store that no other thread uses.
            rank: This rank.
            world_size: The number of ranks.
            limit: The seconds after which a rank hangs.
            longest_interval: The most seconds that count between two calls of `tick`.
            file: Where a report is written.
            timeout_minutes: `train.collective_timeout_minutes`, for the message.
            print_line: Prints a line for people.
        """
        self._store, self._rank, self._limit, self._longest_interval = store, rank, limit, longest_interval
        self._file, self._timeout_minutes, self._print_line = file, timeout_minutes, print_line
        self._keys = [beat_key(rank) for rank in range(world_size)]
        self.states = [RankState(rank, Beat(), 0.0) for rank in range(world_size)]
        self._request: int | None = None
        self._ticks_since_request = 0
        self._reported: Diagnosis | None = None
        self._content: dict[str, object] = {}
        self._all_keys_exist = False

    def tick(self, elapsed: float) -> None:
        """Read all heartbeats, `elapsed` seconds after the last call, and report a hang or its end."""
        self._read(min(elapsed, self._longest_interval))
        diagnosis = diagnose(self.states, self._limit)
        if diagnosis is None:
            self._request = None
            self.report_end()
        elif self._reported is None and (self._rank == 0 or self.states[0].silent_seconds > self._limit):
            self._collect_stacks(diagnosis)

    def report(self, diagnosis: Diagnosis, stacks: list[dict[str, Any]]) -> None:
        """Write a hang to failure.json and print it."""
        self._reported = diagnosis
        culprit = {"rank": None} if diagnosis.rank is None else self.states[diagnosis.rank].to_record()
        message = describe_hang(diagnosis, self.states, "").strip()
        content = {"kind": "hang", **culprit, "message": message}
        content |= {"ranks": [state.to_record() for state in self.states], "stacks": stacks}
        self._content = content
        ranks = sorted(rank for stack in stacks for rank in stack["ranks"])
        written = self._file.write(content, f"the stacks of {format_ranks(ranks)}" if ranks else "this report")
        ending = (
            f"{written}. Nothing is ended yet: if the ranks make no progress, the run fails {self._timeout_minutes:g} "
            "minutes after they began to wait (train.collective_timeout_minutes)"
        )
        self._print_line(describe_hang(diagnosis, self.states, ending))

    def report_end(self) -> None:
        """Report that the hang has ended, if one was reported."""
        if self._reported is None:
            return
        culprit = "the ranks" if self._reported.rank is None else f"rank {self._reported.rank}"
        self._reported = None
        self._file.write(self._content | {"ended": True}, "the report")
        self._print_line(f"hang: it has ended, {culprit} made progress again")

    def _read(self, elapsed: float) -> None:
        if not self._all_keys_exist:
            self._all_keys_exist = self._store.check(self._keys)
            for key in () if self._all_keys_exist else self._keys:
                self._store.compare_set(key, "", "")  # `multi_get` would wait for a key that does not exist
        for state, text in zip(self.states, self._store.multi_get(self._keys), strict=True):
            beat = Beat.from_json(text)
            silent_seconds = 0.0 if beat.count != state.beat.count else state.silent_seconds + elapsed
            self.states[state.rank] = RankState(state.rank, beat, silent_seconds)

    def _collect_stacks(self, diagnosis: Diagnosis) -> None:
        """Ask for stacks, and report when all ranks have sent theirs or enough time has passed."""
        if self._request is None:
            self._request, self._ticks_since_request = request_stacks(self._store), 0
            return
        self._ticks_since_request += 1
        ranks = list_answers(self._store, self._request)
        if self._ticks_since_request >= _TICKS_FOR_STACKS or len(ranks) == len(self.states):
            self.report(diagnosis, take_stacks(self._store, self._request, ranks))
            self._request = None
