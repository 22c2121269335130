"""The measured use of a phase, and extrapolations to more microbatches, layers, tokens or steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from rl_megatron.plan.phases import Bytes, Collective, PhaseName, PhaseUse

CATEGORIES = tuple(field.name for field in fields(Bytes))
_TIMELINE_POINTS = 512

# What is counted: ("flops",), ("kernels",), ("memory_bytes",), ("sync", location), or the calls or bytes of a
# collective, with its kind, group, group size and location.
Count = tuple
Live = tuple[int, ...]  # live bytes by category, in the order of CATEGORIES


@dataclass(frozen=True)
class Measured:
    """The use of a phase on one rank.

    Attributes:
        peaks: For each location (file and line) that allocates, the highest live bytes after one of its allocations.
        start_bytes: The live bytes at the beginning; `end_bytes` are those at the end.
        host_bytes: The peak host memory of the rank.
        timeline: Points (number of an operator, live bytes after it).
    """

    name: PhaseName
    counts: dict[Count, float]
    peaks: dict[str, Live]
    start_bytes: int
    end_bytes: int
    host_bytes: int
    timeline: tuple[tuple[int, int], ...]

    @property
    def peak(self) -> Live:
        """Return the live bytes at the peak."""
        return max(self.peaks.values(), key=sum)

    def start_at(self, start_bytes: int) -> Measured:
        """Return the phase as if `start_bytes` were live at its beginning. Additional bytes count as activations."""
        more, index = start_bytes - self.start_bytes, CATEGORIES.index("activations")
        peaks = {
            location: (*live[:index], live[index] + more, *live[index + 1 :]) for location, live in self.peaks.items()
        }
        timeline = tuple((number, live + more) for number, live in self.timeline)
        return replace(self, peaks=peaks, start_bytes=start_bytes, end_bytes=self.end_bytes + more, timeline=timeline)

    def use(self) -> PhaseUse:
        """Return the phase as the report shows it."""
        counts = self.counts
        collectives = sorted(key[1:] for key in counts if key[0] == "calls" and round(counts[key]))
        syncs = {key[1]: round(value) for key, value in counts.items() if key[0] == "sync" and round(value)}
        return PhaseUse(
            self.name,
            Bytes(**dict(zip(CATEGORIES, self.peak, strict=True))),
            after_bytes=self.end_bytes,
            flops=round(counts.get(("flops",), 0)),
            kernels=round(counts.get(("kernels",), 0)),
            memory_bytes=round(counts.get(("memory_bytes",), 0)),
            collectives=tuple(_collective(key, counts["calls", *key], counts["bytes", *key]) for key in collectives),
            syncs=tuple(sorted(syncs.items(), key=lambda entry: -entry[1])),
            host_bytes=self.host_bytes,
            timeline=self.timeline,
        )


def _collective(key: Count, calls: float, num_bytes: float) -> Collective:
    kind, group, group_size, _ = key
    return Collective(kind, group, group_size, round(num_bytes / calls), round(calls))


def extrapolate_microbatches(few: Measured, more: Measured, factor: float) -> Measured:
    """Return few + factor · (more − few), with the memory of `more`, whose pipeline is full."""
    host_bytes = _extrapolate(few.host_bytes, more.host_bytes, factor)
    return replace(more, counts=_sum((1 - factor, few), (factor, more)), host_bytes=host_bytes)


def repeat(one: Measured, count: float) -> Measured:
    """Return what `count` repetitions of `one` use in sequence."""
    return replace(one, counts=_sum((count, one)))


def combine_sequential(parts: Sequence[Measured]) -> Measured:
    """Return the sum of what the parts use, with the memory of the part that has the highest peak."""
    highest = max(parts, key=lambda part: sum(part.peak))
    host_bytes = max(part.host_bytes for part in parts)
    return replace(highest, counts=_sum(*((1.0, part) for part in parts)), host_bytes=host_bytes)


def subtract(whole: Measured, more: Measured, less: Measured, factor: float) -> Measured:
    """Return whole − factor · (more − less), with the memory of `whole`."""
    return replace(whole, counts=_sum((1.0, whole), (-factor, more), (factor, less)))


def extrapolate_depth(shallow: Measured, deep: Measured, factor: float) -> Measured:
    """Return shallow + factor · (deep − shallow), memory included.

    With few layers, the peak may be at another location than with many. So the live bytes are extrapolated for each
    location, and the highest result is the peak.
    """
    start_bytes = _extrapolate(shallow.start_bytes, deep.start_bytes, factor)
    end_bytes = _extrapolate(shallow.end_bytes, deep.end_bytes, factor)
    peaks = {
        location: tuple(_extrapolate(a, b, factor) for a, b in zip(shallow.peaks[location], live, strict=True))
        for location, live in deep.peaks.items()
        if location in shallow.peaks
    }
    counts = _sum((1 - factor, shallow), (factor, deep))
    # The timeline is that of the deeper stack, scaled to the extrapolated operators and bytes.
    width = counts.get(("kernels",), 0) / max(1, deep.counts.get(("kernels",), 0))
    highest = max(map(sum, peaks.values()))
    height = (highest - start_bytes) / max(1, sum(deep.peak) - deep.start_bytes)
    timeline = tuple(
        (round(number * width), start_bytes + round((live - deep.start_bytes) * height))
        for number, live in deep.timeline
    )
    host_bytes = _extrapolate(shallow.host_bytes, deep.host_bytes, factor)
    return Measured(deep.name, counts, peaks, start_bytes, end_bytes, host_bytes, timeline)


def combine_decoding(prompts: Measured, first: Measured, last: Measured, tokens: int, rounds: float) -> Measured:
    """Return what the generation of completions uses.

    Args:
        prompts: The use while the prompts are read.
        first: The use while the first token of each completion is generated.
        last: The same for the last token, which reads the longest cache. On average, a token uses the mean of both.
        tokens: The tokens of each completion.
        rounds: The number of times that the slots are filled.
    """
    counts = _sum((rounds, prompts), (rounds * tokens / 2, first), (rounds * tokens / 2, last))
    peaks: dict[str, Live] = {}
    for part in (prompts, first, last):
        peaks |= {location: live for location, live in part.peaks.items() if sum(live) > sum(peaks.get(location, ()))}
    timeline, start = [], 0
    for part in (prompts, first, last):
        timeline += [(start + number, live) for number, live in part.timeline]
        start += round(part.counts.get(("kernels",), 0))
    host_bytes = max(part.host_bytes for part in (prompts, first, last))
    return Measured(
        prompts.name, counts, peaks, prompts.start_bytes, prompts.start_bytes, host_bytes, thin_timeline(timeline)
    )


def thin_timeline(timeline: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return at most `_TIMELINE_POINTS` points, each the highest of the consecutive points that it replaces."""
    step = math.ceil(len(timeline) / _TIMELINE_POINTS)
    return tuple(max(timeline[i : i + step], key=lambda point: point[1]) for i in range(0, len(timeline), step))


def _sum(*parts: tuple[float, Measured]) -> dict[Count, float]:
    total: Counter[Count] = Counter()
    for weight, part in parts:
        for key, value in part.counts.items():
            total[key] += weight * value  # pyright: ignore[reportArgumentType]  # a Counter holds any numbers
    return dict(total)


def _extrapolate(shallow: int, deep: int, factor: float) -> int:
    return round(shallow + factor * (deep - shallow))
