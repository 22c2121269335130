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
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from rl_megatron.config import schema
from rl_megatron.config.errors import ConfigError, nearest

_STAGE_KEYS = {field.name for field in fields(schema.StageConfig)}
_RUN_KEYS = {"stages", "output_dir", "init_from", "resume"}
_OPEN_SECTIONS = ("stages.", "algorithm.", "data.task.")  # their keys depend on a name chosen within


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
    tree = _compose(overrides, config_dir)
    tree.pop("experiment", None)
    _refuse_unknown(tree, _STAGE_KEYS | _RUN_KEYS, "")
    _refuse_missing(tree, _STAGE_KEYS)
    stages = _mapping(tree.pop("stages", None), "stages") or {_mapping(tree["algorithm"], "algorithm").get("name"): {}}
    stages = {name: _mapping(changes, f"stages.{name}") for name, changes in stages.items()}
    run = {key: tree.pop(key) for key in list(tree) if key in _RUN_KEYS}
    _refuse_shadowed(overrides, stages)
    built = {name: _build_stage(name, tree, changes) for name, changes in stages.items()}
    config = _validated(schema.RunConfig, {"stages": {}, **run}, "")
    config = schema.RunConfig(
        stages=built, output_dir=config.output_dir, init_from=config.init_from, resume=config.resume
    )
    for name, stage in built.items():
        _check_stage(name, stage, config.first)
    return config


def to_yaml(config: schema.RunConfig) -> str:
    """The effective configuration, every default filled in, as YAML that can be read back."""
    return yaml.safe_dump(TypeAdapter(schema.RunConfig).dump_python(config, mode="json"), sort_keys=False)


def _compose(overrides: list[str], config_dir: str | None) -> dict[str, Any]:
    """Hydra's composition as plain dicts and lists, interpolations resolved."""
    extra = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a directory")
        extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        try:
            _refuse_unknown_stages(overrides, extra)
            composed = compose("config", overrides=[*map(_adding, overrides), *extra])
            return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_explain(error, overrides)) from error


def _adding(override: str) -> str:
    """Keys that an experiment need not spell out may be set all the same; whether they exist, the schema knows."""
    return f"++{override}" if override.startswith(_OPEN_SECTIONS) else override


def _refuse_unknown_stages(overrides: list[str], extra: list[str]) -> None:
    """A mistyped stage in `stages.NAME.…=` would be one more stage."""
    named = [override for override in overrides if override.startswith("stages.")]
    if not named:
        return
    others = [override for override in overrides if override not in named]
    stages = compose("config", overrides=[*map(_adding, others), *extra]).get("stages") or {}
    for override in named:
        name = override.split("=", 1)[0].split(".")[1]
        if name not in stages:
            hint = nearest(name, stages) if stages else "; it has no stages: leave stages.NAME out"
            raise ConfigError(f"override {override!r}: the experiment has no stage {name!r}{hint}")


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra's message, or the nearest key where an override's key is unknown."""
    groups = [override for override in overrides if "." not in override.split("=", 1)[0]]
    known = set(_schema_paths(schema.StageConfig)) | _RUN_KEYS | {"experiment"}
    try:
        known |= set(_tree_paths(OmegaConf.to_container(compose("config", overrides=groups))))
    except (HydraException, OmegaConfBaseException, ValueError):
        pass  # a group choice itself is wrong: Hydra's message lists the choices
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+~")
        if "=" not in override:
            return f"override {override!r} has no '='; write key=value"
        if key not in known and not key.startswith(_OPEN_SECTIONS):
            siblings = {path for path in known if path.rpartition(".")[0] == key.rpartition(".")[0]}
            return f"unknown key {key!r} in override {override!r}{nearest(key, siblings or known)}"
    return " ".join(str(error).partition("\nConfig search path:")[0].split())


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


def _algorithms() -> dict[str, type]:
    return {
        member.__dataclass_fields__["name"].default: member for member in _dataclass_members(schema.AlgorithmConfig)
    }


def _refuse_shadowed(overrides: list[str], stages: Mapping[str, Mapping[str, Any]]) -> None:
    """An override of a key that the stages set themselves would do nothing: say where it takes effect."""
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+")
        setting = [name for name, changes in stages.items() if _shadows(changes, key.split("."))]
        if setting:
            key = "algorithm.name" if key == "algorithm" else key
            instead = " ".join(f"stages.{name}.{key}=…" for name in setting if _has_key(stages[name], key))
            remedy = f"write {instead}" if instead else "none of them has this key"
            raise ConfigError(f"override {override!r} has no effect in stage(s) {setting}, which set it; {remedy}")


def _shadows(changes: Mapping[str, Any], path: list[str]) -> bool:
    """Whether a stage's `changes` take the place of what the run has at `path`."""
    if path[0] not in changes:
        return False
    value = changes[path[0]]
    if not isinstance(value, Mapping) or _replaces(path[0], value):
        return True
    return len(path) > 1 and _has(value, path[1:])


def _has_key(changes: Mapping[str, Any], key: str) -> bool:
    """Whether `key` is one of the stage's: the keys of `algorithm` depend on its name."""
    section, _, name = key.partition(".")
    if section != "algorithm" or not isinstance(changes["algorithm"], Mapping):
        return True
    algorithm = _algorithms().get(changes["algorithm"].get("name"))
    return algorithm is None or name in algorithm.__dataclass_fields__


def _replaces(section: str, value: Mapping[str, Any]) -> bool:
    """Whether a stage's section stands alone rather than on top of the run's: another name has other keys."""
    return section == "algorithm" or (section == "loss" and "name" in value)


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
        if isinstance(value, Mapping) and not _replaces(key, value):
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
    location, known = [str(part) for part in detail["loc"]], _schema_paths(section)
    if location[:1] == ["algorithm"] and len(location) > 2:
        member = location.pop(1)  # pydantic names the union's member; the key path does not
        known = _schema_paths(_algorithms()[member], "algorithm.")
    path = ".".join(location)
    if detail["type"] == "unexpected_keyword_argument":
        return f"unknown key {where + path!r}{nearest(path, known)}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}{path}={detail['input']!r}: {message[0].lower()}{message[1:]}"


def _refuse_unknown(tree: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in tree:
        if key not in known:
            raise ConfigError(f"unknown key {f'{where}{key}'!r}{nearest(str(key), known)}")


def _refuse_missing(tree: Mapping[str, Any], needed: set[str]) -> None:
    missing = sorted(needed - tree.keys())
    if missing:
        raise ConfigError(f"no {missing[0]!r} in the configuration: an override or an experiment deleted it; keep it")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    """`value`, nothing (null) being an empty mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}: must be a mapping of keys to values")
    return value or {}


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
    if stage.optimizer.min_lr > stage.optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr={stage.optimizer.min_lr} must not exceed optimizer.lr={stage.optimizer.lr}"
        )
    if stage.algorithm.name == "grpo" and stage.generation.temperature == 0:
        raise ConfigError("generation.temperature=0 is greedy: grpo needs differing samples; set it above 0")
