"""Hold a user's environment in a process of its own, and check what it returns there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_megatron.config.loading.registry import Registry
from rl_megatron.data.conversations import Message
from rl_megatron.rollouts.environment import EnvironmentStep, read_reset, read_step
from rl_megatron.rollouts.nemo_environment import NemoEnvironment, is_of_nemo
from rl_megatron.rollouts.openenv import OPENENV, OpenEnv
from rl_megatron.rollouts.user_calls import call_user_code
from rl_megatron.workers.plain_data import BadAnswer

_KEY = "rollout.environment.name"
# Those of the package. Plugins cannot add any, because the processes of environments do not import them.
ENVIRONMENTS: Registry[Callable[..., Any]] = Registry("environment")
ENVIRONMENTS.register(OPENENV)(OpenEnv)


class HostedEnvironment:
    """A user's environment, with async methods that return checked values."""

    def __init__(self, environment: Any):
        """Keep the environment."""
        self._own = environment
        self._nemo = NemoEnvironment(environment) if is_of_nemo(environment) else None

    async def reset(
        self, record: Mapping[str, Any], messages: Sequence[Message]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """Begin a trajectory; return its first messages (None: those of the prompt) and its metadata.

        Args:
            record: The fields of the problem's record.
            messages: The messages of the prompt.
        """
        if self._nemo is not None:
            await self._nemo.reset(record, messages)
            return None, {}
        return read_reset((await call_user_code(self._own.reset, record))[0])

    async def step(self, answer: str) -> EnvironmentStep:
        """Return what the environment says to an answer of the policy."""
        if self._nemo is not None:
            return read_step(await self._nemo.step(answer))
        return read_step((await call_user_code(self._own.step, answer))[0])

    async def close(self) -> None:
        """Close the environment, if it can be closed."""
        if self._nemo is not None:
            await self._nemo.close()
        else:
            await call_user_code(getattr(self._own, "close", lambda: None))


async def make(target: str, kwargs: Mapping[str, Any]) -> HostedEnvironment:
    """Return an environment that is made with these arguments.

    Raises:
        ConfigError: It cannot be loaded.
    """
    made, _ = await call_user_code(ENVIRONMENTS.find(target, _KEY), **kwargs)
    return HostedEnvironment(made)


def check(target: str, kwargs: Mapping[str, Any]) -> None:
    """Check that a name is that of an environment, which takes these arguments. A user's environment is not made.

    Raises:
        ConfigError: It cannot be loaded.
        BadAnswer: It is no environment, or takes other arguments.
    """
    found = ENVIRONMENTS.find(target, _KEY)
    if type(found).__module__.startswith("ray.") or not callable(found):
        raise BadAnswer(
            "is decorated with ray.remote, and no Ray runs here; name the class itself, as in "
            "Plain = Decorated.__ray_metadata__.modified_class"
        )
    if inspect.isclass(found) and not is_of_nemo(found):
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if missing:
            raise BadAnswer(
                f"has no method {' and no method '.join(missing)}; an environment has reset(record) and step(answer)"
            )
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise BadAnswer(
            f"is made with the arguments of rollout.environment.kwargs ({', '.join(kwargs) or 'none'}): {error}"
        ) from error
    if target in ENVIRONMENTS:
        found(**kwargs)  # it loads what its arguments name
