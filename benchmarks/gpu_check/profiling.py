"""What a device does during a call: how many kernels it runs, and how long it is busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_LONGEST = 30  # kernels that are named


@dataclass(frozen=True)
class Profile:
    """The kernels of a call (on the CPU: its operators), and the seconds in which at least one of them ran.

    Attributes:
        kernels: How many there were.
        busy_seconds: The seconds.
        longest: (name, number, seconds together) of those that took longest, the longest first.
    """

    kernels: int
    busy_seconds: float
    longest: list[tuple[str, int, float]]

    def table(self) -> str:
        """Return a line for each of the longest."""
        return "".join(f"{1e3 * seconds:10.3f} ms {number:6}  {name}\n" for name, number, seconds in self.longest)


def profile_of(call: Callable[[], object], device: torch.device) -> Profile:
    """Return what the device does during a call."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    with profile(activities=[activity]) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.events() or []
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            found[event.name].append(event.time_range.elapsed_us() / 1e6)
    longest = sorted(((name, len(each), sum(each)) for name, each in found.items()), key=lambda entry: -entry[2])
    return Profile(len(spans), union(spans) / 1e6, longest[:_LONGEST])


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
