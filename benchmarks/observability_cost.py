"""Measure what it costs to measure: steps of GRPO with and without the metrics of costs and distributions.

    torchrun --nproc-per-node 2 -m benchmarks.observability_cost metrics parallel.tensor=2
    torchrun --nproc-per-node 2 -m benchmarks.observability_cost blocked_sink parallel.tensor=2
    torchrun --nproc-per-node 2 -m benchmarks.observability_cost raising_sink parallel.tensor=2

It prints what measuring adds to a step, from pairs of steps with the same samples (see paired_steps.py). With
`metrics`, the steps without go without timing phases, counting tokens and operations, reading peak memory, and
distributions of rewards, lengths and advantages. With `blocked_sink` and `raising_sink`, they do not give their metrics
to a sink of which every call takes 60 s, or raises an error. Other arguments are overrides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.paired_steps import Switch, compare, parser, when_on
from rl_megatron.observability.sinks import MetricLine, QueuedSink
from rl_megatron.rollouts import statistics
from rl_megatron.runs import output as run_output
from rl_megatron.runs.step_meter import StepMeter
from rl_megatron.timing import PhaseTimer


def measure_metrics(switch: Switch) -> None:
    """Let every second step go without the metrics of costs and of distributions."""
    when_on(switch, PhaseTimer, "begin", lambda timer, name: timer.phases)
    when_on(switch, PhaseTimer, "end", lambda timer, outer: None)
    when_on(switch, StepMeter, "count_step", lambda *args, **named: None)
    when_on(switch, StepMeter, "metrics", lambda meter: {})
    when_on(switch, statistics, "describe_distribution", lambda *arguments: {})


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
    run_output.prepare_service_sinks = lambda *arguments: {"benchmark": sink}  # type: ignore[assignment]
    when_on(switch, QueuedSink, "write", lambda queued, line: None)


MEASURED: dict[str, Callable[[Switch], None]] = {
    "metrics": measure_metrics,
    "blocked_sink": partial(measure_sink, BlockedSink),
    "raising_sink": partial(measure_sink, RaisingSink),
}


def main(arguments: list[str]) -> int:
    """Run the steps, and print on rank 0 what is added to a step."""
    given = parser(__doc__, list(MEASURED)).parse_args(arguments)
    return compare(given.what, MEASURED[given.what], given.overrides)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
