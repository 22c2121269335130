"""The environment `openenv`: a session on an OpenEnv server, through a client of the library `openenv-core`."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import load_object
from rl_megatron.data.conversations import Message
from rl_megatron.rollouts.environment import EnvironmentStep
from rl_megatron.rollouts.user_calls import call_user_code
from rl_megatron.workers.plain_data import BadAnswer

OPENENV = "openenv"
_KEY = "rollout.environment.kwargs"
_ANY_CLIENT = "openenv.core.generic_client:GenericEnvClient"
_NOT_SHOWN = ("done", "reward", "metadata")  # fields that every observation has
_REFUSED = "VALIDATION_ERROR"  # the error code of a server that cannot read an action


class OpenEnv:
    """An environment that runs on a server. Each trajectory has its own client, and so its own session."""

    def __init__(
        self,
        base_url: str | None = None,
        client: str = _ANY_CLIENT,
        client_kwargs: Mapping[str, object] | None = None,
        action: str | None = None,
        action_field: str | None = None,
        observation: str | None = None,
        observation_field: str | None = None,
        reset_fields: Sequence[str] = (),
        malformed_reward: float = 0.0,
    ):
        """Load the client and the functions, without connecting.

        Args:
            base_url: The address of the server; None if the client knows it.
            client: The import string of the client's class, or of a function that returns a client.
            client_kwargs: Further arguments of the client.
            action: The import string of the action's class, whose fields the policy writes as JSON, or of a function
                that takes the policy's text and returns an action. None: the action is a mapping.
            action_field: The field of the action that gets the policy's text; None: the text is JSON with all fields.
            observation: The import string of a function that returns one or more messages for an observation.
            observation_field: The field of an observation that becomes the message; None: JSON of its fields.
            reset_fields: The fields of the record that the server's `reset` gets.
            malformed_reward: The reward of a turn that is not a valid action. The policy gets the error, and continues.

        Raises:
            ConfigError: The library is not installed, or an import string cannot be loaded.
        """
        if importlib.util.find_spec("openenv") is None:
            raise ConfigError(
                f"rollout.environment.name={OPENENV} needs the Python package openenv-core, which {sys.executable} "
                "does not have; pip install 'rl_megatron[openenv]', or set rollout.environment.python to an "
                "interpreter that has it"
            )
        if observation is not None and observation_field is not None:
            raise ConfigError(f"{_KEY} has observation and observation_field; leave one out")
        self._client_kwargs = {**({} if base_url is None else {"base_url": base_url}), **(client_kwargs or {})}
        self._make_client = load_object(client, f"{_KEY}.client")
        self._action: Callable[..., Any] | None = None if action is None else load_object(action, f"{_KEY}.action")
        self._shown = None if observation is None else load_object(observation, f"{_KEY}.observation")
        self._action_field, self._observation_field = action_field, observation_field
        self._reset_fields, self._malformed_reward = tuple(reset_fields), malformed_reward
        self._client: Any = None
        self._reward = 0.0  # the reset's reward, which is added to that of the first turn

    async def reset(self, record: Mapping[str, object]) -> list[Message] | str | None:
        """Connect to the server, and return its first observation.

        Raises:
            BadAnswer: The record lacks a field of `reset_fields`, or the episode is over after the reset.
        """
        missing = [name for name in self._reset_fields if name not in record]
        if missing:
            raise BadAnswer(f"needs the field {missing[0]!r} of the record, which {_KEY}.reset_fields names")
        self._client, _ = await call_user_code(self._make_client, **self._client_kwargs)
        fields = {name: record[name] for name in self._reset_fields}
        result, _ = await call_user_code(self._client.reset, **fields)
        if result.done:
            raise BadAnswer("returned done=True, so there is no turn to learn from")
        self._reward = 0.0 if result.reward is None else result.reward
        return await self._build_message(result.observation)

    async def step(self, answer: str) -> EnvironmentStep:
        """Send the policy's text as an action, and return the response of the server."""
        reset_reward, self._reward = self._reward, 0.0
        try:
            action = self._read_action(answer)
            result, _ = await call_user_code(self._client.step, action)
        except ValueError as error:
            return self._refuse_action(error, reset_reward)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            return self._refuse_action(error, reset_reward)
        reward = 0.0 if result.reward is None else result.reward
        message = await self._build_message(result.observation)
        return EnvironmentStep(message or (), reset_reward + reward if reset_reward else reward, result.done)

    async def close(self) -> None:
        if self._client is not None:
            await call_user_code(self._client.close)

    def _read_action(self, answer: str) -> Any:
        """Parse the policy's text as an action, or raise ValueError."""
        make = self._action
        is_class = make is not None and hasattr(make, "model_validate")
        if make is not None and not is_class:
            return make(answer)
        if self._action_field is not None:
            fields: Any = {self._action_field: answer}
        else:
            fields = json.loads(answer)
            if not isinstance(fields, dict):
                raise ValueError("an action must be a JSON object with the action's fields")
        return fields if make is None else make.model_validate(fields)  # pyright: ignore[reportFunctionMemberAccess]

    def _refuse_action(self, error: Exception, reset_reward: float) -> EnvironmentStep:
        (first_line, *_) = [*str(error).splitlines(), ""]
        return EnvironmentStep(f"error: {first_line}", reset_reward + self._malformed_reward)

    async def _build_message(self, observation: object) -> Any:
        if self._shown is not None:
            return (await call_user_code(self._shown, observation))[0]
        fields = _read_fields(observation)
        if self._observation_field is not None:
            if self._observation_field not in fields:
                raise BadAnswer(
                    f"has no field {self._observation_field!r} in its observation, which {_KEY}.observation_field "
                    f"names; it has {', '.join(fields) or 'none'}"
                )
            return str(fields[self._observation_field])
        shown = {name: value for name, value in fields.items() if name not in _NOT_SHOWN and value is not None}
        return json.dumps(shown, ensure_ascii=False, default=str) if shown else None


def _read_fields(observation: Any) -> dict[str, Any]:
    if isinstance(observation, Mapping):
        return dict(observation)
    return observation.model_dump() if hasattr(observation, "model_dump") else dict(vars(observation))
