"""The adapter of a user's environment in a separate process, which checks what the environment returns.

An environment of NeMo RL has `step(message_log_batch, metadata)`, which is called with a batch of one trajectory.

Source: NVIDIA NeMo RL's documentation of `EnvironmentInterface` and `EnvironmentReturn`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_megatron.config.loading.registry import Registry
from rl_megatron.data.conversations import Message
from rl_megatron.rollouts.environment import EnvironmentStep, read_reset, read_step
from rl_megatron.rollouts.openenv import OPENENV, OpenEnv
from rl_megatron.rollouts.user_calls import call_user_code
from rl_megatron.workers.plain_data import BadAnswer

_KEY = "rollout.environment.name"
# The environments of this package. Plugins cannot add any, because the processes of environments import no plugins.
ENVIRONMENTS: Registry[Callable[..., Any]] = Registry("environment")
ENVIRONMENTS.register(OPENENV)(OpenEnv)
_NEMO_PARAMETERS = ("message_log_batch", "metadata")
_NEMO_PARTS = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")


def is_of_nemo(environment: object) -> bool:
    """Return whether a class or an object has NeMo RL's method `step`."""
    step = getattr(environment, "step", None)
    return callable(step) and set(_NEMO_PARAMETERS) <= set(inspect.signature(step).parameters)


class NemoEnvironment:
    """An environment of NeMo RL in one trajectory. It keeps the messages and the metadata between the turns."""

    def __init__(self, environment: Any):
        self._environment = environment
        self._log: list[Message] = []
        self._metadata: object = None

    async def reset(self, record: Mapping[str, object], messages: Sequence[Message]) -> None:
        """Begin with the prompt's messages. The metadata is the record's `extra_env_info`, or else the record."""
        self._log = [{"role": message["role"], "content": message["content"]} for message in messages]
        self._metadata = record.get("extra_env_info", dict(record))

    async def step(self, answer: str) -> EnvironmentStep:
        """Return the environment's response to the policy's answer."""
        self._log.append({"role": "assistant", "content": answer})
        batch, metadata = [[dict(message) for message in self._log]], [self._metadata]
        returned, _ = await call_user_code(self._environment.step, message_log_batch=batch, metadata=metadata)
        if not isinstance(returned, tuple) or len(returned) not in (len(_NEMO_PARTS) - 1, len(_NEMO_PARTS)):
            raise BadAnswer(
                f"returned {type(returned).__name__}; return an EnvironmentReturn, which has {', '.join(_NEMO_PARTS)}"
            )
        parts = dict(zip(_NEMO_PARTS, returned, strict=False))
        one = {name: _take_only(name, value) for name, value in parts.items()}
        self._metadata = one["metadata"]
        observation = one["observations"]
        if not isinstance(observation, Mapping) or not isinstance(observation.get("content"), str):
            raise BadAnswer(f"returned the observation {observation!r:.80}; it must have 'role' and 'content'")
        self._log.append({"role": observation.get("role", "environment"), "content": observation["content"]})
        answer_read = one.get("answers")
        return EnvironmentStep(
            observation["content"],
            one["rewards"],
            one["terminateds"],
            metadata={} if answer_read is None else {"answer": answer_read},
            stop=one["next_stop_strings"],
        )

    async def close(self) -> None:
        """Call the environment's `shutdown`, if it has one."""
        await call_user_code(getattr(self._environment, "shutdown", lambda: None))


def _take_only(name: str, values: Any) -> Any:
    """Return the value of the only trajectory of a batch; None if there are no values."""
    if values is None:
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise BadAnswer(f"returned {name}={values!r:.80}; it must have one value, because the batch has one trajectory")
    if name == "terminateds" and values[0] in (0, 1):
        return bool(values[0])  # NeMo RL's environments return a tensor of any dtype
    return values[0]


class HostedEnvironment:
    """A user's environment, with async methods that return checked values."""

    def __init__(self, environment: Any):
        self._environment = environment
        self._nemo = NemoEnvironment(environment) if is_of_nemo(environment) else None

    async def reset(
        self, record: Mapping[str, Any], messages: Sequence[Message]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """Begin a trajectory; return its first messages (None: those of the prompt) and its metadata.

        `messages` are those of the prompt.
        """
        if self._nemo is not None:
            await self._nemo.reset(record, messages)
            return None, {}
        return read_reset((await call_user_code(self._environment.reset, record))[0])

    async def step(self, answer: str) -> EnvironmentStep:
        """Return the environment's response to an answer of the policy."""
        if self._nemo is not None:
            return read_step(await self._nemo.step(answer))
        return read_step((await call_user_code(self._environment.step, answer))[0])

    async def close(self) -> None:
        """Close the environment, if it can be closed."""
        if self._nemo is not None:
            await self._nemo.close()
        else:
            await call_user_code(getattr(self._environment, "close", lambda: None))


async def make(target: str, kwargs: Mapping[str, object]) -> HostedEnvironment:
    """Create an environment with these arguments."""
    environment, _ = await call_user_code(ENVIRONMENTS.find(target, _KEY), **kwargs)
    return HostedEnvironment(environment)


def check(target: str, kwargs: Mapping[str, object]) -> None:
    """Check that `target` names an environment that takes these arguments. A user's environment is not created.

    Raise ConfigError if it cannot be loaded, and BadAnswer if it is not an environment or rejects the arguments.
    """
    factory = ENVIRONMENTS.find(target, _KEY)
    if type(factory).__module__.startswith("ray.") or not callable(factory):
        raise BadAnswer(
            "is decorated with ray.remote, but Ray is not used here; name the class itself, as in "
            "Plain = Decorated.__ray_metadata__.modified_class"
        )
    if inspect.isclass(factory) and not is_of_nemo(factory):
        missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
        if missing:
            raise BadAnswer(
                f"has no method {' and no method '.join(missing)}; an environment has reset(record) and step(answer)"
            )
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise BadAnswer(
            f"does not take the arguments of rollout.environment.kwargs ({', '.join(kwargs) or 'none'}): {error}"
        ) from error
    if target in ENVIRONMENTS:
        factory(**kwargs)  # this loads the import strings in its arguments
