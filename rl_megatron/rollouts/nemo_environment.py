"""Let an environment of NeMo RL answer one trajectory: `step(message_log_batch, metadata)` with a batch of one.

Source: NVIDIA NeMo RL's documentation of `EnvironmentInterface` and `EnvironmentReturn`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.data.conversations import Message
from rl_megatron.rollouts.environment import EnvironmentStep
from rl_megatron.rollouts.user_calls import call_user_code
from rl_megatron.workers.plain_data import BadAnswer

_PARAMETERS = ("message_log_batch", "metadata")
_RETURNED = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")


def is_of_nemo(made: Any) -> bool:
    """Return whether a class or an object has NeMo RL's method `step`."""
    step = getattr(made, "step", None)
    return callable(step) and set(_PARAMETERS) <= set(inspect.signature(step).parameters)


class NemoEnvironment:
    """An environment of NeMo RL in one trajectory. It keeps the messages and the metadata between the turns."""

    def __init__(self, environment: Any):
        self._environment = environment
        self._log: list[Message] = []
        self._metadata: Any = None

    async def reset(self, record: Mapping[str, Any], messages: Sequence[Message]) -> None:
        """Begin with the messages of the prompt, and with the record's `extra_env_info` as metadata, if it has it."""
        self._log = [{"role": message["role"], "content": message["content"]} for message in messages]
        self._metadata = record.get("extra_env_info", dict(record))

    async def step(self, answer: str) -> EnvironmentStep:
        """Return what the environment says to the policy's answer.

        Raises:
            BadAnswer: It returned something that is no EnvironmentReturn of one trajectory.
        """
        self._log.append({"role": "assistant", "content": answer})
        batch, metadata = [[dict(message) for message in self._log]], [self._metadata]
        returned, _ = await call_user_code(self._environment.step, message_log_batch=batch, metadata=metadata)
        if not isinstance(returned, tuple) or len(returned) not in (len(_RETURNED) - 1, len(_RETURNED)):
            raise BadAnswer(
                f"returned {type(returned).__name__}; return an EnvironmentReturn, which has {', '.join(_RETURNED)}"
            )
        parts = dict(zip(_RETURNED, returned, strict=False))
        one = {name: _only(name, value) for name, value in parts.items()}
        self._metadata = one["metadata"]
        observation = one["observations"]
        if not isinstance(observation, Mapping) or not isinstance(observation.get("content"), str):
            raise BadAnswer(f"returned the observation {observation!r:.80}; it has 'role' and 'content'")
        self._log.append({"role": observation.get("role", "environment"), "content": observation["content"]})
        said = one.get("answers")
        return EnvironmentStep(
            observation["content"],
            one["rewards"],
            one["terminateds"],
            metadata={} if said is None else {"answer": said},
            stop=one["next_stop_strings"],
        )

    async def close(self) -> None:
        """Call the environment's `shutdown`, if it has one."""
        await call_user_code(getattr(self._environment, "shutdown", lambda: None))


def _only(name: str, values: Any) -> Any:
    """Return the value of the only trajectory of a batch; None if there are no values.

    Raises:
        BadAnswer: There are other numbers of values.
    """
    if values is None:
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise BadAnswer(f"returned {name}={values!r:.80}; it has one value, for the one trajectory that it was given")
    if name == "terminateds" and values[0] in (0, 1):
        return bool(values[0])  # NeMo RL's environments return a tensor of any type
    return values[0]
