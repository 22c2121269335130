"""Tell from the heartbeats of all ranks which rank hangs. Everything here is a function of what was read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_megatron.observability.position import Place

_NAMED = 8  # ranks that are listed one by one


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        host: The rank's host.
        pid: Its process.
        count: How many heartbeats came before. It differs from one heartbeat to the next.
        place: Where in the run its main thread is.
        seconds: For how long that has not changed.
        collective: The function of torch.distributed in which the main thread waits, or None.
        at: The line that the main thread runs.
        sequence: How many collectives the group of all ranks has begun, or None.
        has_ended: Whether the run has ended on this rank.
    """

    host: str = "an unknown host"
    pid: int = 0
    count: int = -1
    place: Place = field(default_factory=Place)
    seconds: float = 0.0
    collective: str | None = None
    at: str = "an unknown line"
    sequence: int | None = None
    has_ended: bool = False

    def to_json(self) -> str:
        """Return the heartbeat as text for the store."""
        return json.dumps(asdict(self) | {"place": list(self.place)})

    @classmethod
    def from_json(cls, text: bytes) -> Beat:
        """Return the heartbeat that the store has; an empty text stands for a rank that has not sent one yet."""
        if not text:
            return cls()
        values = json.loads(text)
        return cls(**values | {"place": Place(*values["place"])})


@dataclass(frozen=True)
class Seen:
    """What is known of a rank: its newest heartbeat, and for how many seconds no newer one has come."""

    rank: int
    beat: Beat
    silent: float

    @property
    def waits(self) -> str | None:
        """Return the collective in which the rank waits and the line that called it, or None."""
        return f"{self.beat.collective}, called at {self.beat.at}" if self.beat.collective else None

    def record(self) -> dict[str, Any]:
        """Return what failure.json says of the rank."""
        place = self.beat.place
        return {
            "rank": self.rank,
            "host": self.beat.host,
            "pid": self.beat.pid,
            "stage": place.stage,
            "step": place.step,
            "phase": place.phase,
            "progress": f"{place.done} of {place.total} {place.noun}" if place.total else None,
            "at": self.beat.at,
            "collective": self.beat.collective,
            "unchanged_seconds": round(self.beat.seconds, 1),
            "silent_seconds": round(self.silent, 1),
        }


@dataclass(frozen=True)
class Diagnosis:
    """Which rank hangs.

    Attributes:
        rank: The rank, or None if nothing tells the ranks apart.
        seconds: Since when.
        reason: What the rank does, in words, after "rank N on HOST (process P)".
    """

    rank: int | None
    seconds: float
    reason: str


def diagnose(ranks: Sequence[Seen], limit: float) -> Diagnosis | None:
    """Return which rank hangs, or None if none does.

    A rank whose heartbeat stopped is named first. If no rank has gone on for `limit` seconds, it is the rank that is
    furthest behind. Ranks at the same place are told apart by what they wait for. In a pipeline, a stage waits for the
    one before with fewer microbatches done, so the number of microbatches is compared last.

    Args:
        ranks: All ranks.
        limit: The seconds after which a rank hangs (`train.hang_report_seconds`).
    """
    running = [seen for seen in ranks if not seen.beat.has_ended]
    silent = [seen for seen in running if seen.silent > limit]
    if silent:
        first = min(silent, key=lambda seen: (-seen.silent, seen.beat.place.order, seen.rank))
        return Diagnosis(first.rank, first.silent, f"has not answered for {first.silent:.0f} s")
    if not running or any(seen.beat.seconds <= limit for seen in running):
        return None
    seconds = min(seen.beat.seconds for seen in running)
    return _behind(running, seconds)


def _behind(running: Sequence[Seen], seconds: float) -> Diagnosis:
    """Return which of the ranks that do not go on keeps the others waiting."""
    since = f"for {seconds:.0f} s"
    last = min(seen.beat.place.order for seen in running)
    behind = [seen for seen in running if seen.beat.place.order == last]
    if len(behind) < len(running):
        first = _least([seen for seen in behind if not seen.waits] or behind)
        return Diagnosis(first.rank, seconds, f"is behind the others, and no rank has gone on {since}")
    working = [seen for seen in behind if not seen.waits]
    if working and (len(working) < len(behind) or len(running) == 1):
        first = _least(working)
        reason = "" if len(running) == 1 else ", while others wait for it in a collective"
        return Diagnosis(first.rank, seconds, f"has not gone on {since}{reason}")
    first = _least(behind)
    if any(seen.beat.place.done > first.beat.place.done for seen in behind):
        return Diagnosis(first.rank, seconds, f"is behind the others, and no rank has gone on {since}")
    calls = Counter(_call(seen) for seen in behind)
    if len(calls) > 1:
        usual = calls.most_common(1)[0][0]
        first = next(seen for seen in behind if _call(seen) != usual)
        return Diagnosis(first.rank, seconds, f"waits in another collective than most, and no rank has gone on {since}")
    return Diagnosis(None, seconds, f"no rank has gone on {since}, and all are at the same place")


def _least(ranks: Sequence[Seen]) -> Seen:
    return min(ranks, key=lambda seen: (seen.beat.place.done, seen.rank))


def _call(seen: Seen) -> tuple[str | None, int | None]:
    return seen.waits, seen.beat.sequence


def paragraph(diagnosis: Diagnosis, ranks: Sequence[Seen], ending: str) -> str:
    """Return the report for people, in one line.

    Args:
        diagnosis: Which rank hangs.
        ranks: All ranks.
        ending: The last sentences: where the stacks are, and what will happen.
    """
    if diagnosis.rank is None:
        named = f"{diagnosis.reason}: {ranks[0].beat.place.describe()}"
    else:
        seen = next(each for each in ranks if each.rank == diagnosis.rank)
        beat = seen.beat
        doing = f"in {beat.collective}, called at {beat.at}" if beat.collective else f"at {beat.at}"
        named = (
            f"rank {seen.rank} on {beat.host} (process {beat.pid}) {diagnosis.reason}: {beat.place.describe()}, {doing}"
        )
    others = [seen for seen in ranks if seen.rank != diagnosis.rank and not seen.beat.has_ended]
    return f"hang: {named}. {_others(others)}{ending}"


def _others(others: Sequence[Seen]) -> str:
    """Return what the other ranks do, most of them first."""
    if not others:
        return ""
    doing: dict[str, list[int]] = {}
    for seen in others:
        waits = f"in {seen.waits}" if seen.waits else f"at {seen.beat.at}"
        doing.setdefault(waits, []).append(seen.rank)
    groups = sorted(doing.items(), key=lambda item: -len(item[1]))
    listed = [f"{named_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} {what}" for what, ranks in groups[:3]]
    more = sum(len(ranks) for _, ranks in groups[3:])
    text = "; ".join(listed) + (f"; {more} more are elsewhere" if more else "") + ". "
    return text[0].upper() + text[1:]


def named_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 2 and 3", or their number if they are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks ({min(ranks)} … {max(ranks)})"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}"
