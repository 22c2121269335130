"""Turn the arguments of a training function into the configuration of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_megatron.api.model import StartingModel
from rl_megatron.api.records import DataPath
from rl_megatron.config.commands import format_override
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import record_function
from rl_megatron.config.loading.load import load_config, merge_settings
from rl_megatron.config.schema import ALGORITHM_CONFIGS, RunConfig
from rl_megatron.rewards import functions
from rl_megatron.rewards.registry import REWARDS

Reward = Callable[..., Any] | str | Mapping[str, Any]

assert functions  # its import registers the functions of the package
_PRESETS = ("generation", "loss", "parallel")  # sections for which the name of a preset can be given
_OF_SEVERAL_STAGES = ("experiment", "stages")


def run_config(
    algorithm: str,
    begin: StartingModel | None,
    data: DataPath | None,
    rewards: Sequence[Reward] | Reward,
    output_dir: str | os.PathLike[str],
    settings: Mapping[str, object],
) -> RunConfig:
    """Return the configuration of a run with one stage.

    The run starts from the weights `begin`, or from new weights if it is None. `data` is `data.path` or the section
    `data`; if it is None, the settings contain this section. For the other arguments, see `train`.
    """
    tree = _nest(settings)
    for name in _OF_SEVERAL_STAGES:
        if name in tree:
            raise ConfigError(
                f"{name}: a training function runs one stage; rl_megatron.run(load_config([...])) runs an experiment"
            )
    chosen = {key: tree.pop(key) for key in _PRESETS if isinstance(tree.get(key), str)}
    overrides = [format_override("algorithm", algorithm)]
    usual = ALGORITHM_CONFIGS[algorithm].usual_loss if algorithm in ALGORITHM_CONFIGS else None
    if usual is not None:
        chosen.setdefault("loss", usual)
    if begin is not None and begin.checkpoint is not None:
        overrides += ["model=init_from", format_override("init_from", str(begin.checkpoint))]
    elif begin is not None:
        tree = merge_settings(begin.settings, tree)
    overrides += [format_override(key, name) for key, name in chosen.items()]
    if data is not None:
        section = data if isinstance(data, Mapping) else {"path": data if isinstance(data, str) else _plain(data)}
        tree["data"] = merge_settings(_nest(section), tree.get("data", {}))
    if rewards:
        tree["reward"] = {"functions": reward_functions(rewards)} | tree.get("reward", {})
    tree["output_dir"] = os.fspath(output_dir)
    return load_config(overrides, settings=tree)


def reward_functions(rewards: Sequence[Reward] | Reward) -> list[dict[str, Any]]:
    """Return `reward.functions` for one reward or several: Python functions, names, or mappings with an entry's keys.

    A Python function is registered under its own name. A later function of the same name replaces it, because a cell of
    a notebook may run again. A function of the package or of a plugin cannot be replaced.
    """
    entries = []
    several = [rewards] if callable(rewards) or isinstance(rewards, str | Mapping) else rewards
    for index, reward in enumerate(several):
        entry = dict(reward) if isinstance(reward, Mapping) else {"name": reward}
        named = entry.get("name")
        if callable(named):
            entry["name"] = _register(named, f"rewards[{index}]")
        entries.append(entry)
    return entries


_python_names: set[str] = set()  # the names that `_register` has registered


def _register(function: Callable[..., Any], where: str) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if not name.isidentifier():
        raise ConfigError(f"{where}: {name} has no name, which metrics need; define it with def")
    if name in REWARDS and name not in _python_names:
        raise ConfigError(f"{where}: {name!r} is a reward function of the package or of a plugin; rename yours")
    _python_names.add(name)
    record_function(name, function)
    REWARDS[name] = function
    return name


def _nest(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings as nested mappings: `{"train.steps": 50}` and `{"train": {"steps": 50}}` are the same."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}={value!r}: {section} is given as the name of a preset too; give only one")
        if isinstance(value, Mapping) and isinstance(node.get(name), dict):
            node, value = node[name], _plain(value)
        else:
            value = {name: _plain(value)}
        twice = sorted(node.keys() & value.keys())
        if twice:
            raise ConfigError(f"{key}: {twice[0]!r} is given twice; write it once")
        node.update(value)
    return tree


def _plain(value: object) -> Any:
    """Return a value as YAML represents it: tuples become lists, and paths become text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
