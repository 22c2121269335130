"""The settings of environments, which answer the policy between its turns, and of their processes."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from rl_megatron.config.field_types import Positive, PositiveFloat, section


@section
class EnvironmentConfig:
    """The environment that answers the policy's turns, with `rollout.worker=conversation` or `verifiers`."""

    # The class of the environment, as file.py:Name or package.module:Name, or openenv. Each trajectory has an
    # environment of its own. With rollout.worker=verifiers: the name of an installed environment of that library, or a
    # function that loads one, as file.py:name. null: no environment.
    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # the arguments with which it is made, by name
    # Processes beside rank 0 that hold the environments. null: one for each CPU that rank 0 may use, at most 32.
    processes: Positive | None = None
    # How long a call of the environment may take. A plain method that takes longer ends its process; the other
    # trajectories of the process are then made again. With rollout.worker=verifiers it is the time of a whole rollout,
    # without the time of the rollout engine.
    seconds_per_call: PositiveFloat = 60.0
    # Memory of one process, in MiB; an allocation beyond it raises MemoryError in the environment. null: no limit.
    memory_mb: PositiveFloat | None = 4096.0
    # The Python interpreter of these processes, such as .venv-adapters/bin/python, if packages of the environment do
    # not fit those of the run. It needs Python 3.11 or newer, and not this package. null: that of the run.
    python: str | None = None
    max_answer_mb: PositiveFloat = 1.0  # the most that a call of the environment may return, in MiB
