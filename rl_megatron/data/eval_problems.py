"""The problems of `eval.sets`, whose files are checked without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
# The keys of the stage's data section that also apply to its eval sets.
_RENDERING = ("format", "system_prompt", "chat_template", "chat_template_kwargs", "too_long")
_WHOLE = "heldout_fraction"  # the option of tasks that hold out a part of a file


@dataclass(frozen=True)
class SetProblems:
    """The problems of an eval set. The task's reward scores answers unless the set uses `reward.functions`."""

    task: Task
    problems: list[Problem]

    @property
    def reads_answers(self) -> bool:
        """Return whether the task can extract the answer of a completion, as maj@n needs."""
        return isinstance(self.task, AnsweringTask)


def build_set_stage(stage: StageConfig, eval_set: EvalSetConfig) -> StageConfig:
    """Return the stage with the data, the sampling and the rewards of one of its eval sets."""
    generation = dataclasses.replace(
        stage.generation,
        temperature=stage.generation.temperature if eval_set.temperature is None else eval_set.temperature,
        max_new_tokens=eval_set.max_new_tokens or stage.generation.max_new_tokens,
    )
    shared = {key: getattr(stage.data, key) for key in _RENDERING}
    shared["prompt_template"] = eval_set.prompt_template or stage.data.prompt_template
    if eval_set.task is None:
        data: DataConfig = PromptsConfig(
            path=eval_set.path, eval_path=eval_set.path, columns=stage.data.columns, **shared
        )
        return dataclasses.replace(stage, data=data, generation=generation)
    options: dict[str, object] = dict(eval_set.task)
    if _is_whole_file(eval_set):
        options[_WHOLE] = 0.0
    data = TaskConfig(path=eval_set.path, task=options, num_eval_examples=eval_set.num_problems, **shared)
    reward = dataclasses.replace(stage.reward, functions=())
    return dataclasses.replace(stage, data=data, generation=generation, reward=reward)


def read_set_problems(stage: StageConfig, eval_set: EvalSetConfig) -> SetProblems:
    """Return the problems of a set: all, or the first `num_problems`."""
    return _name_set(eval_set, lambda: _read_problems(stage, eval_set))


def check_set_files(stage: StageConfig, tokenizer: Tokenizer | None) -> None:
    """Check the files of a stage's eval sets without torch, and that pyarrow is installed, which writes the results."""
    if stage.eval.sets:
        require_extra("eval.sets, whose results are tables,", "data", "pyarrow", otherwise="leave it out")
    for eval_set in stage.eval.sets:
        _name_set(
            eval_set, lambda eval_set=eval_set: build_source(build_set_stage(stage, eval_set)).check_files(tokenizer)
        )


def _read_problems(stage: StageConfig, eval_set: EvalSetConfig) -> SetProblems:
    source = build_source(build_set_stage(stage, eval_set))
    task = source.task()
    problems = task.train_problems() if _is_whole_file(eval_set) else task.heldout_problems()
    number = eval_set.num_problems
    if not problems:
        raise ConfigError(f"task={dict(eval_set.task or {})} holds out no problems; set its options so that it does")
    if len(problems) < (number or 0):
        raise ConfigError(
            f"num_problems={number} exceeds the {len(problems)} problems; lower it, or leave it out to use all of them"
        )
    return SetProblems(task, problems[:number])


def _is_whole_file(eval_set: EvalSetConfig) -> bool:
    """Return whether the eval set is a whole file of which its task would hold out a part by default."""
    if eval_set.task is None or eval_set.path is None or not Path(eval_set.path).is_file():
        return False
    return _WHOLE in task_options(eval_set.task["name"]) and _WHOLE not in eval_set.task


def _name_set(eval_set: EvalSetConfig, call: Callable[[], _T]) -> _T:
    """Return `call()`; an error in the set's settings or files names the set."""
    try:
        return call()
    except (ConfigError, ValueError, OSError) as error:
        raise ConfigError(f"eval.sets, the set {eval_set.name}: {error}") from error
