"""Make the list of a stage's reward functions, and check it before the first step. This module does without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rl_megatron.config.data import PROBLEMS
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.import_strings import is_import_string
from rl_megatron.config.reward_models import on_ranks
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.eval_problems import problems_of_set
from rl_megatron.data.sources import build_source
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.rewards import functions
from rl_megatron.rewards.registry import REWARDS
from rl_megatron.rewards.samples import Description, FunctionSpec, pickled
from rl_megatron.rewards.workers import RewardWorkers

assert functions  # its import registers the functions of this package


def configured_functions(settings: RewardConfig) -> list[FunctionSpec]:
    """Return the functions of `reward.functions`, as workers load them, without those that run on ranks.

    Raises:
        ConfigError: There is no function of a name.
    """
    specs, runs_on_ranks = [], on_ranks(settings)
    for index, function in enumerate(settings.functions):
        if index in runs_on_ranks:
            continue
        where = f"reward.functions[{index}].name={function.name}"
        common: dict[str, Any] = {"label": function.shown_name, "where": where, "kwargs": function.kwargs}
        if is_import_string(function.target):
            specs.append(FunctionSpec(target=function.target, **common))
        elif function.name not in REWARDS:
            raise ConfigError(
                f"{where}: there is no reward function of this name, and a function of your own is named as in "
                f"file.py:name{nearest(function.name, REWARDS)}"
            )
        else:
            specs.append(FunctionSpec(pickled=pickled(REWARDS[function.name], where), **common))
    return specs


def task_function(task: Task) -> FunctionSpec:
    """Return the reward of a task, as workers load it."""
    where = f"the task {task.name!r}"
    return FunctionSpec(task.name, where, pickled=pickled(_without_data(task), where), is_task=True)


def check_rewards(stage: StageConfig, loads: bool) -> None:
    """Check the reward functions of a stage that scores completions.

    Args:
        stage: The stage.
        loads: Whether to load the functions, in a worker process. Otherwise only their names are checked.

    Raises:
        ConfigError: There is none, and the problems come without a reward; or see `check_functions`.
    """
    has_rewards = stage.reward.functions or stage.data.has_rewards or stage.rollout.environment.name is not None
    if stage.scores_completions and not has_rewards:
        raise ConfigError(
            f"reward.functions is empty, and the problems of data.source={stage.data.source} have no reward of their "
            "own; set it, as in reward.functions=[{name: exact_match}]"
        )
    if not stage.scores_completions:
        return
    configured_functions(stage.reward)
    if not (loads and stage.reward.functions):
        return
    if PROBLEMS in (stage.algorithm.learns_from, stage.data.heldout_kind):
        check_functions(stage.reward, build_source(stage).problems(1))
    for each in stage.eval.sets:
        if each.task is None:
            check_functions(stage.reward, problems_of_set(stage, each).problems[:1])


def check_functions(settings: RewardConfig, problems: Iterable[Problem]) -> None:
    """Load the functions of `reward.functions` in a worker process, and check that the problems have what they need.

    Args:
        settings: The section `reward`.
        problems: The problems of the stage.

    Raises:
        ConfigError: A function does not exist, its file cannot be imported, its arguments are wrong, or it needs a
            field that a record does not have. The message names the key.
    """
    specs = configured_functions(settings)
    if not specs:
        return
    workers = RewardWorkers(specs, replace(settings, num_workers=1))
    try:
        descriptions = workers.load()
    finally:
        workers.close()
    check_fields(specs, descriptions, problems)


def check_fields(
    specs: Sequence[FunctionSpec], descriptions: Sequence[Description], problems: Iterable[Problem]
) -> None:
    """Check that every record has the fields that functions need.

    Raises:
        ConfigError: A record lacks one; the message names the function, the field and the fields that there are.
    """
    needed = {name: spec for spec, each in zip(specs, descriptions, strict=True) for name in each.needed}
    if not needed:
        return
    for problem in problems:
        for name, spec in needed.items():
            if name not in problem.record:
                fields_there = ", ".join(sorted(map(str, problem.record))) or "none"
                raise ConfigError(
                    f"{spec.where}: {spec.label} needs the parameter {name!r}, and a record has no such field "
                    f"({problem.as_record().location}; its fields: {fields_there}); give the parameter a default, or "
                    "set it in kwargs"
                )


def _without_data(task: Task) -> Task:
    """Return a copy of the task with the same options, without the data that it may have read."""
    if not is_dataclass(task) or not all(field.init for field in fields(task)):
        return task
    return replace(task)
