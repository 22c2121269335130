"""`DeviceBalance`: which division of the same devices between training and generation would keep both busy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping


class DeviceBalance:
    """The shares of time in which training and the engine work, over the steps of an asynchronous stage."""

    def __init__(self, trainer_devices: int, engine_devices: int):
        """Start without steps.

        Args:
            trainer_devices: The ranks that train.
            engine_devices: The devices of the rollout engine.
        """
        self._trainer_devices, self._engine_devices = trainer_devices, engine_devices
        self._trainer_busy: list[float] = []
        self._engine_busy: list[float] = []

    def note(self, metrics: Mapping[str, float]) -> None:
        """Record a step that has `trainer_idle` and `engine_idle`."""
        if "trainer_idle" in metrics:
            self._trainer_busy.append(1.0 - metrics["trainer_idle"])
            self._engine_busy.append(1.0 - metrics["engine_idle"])

    def report(self) -> str | None:
        """Return what was measured and what would be balanced, or None without a step.

        If the time of a part is inversely proportional to its devices, both take equally long when the devices are
        divided as their work is: busy share times devices.
        """
        if not self._trainer_busy:
            return None
        trainer, engine = statistics.median(self._trainer_busy), statistics.median(self._engine_busy)
        work_of_trainer, work_of_engine = trainer * self._trainer_devices, engine * self._engine_devices
        total = self._trainer_devices + self._engine_devices
        wanted = total * work_of_engine / max(work_of_trainer + work_of_engine, 1e-9)
        said = (
            f"training was busy for {trainer:.0%} of the time on {self._trainer_devices} device(s), and the rollout "
            f"engine for {engine:.0%} on {self._engine_devices}"
        )
        if total < 3:
            return said
        best = min(max(round(wanted), 1), total - 1)
        if best == self._engine_devices:
            return f"{said}; this division of the devices is balanced"
        return f"{said}; {total - best} for training and {best} for the engine would be balanced"
