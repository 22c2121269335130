"""Compare pairs of steps of GRPO that have the same prompts and samples, one with and one without something.

The run is the GRPO stage of the quickstart, from random weights that hardly move. One step of each pair goes without
something, the first or the second at random, so that nothing that comes every few steps hits one kind more often. The
result is the median difference of the two steps of a pair, in time and in CPU time of rank 0. Beside it is the time in
the functions that are replaced. Other load on the machine changes CPU time less than time, and the time in these
functions least.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.runs.stage import Stage

STEPS, WARMUP = 82, 2
RUN = (
    "train", "algorithm=grpo", "data=arithmetic", "model=nano", f"train.steps={STEPS}", "train.eval_every=0",
    "algorithm.prompts_per_step=64", "algorithm.samples_per_prompt=8", "train.global_batch_size=512",
    "train.equal_rewards_steps=1000", "data.num_eval_examples=8", "optimizer.lr=1e-12",
    "output_dir=outputs/paired_steps", "resume=false",
)  # fmt: skip


class Switch:
    """Whether the current step has what is measured, and how long steps have taken.

    Attributes:
        is_on: Whether the current step has it.
        seconds: The seconds and the seconds of CPU time of steps with and without it.
        within: The seconds in the functions that are replaced and in what replaces them, with those in which they wait
            for other ranks.
    """

    def __init__(self) -> None:
        """Start with what is measured."""
        self.is_on = True
        self._chance = random.Random(0)  # the same on all ranks
        self.began = _now()
        self.seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self.within = {True: 0.0, False: 0.0}

    def step_ended(self, step: int) -> None:
        """Note the time of a step, and turn the switch."""
        now = _now()
        if step == WARMUP:
            self.within = {True: 0.0, False: 0.0}
        if step > WARMUP:
            self.seconds[self.is_on].append((now[0] - self.began[0], now[1] - self.began[1]))
        is_first_of_pair = (step - WARMUP) % 2 == 1
        self.is_on = not self.is_on if is_first_of_pair else self._chance.random() < 0.5
        self.began = now


def _now() -> tuple[float, float]:
    """Return the time and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def when_on(switch: Switch, owner: Any, name: str, otherwise: Callable[..., Any]) -> None:
    """Replace a function by one that counts its time, and that calls `otherwise` in steps without what is measured."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = (original if switch.is_on else otherwise)(*arguments, **named)
        switch.within[switch.is_on] += time.perf_counter() - began
        return result

    setattr(owner, name, replaced)


def parser(description: str | None, choices: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line: what is compared, and overrides of the run's configuration."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", choices=choices)
    made.add_argument("overrides", nargs="*", help="overrides of the run's configuration")
    return made


def compare(what: str, measure: Callable[[Switch], None], overrides: Sequence[str]) -> int:
    """Run the steps, and print on rank 0 what is added to a step. Return the status of the run.

    Args:
        what: What is compared, in one word.
        measure: Replaces functions, so that steps go without it while the switch is off.
        overrides: Overrides of the run's configuration.
    """
    from rl_megatron.cli import main as rl_megatron

    switch = Switch()
    measure(switch)
    record = Stage.record
    Stage.batch_number = lambda stage, step: max(1, (step - WARMUP + 1) // 2)  # type: ignore[method-assign]

    def timed(stage: Stage, step: int, report: dict[str, float]) -> None:
        record(stage, step, report)
        switch.step_ended(step)

    Stage.record = timed  # type: ignore[method-assign]
    status = rl_megatron([*RUN, *overrides])
    if status == 0 and log.is_main_rank():
        on, off = switch.seconds[True], switch.seconds[False]
        for place, name in enumerate(("time", "CPU time")):
            between = [one[place] - other[place] for one, other in zip(on, off, strict=True)]
            cost, usual = statistics.median(between), statistics.median(each[place] for each in off)
            quarters = statistics.quantiles(between, n=4)
            error = 0.93 * (quarters[2] - quarters[0]) / len(between) ** 0.5  # of a median, if the values were normal
            adds = f"{what} adds {cost * 1000:.2f} ± {error * 1000:.2f} ms"
            print(f"{len(on)} pairs of steps of {usual * 1000:.1f} ms of {name}: {adds}")
            print(f"ratio {1 + cost / usual:.4f} ± {error / usual:.4f}")
        usual = statistics.median(seconds for seconds, _ in off)
        within, without = (switch.within[is_on] / len(on) for is_on in (True, False))
        print(
            f"functions of {what} take {within * 1000:.2f} ms of a step, {within / usual:.2%}, and "
            f"{without * 1000:.2f} ms without it"
        )
    return status
