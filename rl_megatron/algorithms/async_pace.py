"""`AsyncPace`: warns if the rollout engine cannot keep up with training within the bound on ages."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

_STEPS = 5  # how many steps a warning is about
_MOST_WAITING = 0.5  # the share of time in which training may wait
_MOST_IDLE = 0.1  # an engine that is idle for longer is held back by the bound
_MOST_TOO_OLD = 0.25  # the share of groups that may be dropped as too old


class AsyncPace:
    """What the last steps of an asynchronous stage measured. It says each of two things once.

    The bound always holds, because groups wait for it and training waits for groups. A bound that does not suit the
    engine's speed therefore costs time, or with over-sampling the groups that take longest.
    """

    def __init__(self, max_age: int, per_step: int):
        """Start without steps.

        Args:
            max_age: `rollout.max_trajectory_age_steps`.
            per_step: The number of groups that a step learns from.
        """
        self._max_age, self._per_step = max_age, per_step
        self._steps: deque[Mapping[str, float]] = deque(maxlen=_STEPS)
        self._has_said_slow = self._has_said_dropped = False

    def note(self, metrics: Mapping[str, float]) -> list[str]:
        """Record a step, and return what is to be said now.

        Args:
            metrics: `trainer_idle`, `engine_idle` and `dropped_groups_too_old`. A step without the first, such as the
                first one of a stage, does not count.
        """
        if "trainer_idle" not in metrics:
            return []
        self._steps.append(metrics)
        if len(self._steps) < _STEPS:
            return []
        said = []
        if not self._has_said_slow and (slow := self._slow()) is not None:
            self._has_said_slow = True
            said.append(slow)
        if not self._has_said_dropped and (dropped := self._dropped()) is not None:
            self._has_said_dropped = True
            said.append(dropped)
        return said

    def _slow(self) -> str | None:
        waits, idle = (self._median(name) for name in ("trainer_idle", "engine_idle"))
        if waits <= _MOST_WAITING:
            return None
        ratio = 1.0 / max(1.0 - waits, 1e-2)
        said = (
            f"rollout.max_trajectory_age_steps={self._max_age}: training waited for trajectories for {waits:.0%} of "
            f"the last {_STEPS} steps, because those of a step take {ratio:.1f} times as long as training on them"
        )
        if idle > _MOST_IDLE:
            return (
                f"{said}. The engine had no request for {idle:.0%} of that time, as no more groups may run: raise the "
                "bound"
            )
        return f"{said}. The engine was busy, so a higher bound does not help: use more engines, or shorter completions"

    def _dropped(self) -> str | None:
        too_old = sum(step["dropped_groups_too_old"] for step in self._steps)
        made = too_old + self._per_step * len(self._steps)
        if too_old <= _MOST_TOO_OLD * made:
            return None
        return (
            f"rollout.max_trajectory_age_steps={self._max_age}: {too_old:.0f} of {made:.0f} groups of the last "
            f"{_STEPS} steps were dropped as too old, so that prompts with long trajectories are hardly learned from; "
            "raise the bound, or set rollout.over_sampling=1, with which no group is dropped for its age"
        )

    def _median(self, name: str) -> float:
        return statistics.median(step[name] for step in self._steps)
