"""Build the stages of a run from the run's sections and each stage's changes, and check the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from rl_megatron.config import data_sources, schema
from rl_megatron.config.data_sources import check_data
from rl_megatron.config.engines import ENGINE_DECLARATIONS, check_adapter_refit, check_generation, check_router_replay
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.hints import get_override_key
from rl_megatron.config.loading.sections import build_section, find_chosen_class, refuse_unknown
from rl_megatron.config.losses import check_loss_settings
from rl_megatron.config.reward_models import OF_STAGES, list_models_on_ranks
from rl_megatron.config.rewards import check_used
from rl_megatron.config.rules import check_asynchronous, check_deterministic, check_model
from rl_megatron.config.train import TrainConfig

STAGE_KEYS = {field.name for field in fields(schema.StageConfig)}


def build_stage(name: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> schema.StageConfig:
    """Return the stage `name`: the run's sections with the stage's own `changes`."""
    where = f"stages.{name}."
    refuse_unknown(changes, STAGE_KEYS, where)
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping) and not _replaces(key, value):
            below = _without_keys_of_another(key, merged.get(key) or {}, value)
            merged[key] = OmegaConf.to_container(OmegaConf.merge(below, value))
        else:
            merged[key] = value
    merged["data"] = _with_source(merged["data"], merged["algorithm"])
    where = where if changes else ""
    train = changes.get("train", {}) if changes else base.get("train")
    merged["train"] = _with_usual_batches(merged["train"], merged["algorithm"], train, where)
    return build_section(schema.StageConfig, merged, where)


def refuse_shadowed(overrides: list[str], stages: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse an override of a key that stages set themselves, and name the key to override instead."""
    for override in overrides:
        key = get_override_key(override)
        setting = [name for name, changes in stages.items() if _shadows(changes, key.split("."))]
        if setting:
            key = "algorithm.name" if key == "algorithm" else key
            instead = " ".join(f"stages.{name}.{key}=…" for name in setting if _has_key(stages[name], key))
            remedy = f"write {instead}" if instead else "none of them has this key"
            raise ConfigError(f"override {override!r} has no effect in stage(s) {setting}, which set it; {remedy}")


def check_stages(stages: Mapping[str, schema.StageConfig], is_named: bool) -> None:
    """Check the rules that span the sections of a stage, and those that span stages.

    If the configuration names its stages (`is_named`), messages contain these names.
    """
    first = next(iter(stages.values()))
    for name, stage in stages.items():
        try:
            _check_stage(name, stage, first, f"stages.{name}." if is_named else "")
        except ConfigError as error:
            if not is_named or str(error).startswith("stages."):
                raise
            raise ConfigError(f"stages.{name}: {error}") from error
    check_used((stage.reward, stage.scores_completions) for stage in stages.values())
    for name, stage in stages.items():
        _check_beginning(stages, name, stage)
        for index, arguments in list_models_on_ranks(stage.reward).items():
            for model in arguments.members:
                _check_reward_model(stages, name, f"reward.functions[{index}].kwargs", model.init_from)


def find_previous_stage(stages: Mapping[str, schema.StageConfig], name: str) -> str | None:
    """Return the stage from whose last weights a stage starts, or None for the first stage."""
    named = stages[name].init_from
    if named is not None:
        return named.removeprefix(OF_STAGES)
    names = list(stages)
    return names[names.index(name) - 1] if name != names[0] else None


def _check_beginning(stages: Mapping[str, schema.StageConfig], name: str, stage: schema.StageConfig) -> None:
    """Check that a stage can start from the weights of another one."""
    if stage.init_from is not None:
        _check_earlier(stages, name, "init_from", stage.init_from)
    previous = find_previous_stage(stages, name)
    if previous is None or not stage.algorithm.leaves_language_model:
        return
    if stages[previous].algorithm.leaves_language_model:
        return
    earlier = _list_earlier_stages(stages, name)
    others = [stage_name for stage_name in earlier if stages[stage_name].algorithm.leaves_language_model]
    remedy = f"stages.{name}.init_from={OF_STAGES}{others[-1]}" if others else "another order of the stages"
    raise ConfigError(
        f"stages.{name} starts from stages.{previous}, a {stages[previous].algorithm.name}, which leaves no language "
        f"model; set {remedy}"
    )


def _check_reward_model(stages: Mapping[str, schema.StageConfig], name: str, where: str, init_from: str | None) -> None:
    """Check that the reward model that a stage names comes from an earlier stage that trains one."""
    if init_from is None or not init_from.startswith(OF_STAGES):
        return
    _check_earlier(stages, name, where, init_from)
    maker = stages[init_from.removeprefix(OF_STAGES)].algorithm
    if maker.leaves_language_model:
        raise ConfigError(
            f"stages.{name}.{where}: {init_from} is a {maker.name}, which has no score head; name a stage "
            "that trains a reward model"
        )


def _check_earlier(stages: Mapping[str, schema.StageConfig], name: str, key: str, value: str) -> None:
    earlier = _list_earlier_stages(stages, name)
    if value.removeprefix(OF_STAGES) not in earlier or not value.startswith(OF_STAGES):
        choices = ", ".join(OF_STAGES + stage_name for stage_name in earlier) or "none, because this is the first stage"
        raise ConfigError(
            f"stages.{name}.{key}={value} is not an earlier stage of the run; earlier stages: {choices}; to use "
            "the weights of another run, set the init_from of the whole run"
            if key == "init_from"
            else f"stages.{name}.{key}: init_from={value} is not an earlier stage of the run; earlier stages: {choices}"
        )


def _list_earlier_stages(stages: Mapping[str, schema.StageConfig], name: str) -> list[str]:
    names = list(stages)
    return names[: names.index(name)]


def _check_stage(name: str, stage: schema.StageConfig, first: schema.StageConfig, where: str) -> None:
    for section in ("model", "parallel", "tokenizer", "precision", "device"):
        if getattr(stage, section) != getattr(first, section):
            raise ConfigError(f"stages.{name}.{section} differs from the first stage's; stages share one {section}")
    if stage.train.deterministic != first.train.deterministic:
        raise ConfigError(
            f"stages.{name}.train.deterministic differs from the first stage's; set train.deterministic for all stages"
        )
    check_model(stage.model)
    check_loss_settings(stage.loss, f"{where}loss")
    check_data(stage.data)
    stage.data.check(stage)
    stage.optimizer.check(f"{where}optimizer")
    stage.train.check(f"{where}train")
    check_deterministic(stage)
    check_generation(stage.generation)
    check_adapter_refit(stage)
    check_router_replay(stage.generation, stage.model)
    stage.reward.check()
    stage.rollout.check(f"{where}rollout", ENGINE_DECLARATIONS[stage.generation.engine].stops_at_strings)
    stage.rollout.agent.check(stage.rollout.worker)
    check_asynchronous(stage, f"{where}rollout")
    stage.eval.check(f"{where}eval", stage.generation.temperature, bool(stage.reward.functions))
    if stage.eval.sets and not stage.algorithm.leaves_language_model:
        raise ConfigError(
            f"{where}eval.sets needs a language model, which answers problems, but algorithm={stage.algorithm.name} "
            "trains none; leave the sets out"
        )
    _check_kind_of_data(stage)
    stage.algorithm.check(stage)


def _check_kind_of_data(stage: schema.StageConfig) -> None:
    needed, source = stage.algorithm.learns_from, stage.data.source
    if needed in stage.data.provides:
        return
    others = data_sources.find_sources(needed)
    raise ConfigError(
        f"algorithm={stage.algorithm.name} needs {needed}: data.source={source} does not have them; use "
        + (f"data.source={' or '.join(others)}" if others else "a plugin that registers a data source with them")
    )


def _shadows(changes: Mapping[str, object], path: list[str]) -> bool:
    """Return whether a stage's `changes` replace the run's value at `path`."""
    if path[0] not in changes:
        return False
    value = changes[path[0]]
    if not isinstance(value, Mapping) or _replaces(path[0], value):
        return True
    return len(path) > 1 and _has(value, path[1:])


def _has_key(changes: Mapping[str, object], key: str) -> bool:
    """Return whether the stage has the key; which keys `algorithm` and `data` have depends on a name in them."""
    section, _, name = key.partition(".")
    chosen = find_chosen_class(section, changes[section])
    return chosen is None or name.partition(".")[0] in {field.name for field in fields(chosen)}


def _replaces(section: str, value: Mapping[str, object]) -> bool:
    """Return whether a stage's section replaces the run's section instead of changing some of its keys."""
    return section == "algorithm" or (section == "loss" and "name" in value)


def _has(tree: object, path: list[str]) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True


def _with_source(data: Any, algorithm: Any) -> object:
    """Return a stage's data section with the default source filled in."""
    if (
        not isinstance(data, Mapping)
        or data.get("source") is not None
        or find_chosen_class("algorithm", algorithm) is None
    ):
        return data
    return {**data, "source": data_sources.choose_source(data, algorithm["name"])}


def _with_usual_batches(train: Any, algorithm: Any, changes: Any, where: str) -> object:
    """Return a stage's train section with its algorithm's default batch size and batching filled in.

    `changes` are the keys that this stage does not share with others. A `micro_batch_size` among them is refused if the
    default batching ignores it.
    """
    chosen = find_chosen_class("algorithm", algorithm)
    if not isinstance(train, Mapping) or chosen is None:
        return train
    if train.get("global_batch_size") is None:
        train = {**train, "global_batch_size": chosen.usual_batch_size(algorithm)}
    if train.get("batching") is not None:
        return train
    usual, size = chosen.usual_batching, changes.get("micro_batch_size") if isinstance(changes, Mapping) else None
    if usual != "padded" and size not in (None, TrainConfig.micro_batch_size):
        raise ConfigError(
            f"{where}train.micro_batch_size={size} has no effect: {algorithm['name']} uses train.batching={usual} by "
            "default; limit a microbatch by train.micro_batch_tokens, or set train.batching=padded"
        )
    return {**train, "batching": usual}


def _without_keys_of_another(
    section: str, below: Mapping[str, object], changes: Mapping[str, object]
) -> Mapping[str, object]:
    """Return the run's section without the keys that the stage's chosen class lacks or ignores."""
    replaced, chosen = find_chosen_class(section, below), find_chosen_class(section, changes)
    if replaced is None or chosen is None:
        return below
    only_replaced = {field.name for field in fields(replaced)} - {field.name for field in fields(chosen)}
    if issubclass(chosen, schema.DataConfig):
        only_replaced |= set(chosen.ignores)
    return {key: value for key, value in below.items() if key not in only_replaced}
