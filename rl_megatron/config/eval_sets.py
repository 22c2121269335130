"""The section `eval`: named sets of problems that a stage is evaluated on besides its held-out data."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import is_import_string, make_string_absolute
from rl_megatron.config.loading.settings import NonNegative, NonNegativeFloat, Number, Positive, section


def _expand_name(task: object) -> object:
    """Return `{name: task}` if `task` is only a name."""
    return {"name": task} if isinstance(task, str) else task


@section
class EvalSetConfig:
    """One set of problems, and how the policy answers them."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]  # its name in metrics, as in `<name>/avg@4`
    # Files of problems, in the forms of data.path. A file is used as a whole. Of a directory, only the held-out split
    # is used. With task: the task's option path.
    path: str | None = None
    # Name and options of a registered task, whose reward scores the answers. A string is its name: `gsm8k` is short for
    # `{name: gsm8k}`. null: path has prompts, and reward.functions score the answers.
    task: Annotated[dict[str, Any] | None, BeforeValidator(_expand_name)] = None
    num_problems: Positive | None = None  # problems per evaluation; null: all
    n: Positive = 1  # samples of each problem
    temperature: NonNegativeFloat | None = None  # sampling temperature; 0: greedy. null: generation.temperature
    max_new_tokens: Positive | None = None  # most tokens of an answer; null: generation.max_new_tokens
    # Steps between evaluations on this set; 0: only before the first step and after the last. null: train.eval_every.
    every: NonNegative | None = None
    prompt_template: str | None = None  # as data.prompt_template; null: data.prompt_template itself
    right_from: Annotated[float, Number] = 1.0  # the lowest reward that counts as right, for pass@k


@section
class EvalConfig:
    """Named sets of problems. The held-out data of the stage is evaluated as well, every `train.eval_every` steps."""

    sets: tuple[EvalSetConfig, ...] = ()  # the sets; each has a different name

    def with_absolute_paths(self, config_dir: str | os.PathLike[str] | None) -> EvalConfig:
        """Return these settings with absolute paths of the tasks' files; relative ones may be in `config_dir`."""
        sets = []
        for index, eval_set in enumerate(self.sets):
            name = None if eval_set.task is None else eval_set.task.get("name")
            if eval_set.task is not None and isinstance(name, str) and is_import_string(name):
                target = make_string_absolute(name, f"eval.sets[{index}].task.name", config_dir)
                eval_set = replace(eval_set, task=eval_set.task | {"name": target})
            sets.append(eval_set)
        return replace(self, sets=tuple(sets))

    def check(self, where: str, temperature: float, has_reward_functions: bool) -> None:
        """Check that each set has a name of its own, problems, a scorer of answers, and samples that can differ."""
        names = [eval_set.name for eval_set in self.sets]
        for index, eval_set in enumerate(self.sets):
            key = f"{where}.sets[{index}]"
            if eval_set.name in names[:index]:
                raise ConfigError(f"{key}.name={eval_set.name} is also the name of another set; choose another name")
            if eval_set.task is None and eval_set.path is None:
                raise ConfigError(f"{key} ({eval_set.name}) has no problems; set its path, its task, or both")
            if eval_set.task is not None and not isinstance(eval_set.task.get("name"), str):
                raise ConfigError(f"{key}.task ({eval_set.name}) has no name; set it to that of a registered task")
            if eval_set.task is None and not has_reward_functions:
                raise ConfigError(
                    f"{key} ({eval_set.name}) has nothing that scores its answers; set its task, or reward.functions"
                )
            used = temperature if eval_set.temperature is None else eval_set.temperature
            if used == 0 and eval_set.n > 1:
                raise ConfigError(
                    f"{key}.n={eval_set.n} ({eval_set.name}): greedy samples of a problem are all the same; set "
                    f"{key}.temperature above 0, or n to 1"
                )


def list_reported_ks(num_samples: int) -> tuple[int, ...]:
    """Return the values of k for which pass@k is reported: the powers of 2 up to `num_samples`, and `num_samples`."""
    return tuple(sorted({num_samples, *(2**power for power in range(num_samples.bit_length()))}))


def list_statistics(num_samples: int, has_answers: bool) -> tuple[str, ...]:
    """Return the names of the statistics of a set of problems with `num_samples` samples each."""
    passes = tuple(f"pass@{k}" for k in list_reported_ks(num_samples))
    votes = (f"maj@{num_samples}",) if has_answers else ()
    return (f"avg@{num_samples}", *passes, *votes, "length", "truncated")
