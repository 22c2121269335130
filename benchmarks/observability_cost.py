"""Measure what it costs to measure: steps of GRPO with and without the metrics of costs and distributions.

    torchrun --nproc-per-node 2 benchmarks/observability_cost.py metrics parallel.tensor=2
    torchrun --nproc-per-node 2 benchmarks/observability_cost.py blocked_sink parallel.tensor=2
    torchrun --nproc-per-node 2 benchmarks/observability_cost.py raising_sink parallel.tensor=2

The run is the GRPO stage of the quickstart, from random weights. Every second step goes without something, and the
result is the median difference of the two steps of a pair. Beside it is the time in the functions that measure, which
other load on the machine changes less. With `metrics`, these steps go without timing phases, counting tokens and
operations, reading peak memory, and distributions of rewards, lengths and advantages. With `blocked_sink` and
`raising_sink`, they do not give their metrics to a sink of which every call takes 60 s, or raises an error. Other
arguments are overrides.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rl_megatron import log
from rl_megatron.algorithms import rollout_statistics, run_output
from rl_megatron.algorithms.stage import Stage
from rl_megatron.algorithms.step_meter import StepMeter
from rl_megatron.execution.phase_timer import PhaseTimer
from rl_megatron.observability.queued_sink import QueuedSink
from rl_megatron.observability.sinks import MetricLine

STEPS, WARMUP = 82, 2
RUN = (
    "train", "algorithm=grpo", "data=arithmetic", "model=nano", f"train.steps={STEPS}", "train.eval_every=0",
    "algorithm.prompts_per_step=64", "algorithm.samples_per_prompt=8", "train.global_batch_size=512",
    "train.equal_rewards_steps=1000", "data.num_eval_examples=8",
    "output_dir=outputs/observability_cost", "resume=false",
)  # fmt: skip


class Switch:
    """Whether the current step has what is measured, and how long steps have taken."""

    def __init__(self) -> None:
        self.is_on = True
        self.began = time.perf_counter()
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.within = 0.0  # seconds in functions that measure, with those in which they wait for other ranks

    def step_ended(self, step: int) -> None:
        """Note the time of a step, and turn the switch."""
        now = time.perf_counter()
        if step > WARMUP:
            self.seconds[self.is_on].append(now - self.began)
        self.began, self.is_on = now, not self.is_on


def when_on(switch: Switch, owner: Any, name: str, otherwise: Callable[..., Any]) -> None:
    """Replace a function by one that counts its time, and that calls `otherwise` in steps without what is measured."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = (original if switch.is_on else otherwise)(*arguments, **named)
        switch.within += time.perf_counter() - began
        return result

    setattr(owner, name, replaced)


def measure_metrics(switch: Switch) -> None:
    """Let every second step go without the metrics of costs and of distributions."""
    when_on(switch, PhaseTimer, "begin", lambda timer, name: timer._path)
    when_on(switch, PhaseTimer, "end", lambda timer, outer: None)
    when_on(switch, StepMeter, "learned_from", lambda *args, **named: None)
    when_on(switch, StepMeter, "metrics", lambda meter: {})
    when_on(switch, rollout_statistics, "_distribution", lambda name, values: {})


class BlockedSink:
    """A sink of which every call takes a minute."""

    def begin_stage(self, stage: str, start: int) -> None:
        time.sleep(60)

    def write(self, line: MetricLine) -> None:
        time.sleep(60)

    def close(self) -> None:
        time.sleep(60)


class RaisingSink(BlockedSink):
    """A sink of which every call raises an error."""

    def begin_stage(self, stage: str, start: int) -> None:
        raise ConnectionError("the service is offline")

    def write(self, line: MetricLine) -> None:
        raise ConnectionError("the service is offline")

    def close(self) -> None:
        raise ConnectionError("the service is offline")


def measure_sink(sink: type[BlockedSink], switch: Switch) -> None:
    """Let every second step give its metrics to a sink."""
    run_output.service_sinks = lambda *arguments: {"benchmark": sink}  # type: ignore[assignment]
    when_on(switch, QueuedSink, "write", lambda queued, line: None)


MEASURED: dict[str, Callable[[Switch], None]] = {
    "metrics": measure_metrics,
    "blocked_sink": partial(measure_sink, BlockedSink),
    "raising_sink": partial(measure_sink, RaisingSink),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", choices=MEASURED)
    made.add_argument("overrides", nargs="*", help="overrides of the run's configuration")
    return made


def main(arguments: list[str]) -> int:
    """Run the steps, and print on rank 0 what is added to a step."""
    from rl_megatron.cli import main as rl_megatron

    given = parser().parse_args(arguments)
    switch = Switch()
    MEASURED[given.what](switch)
    record = Stage.record

    def timed(stage: Stage, step: int, report: dict[str, float]) -> None:
        record(stage, step, report)
        switch.step_ended(step)

    Stage.record = timed  # type: ignore[method-assign]
    status = rl_megatron([*RUN, *given.overrides])
    if status == 0 and log.is_main_rank():
        on, off = switch.seconds[True], switch.seconds[False]
        between = [one - other for one, other in zip(on, off, strict=True)]  # of steps beside each other
        cost, usual = statistics.median(between), statistics.median(off)
        quarters = statistics.quantiles(between, n=4)
        error = 0.93 * (quarters[2] - quarters[0]) / len(between) ** 0.5  # of a median, if the values were normal
        adds = f"{given.what} adds {cost * 1000:.2f} ± {error * 1000:.2f} ms"
        print(f"{len(on)} pairs of steps of {usual * 1000:.1f} ms: {adds}")
        print(f"ratio {1 + cost / usual:.4f} ± {error / usual:.4f}")
        within = switch.within / (len(on) + WARMUP / 2)
        print(f"functions of {given.what} take {within * 1000:.2f} ms of a step, {within / usual:.2%}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
