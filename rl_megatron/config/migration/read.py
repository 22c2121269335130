"""Read the settings in a file of another library: YAML, or a Python script, which is parsed and never executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.migration import nemo_rl, trl, verl
from rl_megatron.config.migration.keys import Expression, Library

LIBRARIES: dict[str, Library] = {"nemo_rl": nemo_rl.LIBRARY, "verl": verl.LIBRARY, "trl": trl.LIBRARY}
# The resolvers of NeMo RL, as in ${mul:${policy.max_total_sequence_length}, 4}.
_RESOLVERS = {"mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": max}


@dataclass(frozen=True)
class Source:
    """The settings of a file.

    Attributes:
        file: The file.
        library: The library that it is for.
        settings: Its values by their dotted keys.
        defaults: The library's values of keys that the file leaves out.
    """

    file: Path
    library: Library
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def read_source(file: Path, name: str | None = None) -> Source:
    """Return the settings of a file of the library `name`, which is recognised by the file's keys if it is None."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; name a YAML file or a Python script") from error
    if name == "trl" or (name is None and file.suffix == ".py"):
        return _read_script(file, text)
    config = _read_yaml(file)
    name = name or _recognise(file, config)
    return Source(file, LIBRARIES[name], dict(_flatten(name, config)), LIBRARIES[name].defaults)


def _recognise(file: Path, config: DictConfig) -> str:
    if "actor_rollout_ref" in config:
        return "verl"
    if "policy" in config and any(section in config for section in (*nemo_rl.SECTIONS, "loss_fn")):
        return "nemo_rl"
    raise ConfigError(
        f"{file} is neither of NeMo RL, whose files have the sections policy and one of {', '.join(nemo_rl.SECTIONS)}, "
        "nor of verl, whose files have actor_rollout_ref; name the library with --from"
    )


def _read_yaml(file: Path) -> DictConfig:
    """Return a YAML file, on top of the files that its key `defaults` names, as in NeMo RL's recipes."""
    try:
        config = OmegaConf.load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}; repair it") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file} has no keys; name a configuration file")
    named = config.get("defaults")
    parents = [named] if isinstance(named, str) else list(named or ())
    files = [file.parent / parent for parent in parents if isinstance(parent, str) and parent.endswith(".yaml")]
    if not files:
        return config
    del config["defaults"]
    for parent in files:
        if not parent.is_file():
            raise ConfigError(f"{file}: defaults names {parent}, which does not exist; put the file there")
    merged = OmegaConf.merge(*map(_read_yaml, files), config)
    assert isinstance(merged, DictConfig)
    return merged


def _flatten(name: str, config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a file, with its interpolations resolved."""
    for resolver, function in _RESOLVERS.items():
        OmegaConf.register_new_resolver(resolver, function, replace=True)
    try:
        yield from _leaves(config, "")
    finally:
        for resolver in _RESOLVERS:
            OmegaConf.clear_resolver(resolver)
    if name == "nemo_rl":
        yield from ((section, True) for section in nemo_rl.SECTIONS if section in config)


def _leaves(config: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in config:
        path = f"{prefix}{key}"
        if OmegaConf.is_missing(config, key):
            continue
        try:
            value = config[key]
            value = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
        except OmegaConfBaseException:  # an interpolation that only the library can resolve
            value = Expression(str(OmegaConf.to_container(config, resolve=False)[key]))  # pyright: ignore
        if isinstance(value, DictConfig) and len(value) > 0:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, {} if isinstance(value, DictConfig) else value


# ---- scripts


class _Script:
    """The assignments, functions and imports of a script, by which its expressions are read."""

    def __init__(self, file: Path, tree: ast.Module):
        self.file, self.tree = file, tree
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self._imported: dict[str, str] = {}
        self._assigned: dict[str, ast.expr | None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._imported |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                self._assigned[name] = None if name in self._assigned else node.value  # the last one is not known

    def follow(self, node: ast.expr) -> ast.expr:
        """Return the expression that is assigned to a name, or the expression itself."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            node = self._assigned.get(node.id) or node
        return node

    def read(self, node: ast.expr) -> Any:
        """Return the value of an expression, or an `Expression` if only running the script would show it."""
        if isinstance(node, ast.Name) and node.id in self._functions:
            return f"{self.file}:{node.id}"
        if isinstance(node, ast.Name) and node.id in self._imported:
            return self._imported[node.id]
        node = self.follow(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.read(element) for element in node.elts]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            pass
        if isinstance(node, ast.Call) and _name(node) == "from_pretrained" and node.args:
            return self.read(node.args[0])
        if isinstance(node, ast.Call) and _name(node) == "load_dataset" and not _list_unnamed(node, 2):
            positional = dict(zip(("path", "name"), map(self.read, node.args), strict=False))
            return positional | {keyword.arg: self.read(keyword.value) for keyword in node.keywords if keyword.arg}
        return Expression(ast.unparse(node))

    def read_data_set(self, node: ast.expr) -> tuple[Any, bool]:
        """Return the call of `load_dataset` under calls such as `.map(…)`, and whether there are such calls."""
        node, is_changed = self.follow(node), False
        while True:
            if isinstance(node, ast.Call) and _name(node) == "train_test_split":
                return Expression(ast.unparse(node)), is_changed
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name(node) != "load_dataset":
                node, is_changed = self.follow(node.func.value), True
            elif isinstance(node, ast.Subscript):  # load_dataset(…)["train"]
                value, _ = self.read_data_set(node.value)
                split = self.read(node.slice)
                return ({**value, "split": split} if isinstance(value, dict) else value), is_changed
            else:
                return self.read(node), is_changed


def _name(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _list_unnamed(call: ast.Call, first: int) -> list[str]:
    """Return the positional arguments of a call from `first` on, and those such as `**options`."""
    unpacked = (f"**{ast.unparse(keyword.value)}" for keyword in call.keywords if keyword.arg is None)
    return [*map(ast.unparse, call.args[first:]), *unpacked]


def _arguments(call: ast.Call, first: str) -> dict[str, ast.expr]:
    """Return the arguments of a call by name; `first` is the name of the first one."""
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return ({first: call.args[0]} if call.args else {}) | named


def _read_script(file: Path, text: str) -> Source:
    try:
        script = _Script(file, ast.parse(text))
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}, is not Python: {error.msg}; name a script of TRL") from error
    trainers = [call for call in script.calls if _name(call) in trl.TRAINERS]
    if not trainers and (others := [_name(call) for call in script.calls if _name(call).endswith("Trainer")]):
        raise ConfigError(
            f"{file} calls {others[0]}, which has no translation; these do: {', '.join(trl.TRAINERS)}; write an "
            "experiment for it by docs/coming_from/trl.md"
        )
    if len(trainers) != 1:
        names = ", ".join(map(_name, trainers))
        raise ConfigError(
            f"{file} calls {len(trainers)} trainers{f' ({names})' if names else ''}; it must call exactly one of "
            f"{', '.join(trl.TRAINERS)}: name another file, or write each trainer to a file of its own"
        )
    trainer = trainers[0]
    of_trainer = _arguments(trainer, "model")
    settings: dict[str, Any] = {}
    calls = [trainer]
    config_name = _name(trainer).replace("Trainer", "Config")
    if "args" in of_trainer:
        config = script.follow(of_trainer.pop("args"))
        if not isinstance(config, ast.Call) or not _name(config).endswith("Config"):
            raise ConfigError(
                f"{file}: the arguments of {_name(trainer)} are not written in the script ({ast.unparse(config)}); "
                f"write a call of {config_name} with them"
            )
        config_name = _name(config)
        calls.append(config)
        settings |= {
            _qualify(config_name, name): script.read(value) for name, value in _arguments(config, "output_dir").items()
        }
    for name, value in of_trainer.items():
        if name in ("train_dataset", "eval_dataset"):
            settings[name], is_changed = script.read_data_set(value)
            if is_changed:
                settings["train_dataset.map"] = True
        elif name == "peft_config":
            config = script.follow(value)
            if isinstance(config, ast.Call) and _name(config) == "LoraConfig":
                calls.append(config)
                arguments = {key: script.read(argument) for key, argument in _arguments(config, "r").items()}
                settings |= {
                    f"LoraConfig.{key}": argument for key, argument in ({"target_modules": None} | arguments).items()
                }
            else:
                settings["LoraConfig.r"] = Expression(ast.unparse(config))
        else:
            settings[name] = script.read(value)
    if _runs_when_imported(script.tree, trainer) and str(file) in str(settings.get("reward_funcs")):
        settings["reward_funcs.file"] = str(file)
    settings["config"] = config_name
    settings[_name(trainer)] = True
    unnamed = {f"arguments of {_name(call)}": _list_unnamed(call, 1) for call in calls if _list_unnamed(call, 1)}
    defaults = {} if f"arguments of {config_name}" in unnamed else trl.find_defaults(config_name)  # they may be given
    return Source(file, trl.LIBRARY, settings | unnamed, defaults)


def _qualify(config: str, name: str) -> str:
    """Return the key of an argument, which begins with its class if the meaning depends on the class."""
    return f"{config}.{name}" if f"{config}.{name}" in trl.KEYS else name


def _runs_when_imported(tree: ast.Module, trainer: ast.Call) -> bool:
    """Return whether importing the script would train: the trainer is called outside functions and `if`."""
    statements = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)]
    return any(node is trainer for statement in statements for node in ast.walk(statement))
