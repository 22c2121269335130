"""Hydra → frozen dataclasses: composition, strict keys, stages, and the checks that need more than one section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from rl_megatron.config import schema
from rl_megatron.config.errors import ConfigError, nearest

_STAGE_KEYS = {field.name for field in fields(schema.StageConfig)}
_RUN_KEYS = {"stages", "output_dir", "init_from", "resume"}


def config_directory() -> Path:
    """The shipped YAML files: inside the installed package, or `configs/` of a source tree."""
    installed = Path(__file__).resolve().parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "configs"


def load(overrides: list[str], config_dir: str | None = None) -> schema.RunConfig:
    """The run that `overrides` (Hydra's syntax: `experiment=quickstart train.seed=1`) describe.

    `config_dir`: a directory of the user's own, searched before the shipped one (its `experiment/mine.yaml` answers to
    `experiment=mine`).

    Raises: ConfigError naming the key, the value, the rule and, for a mistyped key, the nearest one.
    """
    composed = _compose(overrides, config_dir)
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    tree.pop("experiment", None)
    _refuse_unknown(tree, _STAGE_KEYS | _RUN_KEYS, "")
    stages = tree.pop("stages") or {tree["algorithm"]["name"]: {}}
    run = {key: tree.pop(key) for key in list(tree) if key in _RUN_KEYS}
    _refuse_shadowed(overrides, stages)
    built = {name: _build_stage(name, tree, changes or {}) for name, changes in stages.items()}
    config = _validated(schema.RunConfig, {"stages": {}, **run}, "")
    config = schema.RunConfig(stages=built, output_dir=config.output_dir, init_from=config.init_from, resume=config.resume)
    for name, stage in built.items():
        _check_stage(name, stage, config.first)
    return config


def to_yaml(config: schema.RunConfig) -> str:
    """The effective configuration, every default filled in, as YAML that can be read back."""
    return yaml.safe_dump(TypeAdapter(schema.RunConfig).dump_python(config, mode="json"), sort_keys=False)


def _compose(overrides: list[str], config_dir: str | None) -> DictConfig:
    extra = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a directory")
        extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        try:
            return compose("config", overrides=[*overrides, *extra])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(error, overrides)) from error


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra's message, or the nearest key where an override's key is unknown."""
    groups = [override for override in overrides if "." not in override.split("=", 1)[0]]
    known = set(_schema_paths(schema.StageConfig)) | _RUN_KEYS | {"experiment"}
    try:
        known |= set(_tree_paths(OmegaConf.to_container(compose("config", overrides=groups))))
    except (HydraException, OmegaConfBaseException):
        pass  # a group choice itself is wrong: Hydra's message lists the choices
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        if "=" not in override:
            return f"override {override!r} has no '='; write key=value"
        if key not in known and not key.startswith(("stages.", "data.task.")):
            siblings = {path for path in known if path.rpartition(".")[0] == key.rpartition(".")[0]}
            return f"unknown key {key!r} in override {override!r}{nearest(key, siblings or known)}"
    return str(error).strip()


def _tree_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _tree_paths(value, f"{prefix}{key}.")


def _schema_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Every key path of a dataclass: "train", "train.steps", …; the members of a union all count."""
    for name, hint in get_type_hints(section).items():
        path = f"{prefix}{name}"
        yield path
        for member in _dataclass_members(hint):
            yield from _schema_paths(member, f"{path}.")


def _dataclass_members(hint: Any) -> Iterator[type]:
    if is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Annotated, Union, UnionType):
        for argument in get_args(hint):
            yield from _dataclass_members(argument)


def _refuse_shadowed(overrides: list[str], stages: Mapping[str, Any]) -> None:
    """An override of a key that the stages set themselves would do nothing: say where it takes effect."""
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+")
        path = key.split(".")
        if path[0] not in _STAGE_KEYS or len(path) < 2:
            continue
        setting = [name for name, changes in stages.items() if _has(changes, path)]
        if setting:
            instead = " ".join(f"stages.{name}.{key}=…" for name in setting)
            raise ConfigError(f"override {override!r} has no effect in stage(s) {setting}, which set it; write {instead}")


def _has(tree: Any, path: list[str]) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True


def _build_stage(name: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> schema.StageConfig:
    where = f"stages.{name}."
    _refuse_unknown(changes, _STAGE_KEYS, where)
    merged = dict(base)
    for key, value in changes.items():
        replaces = key == "algorithm" or (key == "loss" and "name" in value)  # another name has other keys
        if isinstance(value, Mapping) and not replaces:
            merged[key] = OmegaConf.to_container(OmegaConf.merge(merged.get(key) or {}, value))
        else:
            merged[key] = value
    return _validated(schema.StageConfig, merged, where if changes else "")


def _validated(section: type, values: Mapping[str, Any], where: str) -> Any:
    try:
        return TypeAdapter(section).validate_python(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(detail, section, where) for detail in error.errors())) from error


def _describe(detail: Mapping[str, Any], section: type, where: str) -> str:
    location = [str(part) for part in detail["loc"]]
    if location[:1] == ["algorithm"] and len(location) > 2:
        del location[1]  # pydantic names the union's member; the key path does not
    path = ".".join(location)
    if detail["type"] == "unexpected_keyword_argument":
        return f"unknown key {where + path!r}{nearest(path, _schema_paths(section))}"
    return f"{where}{path}={detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _refuse_unknown(tree: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in tree:
        if key not in known:
            raise ConfigError(f"unknown key {where + key!r}{nearest(key, known)}")


def _check_stage(name: str, stage: schema.StageConfig, first: schema.StageConfig) -> None:
    """Rules that span sections."""
    model, data, train = stage.model, stage.data, stage.train
    for section in ("model", "parallel", "tokenizer", "precision", "device"):
        if getattr(stage, section) != getattr(first, section):
            raise ConfigError(f"stages.{name}.{section} differs from the first stage's; stages share one {section}")
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"model.num_query_groups={model.num_query_groups} must divide "
            f"model.num_attention_heads={model.num_attention_heads}"
        )
    if model.head_dim is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={model.num_attention_heads}; change one or set model.head_dim"
        )
    if data.source in ("text", "prompt_answer") and data.path is None:
        raise ConfigError(f"data.path is not set and data.source={data.source} reads it; add data.path=…")
    if data.source == "task" and "name" not in data.task:
        raise ConfigError("data.source=task needs data.task.name (arithmetic, gsm8k)")
    if stage.algorithm.name == "grpo" and data.source != "task":
        raise ConfigError(f"algorithm=grpo needs rewards: data.source={data.source} has none; use data.source=task")
    if stage.algorithm.name == "sft" and data.source == "text":
        raise ConfigError("algorithm=sft needs prompts and answers; use data.source=prompt_answer or task")
    if stage.algorithm.name == "pretrain" and data.source == "prompt_answer":
        raise ConfigError("algorithm=pretrain reads text; use data.source=text or task")
    if stage.algorithm.name == "pretrain" and data.sequence_length > model.max_sequence_length:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} exceeds model.max_sequence_length="
            f"{model.max_sequence_length}; lower the one or raise the other"
        )
    if stage.optimizer.warmup_steps >= (stage.optimizer.decay_steps or train.steps + stage.optimizer.warmup_steps + 1):
        raise ConfigError(
            f"optimizer.warmup_steps={stage.optimizer.warmup_steps} must be less than "
            f"optimizer.decay_steps={stage.optimizer.decay_steps}"
        )
    if stage.algorithm.name == "grpo" and stage.generation.temperature == 0:
        raise ConfigError("generation.temperature=0 is greedy: grpo needs differing samples; set it above 0")
