"""`ResumedState`: the state of a stage, besides its models, that checkpoints store as named parts.

Each part saves itself as plain values, and checks a checkpoint's values before it loads them. An algorithm of your own
adds a part with `Loop.keep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rl_megatron.config.errors import ConfigError

State = Mapping[str, Any]


class Resumable(Protocol):
    """A part of a stage's state that is the same on every rank."""

    def state_dict(self) -> State:
        """Return the state as values that JSON can hold. Every rank calls it when a step is saved."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Continue from a state.

        Raises:
            ConfigError: This part cannot continue from the state.
        """
        ...


class ResumedState:
    """The parts of one stage, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, Resumable] = {}

    def add(self, name: str, part: Resumable) -> None:
        """Add a part.

        Raises:
            ValueError: A part has this name already.
        """
        if self._parts.setdefault(name, part) is not part:
            raise ValueError(f"the stage already keeps a part named {name!r}; choose another name")

    def state_dict(self) -> dict[str, State]:
        """Return the state of every part."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load(self, saved: Mapping[str, State], checkpoint: str) -> None:
        """Load the state of every part. The checkpoint must have the same parts as the stage."""
        absent, unknown = sorted(self._parts.keys() - saved.keys()), sorted(saved.keys() - self._parts.keys())
        if absent or unknown:
            what = (
                f"has no state of {absent[0]!r}, which this stage keeps"
                if absent
                else f"has the state of {unknown[0]!r}, which this stage does not keep"
            )
            raise ConfigError(
                f"{checkpoint} {what}; continue with the version of the code that wrote it, or choose another "
                "output_dir and start from the checkpoint with init_from"
            )
        for name, part in self._parts.items():
            try:
                part.load_state_dict(saved[name])
            except ConfigError as error:
                raise ConfigError(f"{checkpoint}: the state of {name!r} does not fit: {error}") from error


class MustBe:
    """A part whose values follow from the settings, such as the seed of the next rollout. Loading only checks them."""

    def __init__(self, values: State):
        """Keep `values`, which a loaded checkpoint must have too."""
        self._values = dict(values)

    def state_dict(self) -> State:
        return self._values

    def load_state_dict(self, state: State) -> None:
        """Refuse a checkpoint with other values. The message names the first one that differs."""
        for key in sorted({*state, *self._values}):
            if state.get(key) != self._values.get(key):
                raise ConfigError(f"{key} is {state.get(key)} in the checkpoint, and {self._values.get(key)} now")
