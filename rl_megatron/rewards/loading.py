"""Build the specs of a stage's reward functions, and check the functions before the first step, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rl_megatron.config.data import PROBLEMS
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.import_strings import is_import_string
from rl_megatron.config.reward_models import list_models_on_ranks
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.eval_problems import read_set_problems
from rl_megatron.data.sources import build_source
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.rewards import functions
from rl_megatron.rewards.registry import REWARDS
from rl_megatron.rewards.reward_function import ANSWER_NAMES, has_reference_answer
from rl_megatron.rewards.samples import Description, FunctionSpec, pickle_for_worker
from rl_megatron.rewards.workers import RewardWorkers

assert functions  # its import registers the functions of this package


def build_specs(settings: RewardConfig) -> list[FunctionSpec]:
    """Return the specs of those functions in `reward.functions` that run in workers rather than on ranks."""
    specs, runs_on_ranks = [], list_models_on_ranks(settings)
    for index, function in enumerate(settings.functions):
        if index in runs_on_ranks:
            continue
        where = f"reward.functions[{index}].name={function.name}"
        common: dict[str, Any] = {"label": function.shown_name, "where": where, "kwargs": function.kwargs}
        if is_import_string(function.target):
            specs.append(FunctionSpec(target=function.target, **common))
        elif function.name not in REWARDS:
            raise ConfigError(
                f"{where}: there is no reward function of this name; a function in your own file is named as in "
                f"file.py:name{nearest(function.name, REWARDS)}"
            )
        else:
            specs.append(FunctionSpec(pickled=pickle_for_worker(REWARDS[function.name], where), **common))
    return specs


def build_task_spec(task: Task) -> FunctionSpec:
    """Return the spec of a task's reward: the task with its options, but without the data that it has read."""
    where = f"the task {task.name!r}"
    if is_dataclass(task) and all(field.init for field in fields(task)):
        task = replace(task)
    return FunctionSpec(task.name, where, pickled=pickle_for_worker(task, where), is_task=True)


def check_rewards(stage: StageConfig, loads: bool) -> None:
    """Check the reward functions of a stage that scores completions; require one if nothing else gives rewards.

    If `loads`, the functions are loaded in a worker process; otherwise, only their names are checked.
    """
    has_rewards = stage.reward.functions or stage.data.has_rewards or stage.rollout.environment.name is not None
    if stage.scores_completions and not has_rewards:
        raise ConfigError(
            f"reward.functions is empty, and the problems of data.source={stage.data.source} have no reward of their "
            "own; set it, as in reward.functions=[{name: exact_match}]"
        )
    if not stage.scores_completions:
        return
    build_specs(stage.reward)
    if not (loads and stage.reward.functions):
        return
    if PROBLEMS in (stage.algorithm.learns_from, stage.data.heldout_kind):
        check_functions(stage.reward, build_source(stage).problems_to_check())
    for eval_set in stage.eval.sets:
        if eval_set.task is None:
            check_functions(stage.reward, read_set_problems(stage, eval_set).problems)


def check_functions(settings: RewardConfig, problems: Iterable[Problem]) -> None:
    """Load `reward.functions` in a worker process, and check that the problems have the fields that they need."""
    specs = build_specs(settings)
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
    """Check that every record has the fields that functions need."""
    needed = {name: spec for spec, function in zip(specs, descriptions, strict=True) for name in function.needed}
    if not needed:
        return
    for problem in problems:
        for name, spec in needed.items():
            if name in problem.record or (name in ANSWER_NAMES and has_reference_answer(problem)):
                continue
            if name in ANSWER_NAMES:
                lack = f"needs the reference answer ({name!r}), but a record has none"
                remedy = "name the field that has it, as in data.columns={answer: FIELD} or in the set's columns"
            else:
                lack = f"needs the parameter {name!r}, but a record has no such field"
                remedy = "give the parameter a default, or set it in kwargs"
            field_names = ", ".join(sorted(map(str, problem.record))) or "none"
            raise ConfigError(
                f"{spec.where}: {spec.label} {lack} ({problem.as_record().location}; its fields: {field_names}); "
                f"{remedy}"
            )
