"""Rollout workers, which produce trajectories. `rollout.worker` names a registered one, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import describe_user_error
from rl_megatron.config.loading.registry import Registry
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.client import RolloutClient
from rl_megatron.rollouts.trajectory import Segment, Trajectory, Turn

# async def rollout(client, record, sampling) -> list[Trajectory]. The record has the fields of the task's problem.
RolloutWorker = Callable[[RolloutClient, Mapping[str, Any], Sampling], Awaitable[Sequence[Trajectory]]]
WorkerT = TypeVar("WorkerT", bound=Callable[..., Any])

WORKERS: Registry[Callable[..., Any]] = Registry("rollout worker")


def register_rollout_worker(name: str) -> Callable[[WorkerT], WorkerT]:
    """Return a decorator that registers a rollout worker, a function or a class, as `name` of `rollout.worker`.

    Raises:
        ValueError: Another worker has this name already.
    """

    def add(worker: WorkerT) -> WorkerT:
        WORKERS.register(name)(worker)
        return worker

    return add


@register_rollout_worker("completion")
async def completion(client: RolloutClient, record: Mapping[str, object], sampling: Sampling) -> list[Trajectory]:
    """Complete the prompt once."""
    ids = client.prompt.ids
    answer = await client.complete(ids, sampling)
    segment = Segment([*ids, *answer.ids], (Turn(len(ids), answer, sampling),))
    return [Trajectory((segment,), truncated=answer.reason != "stop")]


def load_worker(name: str, kwargs: Mapping[str, object]) -> RolloutWorker:
    """Return the worker that `rollout.worker` names, with the arguments of `rollout.worker_kwargs`.

    It is an async function, or a class with an async method `rollout`, which is instantiated with the arguments.
    """
    where = f"rollout.worker={name}"
    worker: object = WORKERS.find(name, "rollout.worker")
    if inspect.isclass(worker):
        worker, kwargs = _make(worker, kwargs, where), {}
    function = getattr(worker, "rollout", worker)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{where} is not a coroutine function; write `async def rollout(client, record, sampling)`, or a class "
            "with such a method"
        )
    try:
        inspect.signature(function).bind(None, {}, None, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be called as rollout(client, record, sampling) with the arguments of "
            f"rollout.worker_kwargs ({', '.join(kwargs) or 'none'}): {error}"
        ) from error
    return partial(function, **kwargs) if kwargs else function


def _make(worker_class: type, kwargs: Mapping[str, object], where: str) -> object:
    try:
        return worker_class(**kwargs)
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(f"{where} cannot be made with rollout.worker_kwargs: {describe_user_error(error)}") from error
