"""Whether what a page trains learns in every step: the check of every block, example and command that trains.

`watch` observes the optimizer steps of a process, and computes the loss of each step's own batch again after the step.
It writes a line for each step to a file, and `check_learning` reads them. Steps that move no weight, such as those with
a learning rate of 0, therefore fail the check, whatever the page prints.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One optimizer step of a process.

    Attributes:
        trainer: Names the trainer: a run may train a policy and a critic.
        loss: The class of the loss.
        before: The loss of the step's batch.
        after: The loss of the same batch after the step; None if it says nothing, because the policy that is compared
            with itself has a ratio of 1.
        moved: By how much the weight that has moved furthest has moved.
        lr: The learning rate.
        grad_norm: The gradient's norm before clipping. It is 0 if there was nothing to learn from.
    """

    trainer: str
    loss: str
    before: float
    after: float | None
    moved: float
    lr: float
    grad_norm: float


def watch(file: Path) -> None:
    """Append the optimizer steps of this process to a file from now on."""
    from rl_megatron.training.trainer import Trainer

    step = Trainer.step

    def watched(self: Any, planned: Any, loss: Any) -> dict[str, float]:
        microbatches = planned.plan.microbatches
        weights = [weight for model_chunk in self.runner.model_chunks for weight in model_chunk.parameters()]
        old = [weight.detach().clone() for weight in weights]
        report = step(self, planned, loss)
        again = self.runner.train_step(microbatches, loss, planned.denominators, forward_only=True)  # gathers weights
        if int(os.environ.get("RANK", 0)) == 0:
            moved = max((new.detach() - was).abs().max().item() for new, was in zip(weights, old, strict=True))
            compared = all(key in microbatches[0].batch for key in loss.on_policy_keys)
            values = report["loss"], again["loss"] if compared else None, moved, report["lr"], report["grad_norm"]
            done = Step(f"{os.getpid()}.{id(self)}", type(loss).__name__, *values)
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(done)) + "\n")
        return report

    Trainer.step = watched


def watching(directory: Path, *others: Callable[[], object]) -> Callable[[], None]:
    """Return what a fork calls before it runs in a directory: `watch`, and other functions at module level."""
    return partial(_call_all, (partial(watch, steps_file(directory)), *others))


def _call_all(functions: tuple[Callable[[], object], ...]) -> None:
    for function in functions:
        function()


def steps_file(directory: Path) -> Path:
    """Return the file for the steps of what runs in a directory."""
    return directory / ".steps.jsonl"


def check_learning(place: str, directory: Path, too_short: Mapping[str, str], trains: bool = False) -> None:
    """Check that what was trained in a directory has learned in the steps after the first one, and forget the steps.

    Every step with a gradient has to move weights, and the steps together have to lower the losses of their batches by
    more than the first one does.

    Args:
        place: The block or command that has trained, for the message.
        directory: Where it ran.
        too_short: A regular expression of places → why they take fewer than two steps that have a gradient.
        trains: Whether there has to be a step.

    Raises:
        AssertionError: The steps after the first do nothing, or there are none and the place is not listed.
    """
    file = steps_file(directory)
    trainings: dict[str, list[Step]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        step = Step(**json.loads(line))
        trainings.setdefault(step.trainer, []).append(step)
    file.unlink(missing_ok=True)
    assert trainings or not trains, f"{place} has taken no optimizer step"
    for every in trainings.values():
        steps = [step for step in every if step.grad_norm > 0]
        if len(steps) < 2:
            assert any(re.search(pattern, place) for pattern in too_short), (
                f"{place}: {len(steps)} of {len(every)} steps with {every[0].loss} have a gradient, so that no test "
                "sees whether it learns: let it take more, or list it in TOO_SHORT_TO_LEARN of tests/docs/tables.py"
            )
        idle = [number for number, step in enumerate(steps) if number and step.moved == 0]
        assert not idle, f"{place}: steps {idle[:5]} move no weight, at learning rate {steps[idle[0]].lr}"
        falls = [step.before - step.after for step in steps if step.after is not None]
        assert len(falls) < 2 or sum(falls[1:]) > 1e-3 * abs(falls[0]), (
            f"{place}: {steps[0].loss} falls by {falls[0]:.4g} in the first step, and by {sum(falls[1:]):.4g} in the "
            f"{len(falls) - 1} steps after it; their learning rates are {[step.lr for step in steps[1:6]]}"
        )
