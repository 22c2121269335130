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

from rl_megatron.config import checkpoint_metadata, schema
from rl_megatron.config.engines import check_generation
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.model_rules import check_model

_STAGE_KEYS = {field.name for field in fields(schema.StageConfig)}
_RUN_KEYS = {"stages", "output_dir", "init_from", "resume"}
# What each algorithm learns from, and the values of data.source that have it.
_LEARNS_FROM = {
    "pretrain": ("text", ("text", "task")),
    "sft": ("prompts and answers", ("prompt_answer", "task")),
    "dpo": ("pairs", ("preference",)),
    "reward_model": ("pairs", ("preference",)),
    "grpo": ("rewards", ("task",)),
    "ppo": ("rewards", ("task",)),
}
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
    _take_tokenizer(tree)
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
    for name, stage in list(built.items())[:-1]:
        if stage.algorithm.name == "reward_model":
            raise ConfigError(
                f"stages.{name} is a reward_model, which has no language model to hand on; put it last, or in a run of "
                "its own"
            )
    return config


def _take_tokenizer(tree: dict[str, Any]) -> None:
    """A run that begins with a checkpoint that carries a tokenizer uses it, unless it names another."""
    begun, tokenizer = tree.get("init_from"), tree.get("tokenizer")
    if isinstance(begun, str) and isinstance(tokenizer, dict) and tokenizer.get("path") is None:
        carried = checkpoint_metadata.carried_tokenizer(Path(begun))
        tokenizer["path"] = None if carried is None else str(carried)


def to_yaml(config: schema.RunConfig) -> str:
    """The effective configuration, every default filled in, as YAML that can be read back."""
    return yaml.safe_dump(TypeAdapter(schema.RunConfig).dump_python(config, mode="json"), sort_keys=False)


def from_yaml(text: str, where: str) -> schema.RunConfig:
    """What `to_yaml` wrote, keys since added at their default.  Raises: ConfigError naming `where`."""
    try:
        return TypeAdapter(schema.RunConfig).validate_python(yaml.safe_load(text))
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{where} is not a configuration that this version can read: {error}") from error


def _compose(overrides: list[str], config_dir: str | None) -> dict[str, Any]:
    """Hydra's composition as plain dicts and lists, interpolations resolved."""
    extra = []
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a directory")
        extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
    GlobalHydra.instance().clear()
    # For configs/model/init_from.yaml.
    OmegaConf.register_new_resolver("of_checkpoint", checkpoint_metadata.model_key, replace=True)
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        try:
            _refuse_unknown_stages(overrides, extra)
            composed = compose("config", overrides=[*map(_adding, overrides), *extra])
            return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        except ConfigError:
            raise
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_of_resolver(error) or _explain(error, overrides)) from error


def _of_resolver(error: BaseException | None) -> str | None:
    """What a resolver said, whose ConfigError OmegaConf wrapped, perhaps more than once."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return None if error is None else str(error)


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
    return algorithm is None or name.partition(".")[0] in algorithm.__dataclass_fields__


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
    if location[:2] == ["model", "rope_scaling"] and len(location) > 3:
        location.pop(2)  # likewise
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
    model, data = stage.model, stage.data
    for section in ("model", "parallel", "tokenizer", "precision", "device"):
        if getattr(stage, section) != getattr(first, section):
            raise ConfigError(f"stages.{name}.{section} differs from the first stage's; stages share one {section}")
    check_model(model)
    if data.source != "task" and data.path is None:
        raise ConfigError(f"data.path is not set and data.source={data.source} reads it; add data.path=…")
    if data.source == "task" and "name" not in data.task:
        raise ConfigError("data.source=task needs data.task.name (arithmetic, gsm8k)")
    _check_optimizer("optimizer", stage.optimizer)
    check_generation(stage.generation)
    _check_algorithm(stage)


def _check_algorithm(stage: schema.StageConfig) -> None:
    """What the stage's algorithm asks of the other sections."""
    algorithm, data = stage.algorithm, stage.data
    needed, sources = _LEARNS_FROM[algorithm.name]
    if data.source not in sources:
        raise ConfigError(
            f"algorithm={algorithm.name} needs {needed}: data.source={data.source} has none; "
            f"use data.source={' or '.join(sources)}"
        )
    if data.source == "preference":
        _check_whole_pairs(stage)
    if algorithm.name == "pretrain" and data.sequence_length > stage.model.max_sequence_length:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} exceeds model.max_sequence_length="
            f"{stage.model.max_sequence_length}; lower the one or raise the other"
        )
    if algorithm.name in ("grpo", "ppo") and stage.generation.temperature == 0:
        raise ConfigError(
            f"generation.temperature=0 is greedy: {algorithm.name} needs differing samples; set it above 0"
        )
    if algorithm.name == "grpo" and algorithm.samples_per_prompt == 1:
        if algorithm.advantage_estimator == "group_relative" or algorithm.dynamic_sampling:
            raise ConfigError(
                "algorithm.samples_per_prompt=1 leaves a sample without a group to be compared with; set it to 2 or "
                "more, or algorithm.advantage_estimator=reinforce_plus_plus without dynamic_sampling"
            )
    if algorithm.name == "grpo" and algorithm.advantage_estimator == "reinforce_plus_plus":
        for key, default in {"leave_one_out": False, "normalize_std": True}.items():
            if getattr(algorithm, key) != default:
                raise ConfigError(
                    f"algorithm.{key}={str(not default).lower()} is of advantages relative to a group, which "
                    f"algorithm.advantage_estimator=reinforce_plus_plus does not compute; set it to "
                    f"{str(default).lower()}, or algorithm.advantage_estimator=group_relative"
                )
    if algorithm.name == "ppo":
        _check_optimizer("algorithm.critic_optimizer", algorithm.critic_optimizer)
        if algorithm.critic_warmup_steps >= stage.train.steps:
            raise ConfigError(
                f"algorithm.critic_warmup_steps={algorithm.critic_warmup_steps} must be less than train.steps="
                f"{stage.train.steps}, or the policy never learns"
            )


def _check_whole_pairs(stage: schema.StageConfig) -> None:
    counts = {
        "train.global_batch_size": stage.train.global_batch_size,
        "train.micro_batch_size": stage.train.micro_batch_size,
        "data.num_eval_rows": stage.data.num_eval_rows,
    }
    for key, count in counts.items():
        if count % 2:
            raise ConfigError(
                f"{key}={count} must be even: a pair is two rows, chosen and rejected; set it to {count + 1}"
            )


def _check_optimizer(where: str, optimizer: schema.OptimizerConfig) -> None:
    if optimizer.decay_steps is not None and optimizer.warmup_steps >= optimizer.decay_steps:
        raise ConfigError(
            f"{where}.warmup_steps={optimizer.warmup_steps} must be less than "
            f"{where}.decay_steps={optimizer.decay_steps}"
        )
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"{where}.min_lr={optimizer.min_lr} must not exceed {where}.lr={optimizer.lr}")
