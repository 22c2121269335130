"""`EnvironmentStep`: an environment's response to a turn of the policy, and the check of what environments return.

This module does not import torch, because environments import it in separate processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rl_megatron.data.conversations import ROLES, Message
from rl_megatron.workers.plain_data import BadAnswer

_FIELDS_OF_GYMNASIUM = 5
_ENVIRONMENT = "environment"  # the role of NeMo RL's observations, which chat templates do not know


@dataclass(frozen=True)
class EnvironmentStep:
    """The response of an environment to a turn of the policy.

    Attributes:
        messages: The next observation of the policy: messages with `role` and `content`, or a text, which is one
            message of the user. The role `environment` stands for `user`.
        reward: The reward of the turn.
        done: Whether the task is finished, which ends the trajectory.
        truncated: Whether the trajectory ends although the task is unfinished, as at the environment's step limit.
        metadata: What reward functions get as `metadata`; values of later steps replace earlier ones.
        stop: Texts that end the next turn, in addition to the configured ones; None: no further ones.
    """

    messages: Sequence[Message] | str = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] | None = None


def read_observation(observation: object) -> list[Message] | None:
    """Return an observation as messages; None stays None."""
    if observation is None:
        return None
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, list | tuple):
        raise BadAnswer(
            f"returned an observation of type {type(observation).__name__}; return a text, a list of messages with "
            "'role' and 'content', or None"
        )
    for number, message in enumerate(observation):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise BadAnswer(
                f"returned {message!r:.80} as message {number} of an observation; a message has 'role' and 'content', "
                "and its content is a text"
            )
        if message.get("role") not in (*ROLES, _ENVIRONMENT):
            raise BadAnswer(f"returned a message of role {message.get('role')!r}; a role is one of {', '.join(ROLES)}")
    return [
        {**message, "role": "user" if message["role"] == _ENVIRONMENT else message["role"]} for message in observation
    ]


def read_reset(result: object) -> tuple[list[Message] | None, dict[str, object]]:
    """Return messages and metadata from the result of `reset`: an observation, or (observation, mapping)."""
    metadata: object = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping) and "role" not in result[1]:
        result, metadata = result
    return read_observation(result), _read_metadata(metadata)


def read_step(result: object) -> EnvironmentStep:
    """Convert the result of `step` to an EnvironmentStep whose messages are a list.

    The result is an EnvironmentStep, or gymnasium's tuple (observation, reward, terminated, truncated, info).
    """
    if isinstance(result, EnvironmentStep):
        step = result
    elif isinstance(result, tuple) and len(result) == _FIELDS_OF_GYMNASIUM:
        observation, reward, terminated, truncated, info = result
        step = EnvironmentStep(observation, reward, terminated, truncated, info)
    else:
        raise BadAnswer(
            f"returned {type(result).__name__} {result!r:.80}; return an rl_megatron.EnvironmentStep, or the tuple "
            "(observation, reward, terminated, truncated, info)"
        )
    stop = step.stop
    if stop is not None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise BadAnswer(f"returned stop={stop!r:.80}; it must be a list of nonempty texts, or None")
        stop = tuple(stop)
    return EnvironmentStep(
        read_observation(step.messages) or [],
        _read_reward(step.reward),
        _read_switch("done", step.done),
        _read_switch("truncated", step.truncated),
        _read_metadata(step.metadata),
        stop,
    )


def _read_reward(reward: object) -> float:
    number = _unwrap_item(reward)
    if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
        raise BadAnswer(f"returned the reward {reward!r:.80}; a reward is a finite number")
    return float(number)


def _read_switch(name: str, value: object) -> bool:
    flag = _unwrap_item(value)
    if not isinstance(flag, bool):
        raise BadAnswer(f"returned {name}={value!r:.80}; it must be True or False")
    return flag


def _read_metadata(metadata: object) -> dict[str, object]:
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise BadAnswer(f"returned the metadata {metadata!r:.80}; it must be a mapping with texts as keys")
    return dict(metadata)


def _unwrap_item(value: object) -> object:
    """Return a scalar of numpy or torch as a Python value, and other values unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value
