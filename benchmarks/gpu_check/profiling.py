"""What a device does during a call: how many kernels it runs, and how long it is busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Profile:
    """The kernels of a call (on the CPU: its operators), and the seconds in which at least one of them ran."""

    kernels: int
    busy_seconds: float


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
    return Profile(len(spans), union(spans) / 1e6)


def union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
