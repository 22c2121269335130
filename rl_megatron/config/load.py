"""Compose a configuration with Hydra and build its dataclasses: strict keys, stages, and rules across sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from rl_megatron.config import algorithms, checkpoint_metadata, data_sources, schema
from rl_megatron.config.aliases import UserFiles, rename_overrides, rename_tree
from rl_megatron.config.engines import check_generation
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.model_rules import check_model
from rl_megatron.config.plugins import import_plugins, listed_plugins

_STAGE_KEYS = {field.name for field in fields(schema.StageConfig)}
_RUN_KEYS = {field.name for field in fields(schema.RunConfig)}
_OPEN_SECTIONS = ("stages.", "algorithm.", "data.")  # the keys of these depend on a name in the section
# Sections whose dataclass is chosen by one of their keys.
_CHOOSING_KEYS = {
    "algorithm": ("name", algorithms.ALGORITHM_CONFIGS),
    "data": ("source", data_sources.SOURCE_CONFIGS),
}


def config_directory() -> Path:
    """Return the directory of the shipped YAML files: in the installed package, or `configs/` of a source tree."""
    installed = Path(__file__).resolve().parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "configs"


def load_config(overrides: list[str], config_dir: str | None = None) -> schema.RunConfig:
    """Return the run that `overrides` describe, after importing its plugins.

    Args:
        overrides: Overrides in Hydra's syntax, as in `experiment=quickstart train.seed=1`.
        config_dir: The user's own directory. Its YAML files are found like the shipped ones (`experiment=mine` selects
            `experiment/mine.yaml`), and its Python modules can be plugins.

    Raises:
        ConfigError: A key or value is wrong. The message names the key, the value, the rule and, for a mistyped key,
            the nearest one.
    """
    overrides = rename_overrides(overrides)
    tree = rename_tree(_compose(overrides, config_dir), older_wins=True)
    tree.pop("experiment", None)
    import_plugins(listed_plugins(tree.get("plugins")), None if config_dir is None else Path(config_dir))
    _take_tokenizer(tree)
    _refuse_unknown(tree, _STAGE_KEYS | _RUN_KEYS, "")
    _refuse_missing(tree, _STAGE_KEYS)
    alone = str(_mapping(tree["algorithm"], "algorithm").get("name"))
    stages = _mapping(tree.pop("stages", None), "stages") or {alone: {}}
    stages = {name: _mapping(changes, f"stages.{name}") for name, changes in stages.items()}
    run = {key: tree.pop(key) for key in list(tree) if key in _RUN_KEYS}
    _refuse_shadowed(overrides, stages)
    built = {name: _build_stage(name, tree, changes) for name, changes in stages.items()}
    config = replace(_validated(schema.RunConfig, {"stages": {}, **run}, ""), stages=built)
    for name, stage in built.items():
        _check_stage(name, stage, config.first)
    for name, stage in list(built.items())[:-1]:
        if not stage.algorithm.leaves_language_model:
            raise ConfigError(
                f"stages.{name} is a {stage.algorithm.name}, which leaves no language model for the next stage; put it "
                "last, or in a run of its own"
            )
    return config


def _take_tokenizer(tree: dict[str, Any]) -> None:
    """Use the tokenizer that the checkpoint `init_from` brings from Hugging Face, unless `tokenizer.path` is set."""
    begun, tokenizer = tree.get("init_from"), tree.get("tokenizer")
    if isinstance(begun, str) and isinstance(tokenizer, dict) and tokenizer.get("path") is None:
        carried = checkpoint_metadata.carried_tokenizer(Path(begun))
        tokenizer["path"] = None if carried is None else str(carried)


def to_yaml(config: schema.RunConfig) -> str:
    """Return the effective configuration, with every default filled in, as YAML that `from_yaml` reads."""
    return yaml.safe_dump(TypeAdapter(schema.RunConfig).dump_python(config, mode="json"), sort_keys=False)


def from_yaml(text: str, where: str) -> schema.RunConfig:
    """Return the configuration that `to_yaml` wrote, after importing its plugins.

    Keys that the text does not have, because they were added later, take their default. Older names of keys are
    accepted.

    Args:
        text: The YAML.
        where: The name of its file, for messages.

    Raises:
        ConfigError: The text is not a configuration, or a plugin cannot be imported; the message names `where`.
    """
    try:
        tree = yaml.safe_load(text)
        if isinstance(tree, Mapping):
            tree = rename_tree(tree)
            import_plugins(listed_plugins(tree.get("plugins")))
        return TypeAdapter(schema.RunConfig).validate_python(tree)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{where} is not a configuration that this version can read: {error}; restore it, for example from the "
            "config.yaml of a checkpoint, or set another output_dir"
        ) from error


def _compose(overrides: list[str], config_dir: str | None) -> dict[str, Any]:
    """Return Hydra's composition as plain dicts and lists, with interpolations resolved."""
    extra = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a directory")
        extra = [f"hydra.searchpath=[{UserFiles.scheme()}://{Path(config_dir).resolve()}]"]
    GlobalHydra.instance().clear()
    # For configs/model/init_from.yaml.
    OmegaConf.register_new_resolver("of_checkpoint", checkpoint_metadata.model_key, replace=True)
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        try:
            _refuse_unknown_stages(overrides, extra)
            composed = compose("config", overrides=[*map(_adding, overrides), *extra])
            return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=False))
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_of_resolver(error) or _explain(error, overrides)) from error


def _of_resolver(error: BaseException | None) -> str | None:
    """Return the message of a resolver's ConfigError, which OmegaConf may have wrapped more than once, or None."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return None if error is None else str(error)


def _adding(override: str) -> str:
    """Return the override in the form that may add a key: in open sections the schema checks keys, not Hydra."""
    return f"++{override}" if override.startswith(_OPEN_SECTIONS) else override


def _refuse_unknown_stages(overrides: list[str], extra: list[str]) -> None:
    """Refuse an override of a stage that the experiment does not have, which would otherwise add a stage."""
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
    """Return a message about an override that Hydra refuses: the nearest key if its key is unknown, or Hydra's own."""
    groups = [override for override in overrides if "." not in override.split("=", 1)[0]]
    known = set(_schema_paths(schema.StageConfig)) | _RUN_KEYS | {"experiment"}
    try:
        known |= set(_tree_paths(cast(dict[str, Any], OmegaConf.to_container(compose("config", overrides=groups)))))
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
    """Yield every key path of a dataclass: "train", "train.steps", …; those of all members of a union."""
    hints = get_type_hints(section)
    for name in (field.name for field in fields(section)):
        path = f"{prefix}{name}"
        yield path
        for member in _dataclass_members(hints[name]):
            yield from _schema_paths(member, f"{path}.")


def _dataclass_members(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Annotated, Union, UnionType):
        for argument in get_args(hint):
            yield from _dataclass_members(argument)


def _chosen_class(section: str, values: Any) -> type | None:
    """Return the registered dataclass that a section's name chooses, or None if the section has no such name."""
    if section not in _CHOOSING_KEYS or not isinstance(values, Mapping):
        return None
    key, registry = _CHOOSING_KEYS[section]
    name = values.get(key)
    return registry[name] if isinstance(name, str) and name in registry else None


def _refuse_shadowed(overrides: list[str], stages: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an override of a key that stages set themselves, and name the key under which it takes effect."""
    for override in overrides:
        key = override.split("=", 1)[0].lstrip("+")
        setting = [name for name, changes in stages.items() if _shadows(changes, key.split("."))]
        if setting:
            key = "algorithm.name" if key == "algorithm" else key
            instead = " ".join(f"stages.{name}.{key}=…" for name in setting if _has_key(stages[name], key))
            remedy = f"write {instead}" if instead else "none of them has this key"
            raise ConfigError(f"override {override!r} has no effect in stage(s) {setting}, which set it; {remedy}")


def _shadows(changes: Mapping[str, Any], path: list[str]) -> bool:
    """Return whether a stage's `changes` replace the run's value at `path`."""
    if path[0] not in changes:
        return False
    value = changes[path[0]]
    if not isinstance(value, Mapping) or _replaces(path[0], value):
        return True
    return len(path) > 1 and _has(value, path[1:])


def _has_key(changes: Mapping[str, Any], key: str) -> bool:
    """Return whether the stage has the key: the keys of `algorithm` and `data` depend on a name in them."""
    section, _, name = key.partition(".")
    chosen = _chosen_class(section, changes[section])
    return chosen is None or name.partition(".")[0] in {field.name for field in fields(chosen)}


def _replaces(section: str, value: Mapping[str, Any]) -> bool:
    """Return whether a stage's section replaces the run's section instead of changing some of its keys."""
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
            below = _without_keys_of_another(key, merged.get(key) or {}, value)
            merged[key] = OmegaConf.to_container(OmegaConf.merge(below, value))
        else:
            merged[key] = value
    return _validated(schema.StageConfig, merged, where if changes else "")


def _without_keys_of_another(section: str, below: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run's section without the keys that the stage's own choice of name does not have."""
    before, after = _chosen_class(section, below), _chosen_class(section, changes)
    if before is None or after is None:
        return below
    only_before = {field.name for field in fields(before)} - {field.name for field in fields(after)}
    return {key: value for key, value in below.items() if key not in only_before}


def _validated(section: type, values: Mapping[str, Any], where: str) -> Any:
    try:
        return TypeAdapter(section).validate_python(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(detail, section, values, where) for detail in error.errors())) from error


def _describe(detail: Mapping[str, Any], section: type, values: Mapping[str, Any], where: str) -> str:
    location = [str(part) for part in detail["loc"]]
    if location[:2] == ["model", "rope_scaling"] and len(location) > 3:
        location.pop(2)  # pydantic adds the name of the union's member, which the key path does not have
    path = ".".join(location)
    if detail["type"] == "unexpected_keyword_argument":
        chosen = _chosen_class(location[0], values.get(location[0]))
        known = _schema_paths(section) if chosen is None else _schema_paths(chosen, f"{location[0]}.")
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
        raise ConfigError(f"the configuration has no {missing[0]!r}: an override or an experiment deleted it; keep it")


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Return `value`, or an empty mapping for null."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}: must be a mapping of keys to values")
    return value or {}


def _check_stage(name: str, stage: schema.StageConfig, first: schema.StageConfig) -> None:
    """Check the rules that span sections."""
    for section in ("model", "parallel", "tokenizer", "precision", "device"):
        if getattr(stage, section) != getattr(first, section):
            raise ConfigError(f"stages.{name}.{section} differs from the first stage's; stages share one {section}")
    check_model(stage.model)
    stage.data.check(stage)
    stage.optimizer.check("optimizer")
    check_generation(stage.generation)
    _check_kind_of_data(stage)
    stage.algorithm.check(stage)


def _check_kind_of_data(stage: schema.StageConfig) -> None:
    needed, source = stage.algorithm.learns_from, stage.data.source
    if needed in stage.data.provides:
        return
    others = data_sources.sources_providing(needed)
    raise ConfigError(
        f"algorithm={stage.algorithm.name} needs {needed}: data.source={source} does not have them; use "
        + (f"data.source={' or '.join(others)}" if others else "a plugin that registers a data source with them")
    )
