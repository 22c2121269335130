"""`DeviceBalance`: which division of the same devices between training and generation would keep both busy."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rl_megatron.config.generation import GenerationConfig

# A step must become shorter by this share before another division is better than the one that was measured.
_LEAST_GAIN = 0.05


class Division(NamedTuple):
    """How many devices train, and how many the rollout engine has."""

    trainer: int
    engine: int


class DeviceBalance:
    """The shares of time in which training and the engine work, over the steps of an asynchronous stage.

    The time of a part is taken as inversely proportional to its devices.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self._division: Division | None = None
        self._busy: list[tuple[float, float]] = []

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, float]]) -> DeviceBalance:
        """Return the balance of steps whose metrics were recorded."""
        balance = cls()
        for metrics in lines:
            balance.note(metrics)
        return balance

    def note(self, metrics: Mapping[str, float]) -> None:
        """Record a step that has `trainer_idle`, `engine_idle`, `trainer_devices` and `engine_devices`.

        If the division has changed, the steps before are forgotten, because they took another time.
        """
        if "trainer_idle" not in metrics or "trainer_devices" not in metrics:
            return
        division = Division(int(metrics["trainer_devices"]), int(metrics["engine_devices"]))
        if division != self._division:
            self._division, self._busy = division, []
        self._busy.append((1.0 - metrics["trainer_idle"], 1.0 - metrics["engine_idle"]))

    def measured(self) -> tuple[Division, float, float] | None:
        """Return (the newest division, the median shares of time in which training and the engine were busy)."""
        if self._division is None:
            return None
        trainer, engine = (statistics.median(shares) for shares in zip(*self._busy, strict=True))
        return self._division, trainer, engine

    def best(self, divisions: Iterable[Division]) -> Division | None:
        """Return the division in which the slower part takes the least time, or None without a step.

        The measured division is returned, if it is among the divisions and no other one makes a step shorter by 5 %.
        """
        measured = self.measured()
        if measured is None:
            return None
        now, trainer, engine = measured
        divisions = list(divisions)

        def time_of(division: Division) -> float:
            return max(trainer * now.trainer / division.trainer, engine * now.engine / division.engine)

        found = min(divisions, key=time_of)
        return now if now in divisions and time_of(found) > (1.0 - _LEAST_GAIN) * time_of(now) else found

    def said(self) -> str:
        """Return in words what was measured; there is at least one step."""
        measured = self.measured()
        assert measured is not None
        now, trainer, engine = measured
        return (
            f"training was busy for {trainer:.0%} of the time on {now.trainer} device(s), and the rollout engine for "
            f"{engine:.0%} on {now.engine}"
        )

    def report(self) -> str | None:
        """Return what was measured and what would be balanced, or None without a step."""
        measured = self.measured()
        if measured is None:
            return None
        now, total = measured[0], sum(measured[0])
        if total < 3:
            return self.said()
        best = self.best(Division(total - engine, engine) for engine in range(1, total))
        if best == now:
            return f"{self.said()}; this division of the devices is balanced"
        assert best is not None
        return f"{self.said()}; {best.trainer} for training and {best.engine} for the engine would be balanced"


def engine_devices(generation: GenerationConfig, num_nodes: int) -> int:
    """Return how many devices the rollout engine has, as far as the configuration says it.

    Args:
        generation: The configuration.
        num_nodes: The nodes that train, each of which starts servers if none are named.
    """
    if generation.engine not in ("vllm", "sglang"):
        return generation.num_engines
    servers = getattr(generation, generation.engine)
    return (len(servers.urls) or servers.num_servers * num_nodes) * devices_per_server(generation)


def devices_per_server(generation: GenerationConfig) -> int:
    """Return the devices of one server of `engine=vllm` or `engine=sglang`."""
    return generation.vllm.tensor_parallel_size if generation.engine == "vllm" else generation.sglang.tp_size


def num_training_nodes(world_size: int) -> int:
    """Return how many nodes the ranks of this run are on."""
    return max(world_size // int(os.environ.get("LOCAL_WORLD_SIZE") or world_size), 1)
