"""Run one case: check and count every variant once, then time them alternately."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.logprobs.cases import Case, Exact, Problem
from benchmarks.logprobs.counters import Counters
from benchmarks.logprobs.variants import Outputs, Variant

_COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}


@dataclass
class Result:
    """The figures of one variant in one case; None if a figure is not known. `failed` says why it could not run."""

    variant: str
    is_ours: bool = False
    seconds: float | None = None
    fastest_seconds: float | None = None
    forward_seconds: float | None = None
    ratio_to_ours: float | None = None
    ratio_to_floor: float | None = None  # relative to the floor's bytes at the copy bandwidth, or to the products alone
    bytes_per_logit: float | None = None
    memory_bytes_per_logit: float | None = None  # to and from tensors that are larger than a cache
    peak_extra_bytes_per_token: float | None = None
    collectives_forward: int | None = None
    collectives_backward: int | None = None
    logprob_error: float | None = None
    gradient_error: float | None = None
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Machine:
    """The machine of the race."""

    device: torch.device
    group: dist.ProcessGroup
    bandwidth: float  # bytes read and written per second by a large copy

    @classmethod
    def measure(cls, device: torch.device, group: dist.ProcessGroup, repetitions: int = 20) -> Machine:
        # Random numbers: a GPU may copy zeros faster.
        source = torch.randn(_COPIED_BYTES[device.type] // 2, dtype=torch.bfloat16, device=device)
        copy = torch.empty_like(source).copy_(source)
        seconds = []
        for _ in range(repetitions):
            stopwatch = Stopwatch(device)
            copy.copy_(source)
            stopwatch.lap()
            seconds += stopwatch.seconds()
        return cls(device, group, 2 * source.nbytes / statistics.median(seconds))


class Stopwatch:
    """A stopwatch in seconds. On a GPU it uses the device's clock, which excludes the time to launch operations."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list = []
        self.lap()

    def lap(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        if self._on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]


def race(
    case: Case, variants: Sequence[Variant], machine: Machine, repetitions: int, progress: Callable[[str], None]
) -> list[Result]:
    """Return the results of the variants that can run the case, in order. Collective over the case's ranks."""
    problem = Problem.make(case, machine.group, machine.device)
    exact = Exact.of(problem)
    results, runners = {}, {}
    for variant in variants:
        if not variant.takes(case):
            continue
        progress(f"{case.title}: {variant.name}, counting")
        results[variant.name] = result = Result(variant.name, variant.is_ours)
        try:
            _check_and_count(variant, problem, exact, result)
            _timed(variant, problem)  # the first call compiles and fills caches
        except (RuntimeError, ImportError, TypeError, ValueError, AssertionError) as error:
            result.failed = "out of memory" if isinstance(error, torch.OutOfMemoryError) else _first_line(error)
        else:
            runners[variant.name] = variant
    laps: dict[str, list[list[float]]] = {name: [] for name in runners}
    for repetition in range(repetitions):
        progress(f"{case.title}: repetition {repetition + 1} of {repetitions}")
        names = list(runners)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)] if names else []:
            laps[name].append(_timed(runners[name], problem))
    for name, measured in laps.items():
        seconds = _slowest_rank(measured, problem)
        results[name].seconds = statistics.median(map(sum, seconds))
        results[name].fastest_seconds = min(map(sum, seconds))
        results[name].forward_seconds = statistics.median(forward for forward, _ in seconds)
    _relate(list(results.values()), case, variants, machine)
    return list(results.values())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _inputs(problem: Problem) -> tuple[Tensor, ...]:
    """Return the tensors for a variant: new logits that are not a leaf, or leaves of hidden states and weight."""
    if problem.logits is None:
        return tuple(x.detach().requires_grad_() for x in (problem.hidden, problem.weight))
    if problem.case.mode == "inference":
        return (problem.logits.clone(),)
    return (problem.logits.detach().requires_grad_().clone(),)


def _backward(outputs: Outputs, inputs: tuple[Tensor, ...], problem: Problem) -> tuple[Tensor, ...]:
    upstream = [
        gradient.to(output.dtype) if output.dim() else torch.ones_like(output)
        for output, gradient in zip(outputs, problem.upstream, strict=True)
    ]
    return torch.autograd.grad(outputs, inputs, upstream)


def _timed(variant: Variant, problem: Problem) -> list[float]:
    """Return the seconds of forward and of backward."""
    inputs, device = _inputs(problem), problem.targets.device
    with torch.set_grad_enabled(problem.case.mode != "inference"):
        if problem.case.tensor > 1:
            dist.barrier(group=problem.group)
        stopwatch = Stopwatch(device)
        outputs = variant.run(problem, *inputs)
        stopwatch.lap()
        if problem.case.mode != "inference":
            _backward(outputs, inputs, problem)
        stopwatch.lap()
    return stopwatch.seconds()


def _slowest_rank(laps: list[list[float]], problem: Problem) -> list[list[float]]:
    times = torch.tensor(laps, dtype=torch.float64, device=problem.targets.device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=problem.group)
    return times.tolist()


def _check_and_count(variant: Variant, problem: Problem, exact: Exact, result: Result) -> None:
    case, inputs, counters = problem.case, _inputs(problem), Counters()
    on_gpu = problem.targets.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    gradients: tuple[Tensor, ...] = ()
    with torch.set_grad_enabled(case.mode != "inference"), counters:
        outputs = variant.run(problem, *inputs)
        result.collectives_forward = counters.collectives
        if case.mode != "inference":
            gradients = _backward(outputs, inputs, problem)
    result.collectives_backward = counters.collectives - result.collectives_forward
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else counters.peak
    result.peak_extra_bytes_per_token = peak / case.tokens
    if variant.bytes_per_logit is None:
        result.bytes_per_logit = counters.bytes_moved / case.local_logits
        result.memory_bytes_per_logit = counters.memory_bytes / case.local_logits
    else:
        result.bytes_per_logit = result.memory_bytes_per_logit = variant.bytes_per_logit(case)
    result.logprob_error = None if variant.is_products else exact.logprob_error(outputs[0].detach())
    if gradients and case.mode != "fused":
        result.gradient_error = exact.gradient_error(gradients[0])


def _relate(results: list[Result], case: Case, variants: Sequence[Variant], machine: Machine) -> None:
    """Return the ratios of every variant to ours, and of ours to the lower bound."""
    timed = {result.variant: result for result in results if result.seconds is not None}
    ours = next((result for result in timed.values() if result.is_ours), None)
    for result in timed.values():
        if ours is not None:
            result.ratio_to_ours = result.seconds / ours.seconds
    if case.mode == "fused":
        floor = next((timed[v.name].seconds for v in variants if v.is_products and v.name in timed), None)
    else:
        floor = case.floor_bytes * case.local_logits / machine.bandwidth
    for result in timed.values():
        result.ratio_to_floor = None if floor is None else result.seconds / floor
