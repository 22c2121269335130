"""The pace of an asynchronous stage: why training or the engine waits, and which division of devices balances them."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rl_megatron import log
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.schema import StageConfig

_STEPS = 5  # the number of steps that a warning is about
_MOST_WAITING = 0.5  # the share of time in which training may wait without a warning
_MOST_IDLE = 0.1  # above this share of idle time, the bound on ages limits the engine
_MOST_TOO_OLD = 0.25  # the share of groups that may be dropped as too old without a warning
# A step must become shorter by this share before another division is better than the one that was measured.
_LEAST_GAIN = 0.05


class AsyncPace:
    """The measurements of the last steps of an asynchronous stage, with two warnings, each of which is logged once.

    No age exceeds `rollout.max_trajectory_age_steps`, because groups wait to start and training waits for groups. A
    bound that does not suit the engine's speed therefore costs time or, with over-sampling, drops the slowest groups.

    Attributes:
        devices: The metrics `trainer_devices` and `engine_devices`.
    """

    def __init__(self, name: str, stage: StageConfig, per_step: int, num_ranks: int):
        """Start with no recorded steps. Each step learns from `per_step` groups."""
        self._name, self._last_step = name, stage.train.steps
        self._max_age, self._per_step = stage.rollout.max_trajectory_age_steps, per_step
        self._balance = DeviceBalance()
        self._steps: deque[Mapping[str, float]] = deque(maxlen=_STEPS)
        self._has_said_slow = self._has_said_dropped = False
        engine = count_engine_devices(stage.generation, count_training_nodes(num_ranks))
        self.devices = {"trainer_devices": float(num_ranks), "engine_devices": float(engine)}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step; rank 0 logs warnings, and a report after the last step.

        The metrics are `trainer_idle`, `engine_idle` and `dropped_groups_too_old`. A step without `trainer_idle`, such
        as the first step of a stage, is ignored.
        """
        self._balance.note(metrics)
        if not log.is_main_rank():
            return
        for warning in self._find_warnings(metrics):
            log.LOGGER.warning("stage %s: %s", self._name, warning)
        if step == self._last_step and (report := self._balance.report()) is not None:
            log.LOGGER.info("stage %s: %s", self._name, report)

    def _find_warnings(self, metrics: Mapping[str, float]) -> list[str]:
        warnings = []
        if "trainer_idle" not in metrics:
            return warnings
        self._steps.append(metrics)
        if len(self._steps) < _STEPS:
            return warnings
        if not self._has_said_slow and (slow := self._warn_slow()) is not None:
            self._has_said_slow = True
            warnings.append(slow)
        if not self._has_said_dropped and (dropped := self._warn_dropped()) is not None:
            self._has_said_dropped = True
            warnings.append(dropped)
        return warnings

    def _warn_slow(self) -> str | None:
        names = ("trainer_idle", "engine_idle")
        waits, idle = (statistics.median(step[name] for step in self._steps) for name in names)
        if waits <= _MOST_WAITING:
            return None
        ratio = 1.0 / max(1.0 - waits, 1e-2)
        message = (
            f"rollout.max_trajectory_age_steps={self._max_age}: training waited for trajectories for {waits:.0%} of "
            f"the last {_STEPS} steps, because a step's trajectories take {ratio:.1f} times as long as its training"
        )
        if idle > _MOST_IDLE:
            return (
                f"{message}. The engine had no request for {idle:.0%} of that time, as no more groups may run: raise "
                "the bound"
            )
        return (
            f"{message}. The engine was busy, so a higher bound does not help: use more engines, or shorter completions"
        )

    def _warn_dropped(self) -> str | None:
        too_old = sum(step["dropped_groups_too_old"] for step in self._steps)
        total = too_old + self._per_step * len(self._steps)
        if too_old <= _MOST_TOO_OLD * total:
            return None
        return (
            f"rollout.max_trajectory_age_steps={self._max_age}: {too_old:.0f} of {total:.0f} groups of the last "
            f"{_STEPS} steps were dropped as too old, so that prompts with long trajectories are hardly learned from; "
            "raise the bound, or set rollout.over_sampling=1, with which no group is dropped for its age"
        )


class Division(NamedTuple):
    """The numbers of devices for training and for the rollout engine."""

    trainer: int
    engine: int


class DeviceBalance:
    """The shares of time in which training and the engine are busy, over the steps of an asynchronous stage.

    The busy time of each is assumed to be inversely proportional to its number of devices.
    """

    def __init__(self) -> None:
        self._division: Division | None = None
        self._busy: list[tuple[float, float]] = []

    @classmethod
    def from_steps(cls, lines: Iterable[Mapping[str, float]]) -> DeviceBalance:
        """Return the balance of steps with these metrics."""
        balance = cls()
        for metrics in lines:
            balance.note(metrics)
        return balance

    def note(self, metrics: Mapping[str, float]) -> None:
        """Record a step that has `trainer_idle`, `engine_idle`, `trainer_devices` and `engine_devices`.

        If the division has changed, earlier steps are forgotten, because their times were different.
        """
        if "trainer_idle" not in metrics or "trainer_devices" not in metrics:
            return
        division = Division(int(metrics["trainer_devices"]), int(metrics["engine_devices"]))
        if division != self._division:
            self._division, self._busy = division, []
        self._busy.append((1.0 - metrics["trainer_idle"], 1.0 - metrics["engine_idle"]))

    def summarise(self) -> tuple[Division, float, float] | None:
        """Return (the newest division, the median shares of time in which training and the engine were busy)."""
        if self._division is None:
            return None
        trainer, engine = (statistics.median(shares) for shares in zip(*self._busy, strict=True))
        return self._division, trainer, engine

    def find_best(self, divisions: Iterable[Division]) -> Division | None:
        """Return the division whose slower part takes the least time, or None if no step has been recorded.

        The measured division is returned if it is among `divisions` and no other shortens a step by at least 5 %.
        """
        measured = self.summarise()
        if measured is None:
            return None
        now, trainer, engine = measured
        divisions = list(divisions)

        def estimate_time(division: Division) -> float:
            return max(trainer * now.trainer / division.trainer, engine * now.engine / division.engine)

        best = min(divisions, key=estimate_time)
        if now in divisions and estimate_time(best) > (1.0 - _LEAST_GAIN) * estimate_time(now):
            return now
        return best

    def describe(self) -> str:
        """Return the measurements in words; at least one step must have been recorded."""
        measured = self.summarise()
        assert measured is not None
        now, trainer, engine = measured
        return (
            f"training was busy for {trainer:.0%} of the time on {now.trainer} device(s), and the rollout engine for "
            f"{engine:.0%} on {now.engine}"
        )

    def report(self) -> str | None:
        """Return the measurements and the balanced division in words, or None if no step has been recorded."""
        measured = self.summarise()
        if measured is None:
            return None
        now, total = measured[0], sum(measured[0])
        if total < 3:
            return self.describe()
        best = self.find_best(Division(total - engine, engine) for engine in range(1, total))
        if best == now:
            return f"{self.describe()}; this division of the devices is balanced"
        assert best is not None
        return f"{self.describe()}; {best.trainer} for training and {best.engine} for the engine would be balanced"


def count_engine_devices(generation: GenerationConfig, num_nodes: int) -> int:
    """Return how many devices the rollout engine has according to the configuration.

    If no servers are named, each training node starts `num_servers`.
    """
    if generation.engine not in ("vllm", "sglang"):
        return generation.num_engines
    servers = getattr(generation, generation.engine)
    return (len(servers.urls) or servers.num_servers * num_nodes) * count_devices_per_server(generation)


def count_devices_per_server(generation: GenerationConfig) -> int:
    """Return the number of devices of one server of `engine=vllm` or `engine=sglang`."""
    return generation.vllm.tensor_parallel_size if generation.engine == "vllm" else generation.sglang.tp_size


def count_training_nodes(world_size: int) -> int:
    """Return on how many nodes this run's ranks are."""
    return max(world_size // int(os.environ.get("LOCAL_WORLD_SIZE") or world_size), 1)
