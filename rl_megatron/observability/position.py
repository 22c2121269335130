"""`Position`: where in a run this process is, for its heartbeat. The main thread only sets attributes."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A copy of a position.

    Attributes:
        stage: The stage's name; empty before the first one.
        stage_number: How many stages were begun.
        step: The step, from 1; 0 before the first one.
        steps: How many steps the stage has.
        phase: The innermost phase that runs, or None.
        phase_number: How often the phase changed since the stage began.
        done: How many items of a long call are done.
        total: How many it has; 0 if nothing was counted in this phase.
        noun: What the items are, such as "microbatches".
    """

    stage: str = ""
    stage_number: int = 0
    step: int = 0
    steps: int = 0
    phase: str | None = None
    phase_number: int = 0
    done: int = 0
    total: int = 0
    noun: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """Return what is smaller on a rank that is behind, whose microbatches are not counted."""
        return self.stage_number, self.step, self.phase_number

    def describe(self) -> str:
        """Return the place in words."""
        if not self.stage:
            return "before the first stage"
        parts = [f"stage {self.stage}", f"step {self.step} of {self.steps}"]
        parts.append(f"phase {self.phase}" if self.phase else "between two phases")
        if self.total:
            parts.append(f"{self.done} of {self.total} {self.noun}")
        return ", ".join(parts)


class Position:
    """Where the main thread is. Every change of it, and every progress report, is a sign of life."""

    def __init__(self) -> None:
        self.place = Place()
        self.changes = 0

    def begin_stage(self, stage: str, steps: int) -> None:
        """Begin a stage of so many steps."""
        self._become(Place(stage=stage, stage_number=self.place.stage_number + 1, steps=steps))

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        self._become(self.place._replace(step=step))

    def enter(self, phase: str | None) -> None:
        """Begin a phase; None stands for the time between two phases. It is an observer of `PhaseTimer`."""
        number = self.place.phase_number + 1
        self._become(self.place._replace(phase=phase, phase_number=number, done=0, total=0, noun=""))

    def progress(self, done: int, total: int, noun: str, detail: str = "") -> None:
        """Take a progress report (`log.report_progress`)."""
        self._become(self.place._replace(done=done, total=total, noun=noun))

    def _become(self, place: Place) -> None:
        self.place = place
        self.changes += 1
