"""The settings of reward functions, and of the processes that run them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import add_to_path, is_import_string, make_string_absolute
from rl_megatron.config.loading.settings import Number, Positive, PositiveFloat, section

ENVIRONMENT = "environment"  # the name of the rewards of environments, which no reward function may have


@section
class RewardFunctionConfig:
    """One reward function, and its part in the reward of a sample."""

    # File or module of the function: my_rewards.py, or my_package.my_module. null: name is a registered function, or an
    # import string as in `my_rewards.py:length`.
    path: str | None = None
    name: str  # the function
    weight: Annotated[float, Number] = 1.0  # factor of its score in the reward; 0: the score is only logged
    kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of the function, by name
    # Its name in metrics and messages. null: the name of the function, without its file.
    label: Annotated[str, Field(pattern=r"^\w+$")] | None = None

    @property
    def target(self) -> str:
        """Return the registered name or the import string of the function."""
        return self.name if self.path is None else f"{self.path}:{self.name}"

    @property
    def shown_name(self) -> str:
        """Return the function's name in metrics and messages."""
        return self.label or self.name.rpartition(":")[2].rpartition(".")[2]


def _expand_name(function: object) -> object:
    """Return `{name: function}` if `function` is only a name."""
    return {"name": function} if isinstance(function, str) else function


@section
class RewardConfig:
    """Reward functions, and the worker processes that run them on every node."""

    # The reward of a sample is the sum of weight · score of these functions. Empty: the reward of the task. A plain
    # name is enough: `exact_match` stands for `{name: exact_match}`.
    functions: tuple[Annotated[RewardFunctionConfig, BeforeValidator(_expand_name)], ...] = ()
    # Worker processes on each node, which are started when there is work for them. null: one for each CPU that the
    # node's first rank may use, at most 32.
    num_workers: Positive | None = None
    timeout_seconds: PositiveFloat = 60.0  # how long one call of a function may take
    # What happens if a call takes longer. error: the run ends. zero: the score is 0, the log names the sample, and the
    # metric `reward_<function>_timeouts` counts it.
    on_timeout: Literal["error", "zero"] = "error"
    # The same for a call that raises an error, ends its process, or does not return a finite number. The metric is
    # `reward_<function>_errors`.
    on_error: Literal["error", "zero"] = "error"
    # Memory of one worker process, in MiB; an allocation beyond it raises MemoryError in the function. null: no limit.
    memory_limit_mb: PositiveFloat | None = 4096.0
    concurrency: Positive = 64  # samples that an async function scores at the same time in one worker

    def with_absolute_paths(self, config_dir: str | os.PathLike[str] | None) -> RewardConfig:
        """Return these settings with absolute paths of the functions' files, so that other processes find them."""
        functions = []
        for index, function in enumerate(self.functions):
            if is_import_string(function.target):
                target = make_string_absolute(function.target, f"reward.functions[{index}].name", config_dir)
                function = replace(function, path=None, name=target)
                if config_dir is not None and not target.rpartition(":")[0].endswith(".py"):
                    add_to_path(os.path.realpath(config_dir))
            functions.append(function)
        return replace(self, functions=tuple(functions))

    def check(self) -> None:
        """Check that functions have different names, that none names two files, and that a weight is not 0."""
        seen: dict[str, int] = {}
        for index, function in enumerate(self.functions):
            where = f"reward.functions[{index}]"
            if function.path is not None and is_import_string(function.name):
                raise ConfigError(
                    f"{where}.name={function.name!r} names a file or module, but path={function.path!r} names another; "
                    "leave path out"
                )
            if function.shown_name == ENVIRONMENT:
                raise ConfigError(
                    f"{where} is called {ENVIRONMENT!r}, a name reserved for the rewards of environments; set "
                    f"{where}.label"
                )
            if function.shown_name in seen:
                raise ConfigError(
                    f"{where}: reward.functions[{seen[function.shown_name]}] is called {function.shown_name!r} as "
                    f"well, and their metrics would be the same; set {where}.label"
                )
            seen[function.shown_name] = index
        if self.functions and not any(function.weight for function in self.functions):
            raise ConfigError(
                "reward.functions: every weight is 0, so every reward would be 0; set one to another value"
            )


def check_used(sections: Iterable[tuple[RewardConfig, bool]]) -> None:
    """Check that reward settings have an effect.

    `sections` has, for each stage, its reward settings and whether it scores completions.
    """
    sections = list(sections)
    if any(scores for _, scores in sections):
        return
    for reward, _ in sections:
        changed = [name for name, value in vars(RewardConfig()).items() if getattr(reward, name) != value]
        if changed:
            raise ConfigError(
                f"reward.{changed[0]} has no effect: no stage of this run samples completions for problems; leave it "
                "out, or choose a data source with problems"
            )
