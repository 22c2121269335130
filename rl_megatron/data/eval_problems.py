"""The problems of the sets of `eval.sets`. Their files are checked without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_megatron.config.data_sources import PromptsConfig, TaskConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.eval_sets import EvalSetConfig
from rl_megatron.config.extras import require_extra
from rl_megatron.config.schema import DataConfig, StageConfig
from rl_megatron.data.sources.registry import build_source
from rl_megatron.data.tasks.registry import task_options
from rl_megatron.data.tasks.task import AnsweringTask, Problem, Task
from rl_megatron.data.tokenizer import Tokenizer

_T = TypeVar("_T")
# How text is rendered, which a set shares with the stage's data.
_RENDERING = ("format", "system_prompt", "chat_template", "chat_template_kwargs", "too_long")
_WHOLE = "heldout_fraction"  # the option of tasks that hold out a part of a file


@dataclass(frozen=True)
class SetProblems:
    """The problems of a set.

    Attributes:
        task: The task, whose reward scores answers unless the set uses `reward.functions`.
        problems: The problems.
    """

    task: Task
    problems: list[Problem]

    @property
    def reads_answers(self) -> bool:
        """Return whether the task reads the answer of a completion, for maj@n."""
        return isinstance(self.task, AnsweringTask)


def stage_of_set(stage: StageConfig, each: EvalSetConfig) -> StageConfig:
    """Return the stage with the data, the sampling and the rewards of one of its sets."""
    generation = dataclasses.replace(
        stage.generation,
        temperature=stage.generation.temperature if each.temperature is None else each.temperature,
        max_new_tokens=each.max_new_tokens or stage.generation.max_new_tokens,
    )
    shared = {key: getattr(stage.data, key) for key in _RENDERING}
    shared["prompt_template"] = each.prompt_template or stage.data.prompt_template
    if each.task is None:
        data: DataConfig = PromptsConfig(path=each.path, eval_path=each.path, columns=stage.data.columns, **shared)
        return dataclasses.replace(stage, data=data, generation=generation)
    options: dict[str, Any] = dict(each.task)
    if _is_whole_file(each):
        options[_WHOLE] = 0.0
    data = TaskConfig(path=each.path, task=options, num_eval_examples=each.num_problems, **shared)
    reward = dataclasses.replace(stage.reward, functions=())
    return dataclasses.replace(stage, data=data, generation=generation, reward=reward)


def problems_of_set(stage: StageConfig, each: EvalSetConfig) -> SetProblems:
    """Return the problems of a set: all, or the first `num_problems`.

    Raises:
        ConfigError: They cannot be read, or there are too few; the message names the set.
    """
    return _named(each, lambda: _problems(stage, each))


def check_set_files(stage: StageConfig, tokenizer: Tokenizer | None) -> None:
    """Check the files of a stage's sets, and that their results can be written, without torch.

    Raises:
        ConfigError: A file is wrong, or pyarrow is not installed.
    """
    if stage.eval.sets:
        require_extra("eval.sets, whose results are tables,", "data", "pyarrow", otherwise="leave it out")
    for each in stage.eval.sets:
        _named(each, lambda each=each: build_source(stage_of_set(stage, each)).check_files(tokenizer))


def _problems(stage: StageConfig, each: EvalSetConfig) -> SetProblems:
    source = build_source(stage_of_set(stage, each))
    task = source.task()
    whole = _is_whole_file(each)
    problems = task.train_problems() if whole else task.heldout_problems()
    wanted = each.num_problems
    if not problems or len(problems) < (wanted or 0):
        raise ConfigError(
            f"num_problems={wanted} exceeds the {len(problems)} problems; lower it, or leave it out to use all of them"
        )
    return SetProblems(task, problems[:wanted])


def _is_whole_file(each: EvalSetConfig) -> bool:
    """Return whether the task would hold out a part of the set's file, all of which is evaluated."""
    if each.task is None or each.path is None or not Path(each.path).is_file():
        return False
    return _WHOLE in task_options(each.task["name"]) and _WHOLE not in each.task


def _named(each: EvalSetConfig, call: Callable[[], _T]) -> _T:
    """Return `call()`; an error in the set's settings or files names the set."""
    try:
        return call()
    except (ConfigError, ValueError, OSError) as error:
        raise ConfigError(f"eval.sets, the set {each.name}: {error}") from error
