"""`GroupQueue`: which groups of trajectories run, wait to be learned from, or are dropped, in asynchronous training.

The prompts of a stage form a stream, and a group is the trajectories of one prompt of the stream. The queue only
selects groups. It runs nothing and has no clock, so its rules can be tested without an engine.

Ages are counted in steps. The weights of step s are those with which step s begins. A token that they sampled has age
t − s when step t learns from it, and the age of a group is that of its oldest token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOO_OLD, EQUAL_REWARDS, NOT_IN_TIME = "too old", "equal rewards", "not in time"  # why a group is dropped


@dataclass(frozen=True)
class QueueRules:
    """The limits of the number and the ages of groups.

    Attributes:
        per_step: The number of groups that a step learns from.
        num_steps: The last step.
        max_age: The largest age of a group, in steps.
        over_sampling: How many groups are made for a step, as a multiple of `per_step`. With 1, every group is learned
            from, in the order of the stream.
        keeps_unfinished: With over-sampling, what happens to groups for which a step did not wait: if True, they
            continue and later steps learn from them; if False, they are dropped.
        rounds: With `drops_equal`, how many groups may be made for a step, as a multiple of `per_step`.
        drops_equal: Whether groups whose rewards are all equal are dropped and replaced.
    """

    per_step: int
    num_steps: int
    max_age: int
    over_sampling: float = 1.0
    keeps_unfinished: bool = True
    rounds: int = 1
    drops_equal: bool = False

    @property
    def for_next_step(self) -> int:
        """Return how many groups are made for the next step."""
        return math.ceil(self.per_step * self.over_sampling)


@dataclass
class _Group:
    started: int  # the step whose weights the engine had when the group was started
    oldest: int | None = None  # the step whose weights sampled its oldest token; None until it is complete


@dataclass(frozen=True)
class EndedGroups:
    """The groups that have ended since the last step.

    Attributes:
        used: The groups that the step learns from, in the order of the stream, with their ages.
        dropped: Further groups that ended, with the reason.
        running: The dropped groups that still run.
        num_refilled: The number of groups that were started to replace dropped ones.
    """

    used: Mapping[int, int]
    dropped: Mapping[int, str]
    running: Sequence[int]
    num_refilled: int


class GroupQueue:
    """The groups of a stage. A group is named by its position in the stream, from 0 on.

    The queue starts as many groups as coming steps need: those of the next step, and of further steps for which the
    engine's weights are new enough. Without over-sampling, every group is therefore learned from before it is too old,
    however long it takes.
    """

    def __init__(self, rules: QueueRules):
        """Start before the first step, without weights."""
        self._rules = rules
        self._groups: dict[int, _Group] = {}  # those that were started, in the order of the stream
        self._again: list[int] = []  # groups to start before the next one of the stream
        self._next = 0
        self._step = 1  # the next step that takes groups
        self._weights: int | None = None  # the step of the weights that the engine has
        self._dropped: dict[int, str] = {}
        self._still_running: list[int] = []  # the dropped groups that still run
        self._num_equal = self._num_missing = 0  # dropped for equal rewards: with a replacement, and without
        self._num_to_refill = self._num_refilled = 0

    @property
    def next_step(self) -> int:
        return self._step

    @property
    def num_running(self) -> int:
        return sum(group.oldest is None for group in self._groups.values())

    @property
    def num_ready(self) -> int:
        """Return the number of groups that wait to be learned from."""
        return len(self._groups) - self.num_running

    def note_weights(self, step: int) -> None:
        """Record that the engine has the weights of a step."""
        self._weights = step

    def start(self) -> int | None:
        """Return the next group to start, or None if no more may run now."""
        if self._weights is None or len(self._groups) >= self._count_capacity(self._weights):
            return None
        if self._again:
            number = self._again.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        self._groups[number] = _Group(self._weights)
        self._groups = dict(sorted(self._groups.items()))
        if self._num_to_refill:
            self._num_to_refill, self._num_refilled = self._num_to_refill - 1, self._num_refilled + 1
        return number

    def complete(self, number: int, oldest: int, differs: bool = True) -> bool:
        """Record a complete group; return False if it is dropped. `oldest` is the step whose weights are its oldest."""
        self._groups[number].oldest = oldest
        rules = self._rules
        if differs or not rules.drops_equal:
            return True
        if self._num_equal < (rules.rounds - 1) * rules.per_step * self._step:
            self._num_equal += 1
            self._num_to_refill += 1
        elif self._num_missing + 1 < rules.per_step:  # the step learns from fewer groups, but from at least one
            self._num_missing += 1
        else:
            return True
        self._drop(number, EQUAL_REWARDS)
        return False

    def is_ready(self) -> bool:
        """Return whether the next step can take its groups."""
        if self._rules.over_sampling > 1:
            return len(self._find_complete()) >= self._wanted
        first = list(self._groups.values())[: self._wanted]
        return len(first) == self._wanted and all(group.oldest is not None for group in first)

    def take(self) -> EndedGroups:
        """Return the groups of the next step, and the other groups that have ended; `is_ready` must be True."""
        step, rules = self._step, self._rules
        used = {number: step - oldest for number, oldest in self._find_complete()[: self._wanted]}
        for number in used:
            del self._groups[number]
        self._step, self._num_missing = step + 1, 0
        if not rules.keeps_unfinished:
            num_extra = max(0, len(self._groups) - rules.per_step * rules.max_age)
            for number in list(self._groups)[:num_extra]:
                if self._groups[number].oldest is None:
                    self._drop(number, NOT_IN_TIME)
        for number, group in list(self._groups.items()):
            if self._step - (group.started if group.oldest is None else group.oldest) > rules.max_age:
                self._drop(number, TOO_OLD)
        ended = EndedGroups(used, self._dropped, self._still_running, self._num_refilled)
        self._num_to_refill += len(self._dropped) - list(self._dropped.values()).count(EQUAL_REWARDS)
        self._dropped, self._still_running, self._num_refilled = {}, [], 0
        return ended

    # --- runs that are continued ---

    def state_dict(self) -> dict[str, Any]:
        """Return the groups that are left, as plain values. Groups that were started begin again after a resume."""
        left = sorted([*self._groups, *self._again])
        return {"step": self._step, "next": self._next, "again": left, "num_equal": self._num_equal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; its groups are started again."""
        self._step, self._next, self._num_equal = state["step"], state["next"], state["num_equal"]
        self._groups, self._again = {}, list(state["again"])

    def replay(self, ended: Iterable[int]) -> None:
        """Skip to the next step. `ended` are the groups that the log lists as learned from or dropped in this step."""
        for number in ended:
            self._again += range(self._next, number + 1)
            self._next = max(self._next, number + 1)
            self._again.remove(number)
        self._step += 1

    def leave_out(self, num_steps: int) -> None:
        """Leave out the groups of the next `num_steps` steps. Call this before any group is started."""
        for _ in range(num_steps * self._rules.per_step):
            if self._again:
                self._again.pop(0)
            else:
                self._next += 1

    # ---

    @property
    def _wanted(self) -> int:
        return self._rules.per_step - self._num_missing

    def _count_capacity(self, weights: int) -> int:
        """Return how many groups may run or wait while the engine has the weights of step `weights`."""
        rules = self._rules
        steps_ahead = min(weights + rules.max_age, rules.num_steps) - self._step
        if steps_ahead < 0:  # the weights are too old for the next step, or no step is left
            return 0
        return rules.for_next_step - self._num_missing + rules.per_step * steps_ahead

    def _find_complete(self) -> list[tuple[int, int]]:
        """Return (number, step of its oldest weights) of each complete group, in the order of the stream."""
        return [(number, group.oldest) for number, group in self._groups.items() if group.oldest is not None]

    def _drop(self, number: int, reason: str) -> None:
        if self._groups.pop(number).oldest is None:
            self._still_running.append(number)
        self._dropped[number] = reason
