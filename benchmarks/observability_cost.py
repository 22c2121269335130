"""Measure what it costs to measure: steps of GRPO with and without the metrics of costs and distributions.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.observability_cost parallel.tensor=2

The run is the GRPO stage of the quickstart, from random weights. Every second step is taken without timing phases,
counting tokens and operations, reading peak memory, and distributions of rewards, lengths and advantages. The result is
the ratio of the medians of both kinds of steps. Other arguments are overrides.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rl_megatron import log
from rl_megatron.algorithms import rollout_statistics
from rl_megatron.algorithms.stage import Stage
from rl_megatron.algorithms.step_meter import StepMeter
from rl_megatron.execution.phase_timer import PhaseTimer

STEPS, WARMUP = 122, 2
RUN = (
    "train", "algorithm=grpo", "data=arithmetic", "model=nano", f"train.steps={STEPS}", "train.eval_every=0",
    "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4", "generation.max_new_tokens=8",
    "train.equal_rewards_steps=1000", "data.num_eval_examples=8",
    "output_dir=outputs/observability_cost", "resume=false",
)  # fmt: skip


class Switch:
    """Whether the current step measures, and how long steps have taken."""

    def __init__(self) -> None:
        self.is_on = True
        self.began = time.perf_counter()
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def step_ended(self, step: int) -> None:
        """Note the time of a step, and turn the switch."""
        now = time.perf_counter()
        if step > WARMUP:
            self.seconds[self.is_on].append(now - self.began)
        self.began, self.is_on = now, not self.is_on


def when_on(switch: Switch, owner: Any, name: str, otherwise: Callable[..., Any]) -> None:
    """Replace a function by one that calls `otherwise` in steps that do not measure."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **named: (original if switch.is_on else otherwise)(*args, **named))


def main(overrides: list[str]) -> int:
    """Run the steps, and print the medians and their ratio on rank 0."""
    from rl_megatron.cli import main as rl_megatron

    switch = Switch()
    when_on(switch, PhaseTimer, "begin", lambda timer, name: timer._path)
    when_on(switch, StepMeter, "learned_from", lambda *args, **named: None)
    when_on(switch, StepMeter, "metrics", lambda meter: {})
    when_on(switch, rollout_statistics, "_distribution", lambda name, values: {})
    record = Stage.record

    def timed(stage: Stage, step: int, report: dict[str, float]) -> None:
        record(stage, step, report)
        switch.step_ended(step)

    Stage.record = timed  # type: ignore[method-assign]
    status = rl_megatron([*RUN, *overrides])
    if status == 0 and log.is_main_rank():
        on, off = (statistics.median(switch.seconds[is_on]) for is_on in (True, False))
        print(
            f"{len(switch.seconds[True])} steps each: {on * 1000:.2f} ms with all metrics, {off * 1000:.2f} ms without"
        )
        print(f"ratio {on / off:.4f}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
