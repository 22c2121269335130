"""Suggest the key or the quoting that a user meant, for keys and overrides that are refused."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import OverrideParseException

from rl_megatron.config import schema
from rl_megatron.config.commands import format_list_override, format_override
from rl_megatron.config.errors import nearest
from rl_megatron.config.migration import nemo_rl, trl, verl
from rl_megatron.config.recipes import suggest_method

TABLES = (trl.LIBRARY, nemo_rl.LIBRARY, verl.LIBRARY)
OPEN_SECTIONS = ("stages.", "algorithm.", "data.")  # sections whose keys depend on a name in the section
_MOST = 2  # keys that one hint names
# Names in other libraries → the keys here, besides those of the tables in config/migration. Only messages about unknown
# keys use them.
NAMES_ELSEWHERE = {
    "beta": ("loss.reference_policy_kl_penalty",),
    "n": ("algorithm.samples_per_prompt",),
    "model.path": ("init_from",),
    "kl_coef": ("loss.reference_policy_kl_penalty",),
    "clip_range": ("loss.ratio_clip_min", "loss.ratio_clip_max"),
    "async_grpo": ("rollout.async_enabled",),
    "partial_rollout": ("rollout.partial",),
    "over_sampling_batch_size": ("rollout.over_sampling",),
    "staleness_threshold": ("rollout.max_trajectory_age_steps",),
    "max_head_offpolicyness": ("rollout.max_trajectory_age_steps",),
    "max_off_policy_steps": ("rollout.max_trajectory_age_steps",),
    "lr": ("optimizer.lr",),
    "max_tokens": ("generation.max_new_tokens",),
    "max_seq_length": ("model.max_sequence_length",),
    "dataset": ("data.path",),
    "dataset_path": ("data.path",),
    "checkpoint.export_hf": ("train.export_hf",),
    "logging": ("metric_sinks",),
    "wandb": ("logger.wandb",),
    "mlflow": ("logger.mlflow",),
    "model_name_or_path": ("init_from",),
    "pretrained": ("init_from",),
    "peft_config": ("peft.r",),
    "peft.dim": ("peft.r",),
    "peft.alpha": ("peft.lora_alpha",),
    "peft.dropout": ("peft.lora_dropout",),
    "lora_r": ("peft.r",),
    "lora_target_modules": ("peft.target_modules",),
}
_REMARKS = {
    "init_from": " It takes a checkpoint, which `rl-megatron convert import` makes from a Hugging Face directory"
}

# Keys of peft's LoraConfig that have no key here.
_UNSUPPORTED = {
    "peft.bias": "biases are not trained beside an adapter; leave the key out",
}


def suggest_key(key: str, keys: Iterable[str]) -> str:
    """Return the end of a message about an unknown key, such as "train.lr" or "data.mix[0].wieght": the likely keys.

    Likely keys are those that have this name in other libraries, those of the same name in other sections, and a
    similar one in the same section. If there are none, the message has a similar path, or all keys of the section.
    `keys` are the paths of all keys; a list's elements are written as in "data.mix[].weight".
    """
    element = re.search(r"\[\d+\]", key)
    if element is not None:
        inside = [path for path in keys if "[]" in path]
        return suggest_key(key.replace(element[0], "[]"), inside).replace("[]", element[0])
    refused = next((why for name, why in _UNSUPPORTED.items() if key == name or key.endswith(f".{name}")), None)
    if refused is not None:
        return f"; {refused}"
    # The note of an automatic key says only that another key is read, or that it changes no result.
    entries = (table.keys[key] for table in TABLES if key in table.keys)
    counterpart = next((entry for entry in entries if not entry.is_automatic), None)
    if counterpart is not None and not (counterpart.here and counterpart.is_translated):
        return f"; {counterpart.note}"
    keys = sorted({path for path in keys if ("[]" in path) == ("[]" in key)})
    section, _, name = key.rpartition(".")
    siblings = [path for path in keys if path.rpartition(".")[0] == section]
    names = {path.rpartition(".")[2]: path for path in siblings}
    similar = [names[match] for match in difflib.get_close_matches(name, names, n=1, cutoff=0.65)]
    elsewhere = [path for path in keys if path.rpartition(".")[2] == name]
    elsewhere.sort(key=lambda path: -difflib.SequenceMatcher(None, key, path).ratio())
    meant = list(dict.fromkeys((*_find_elsewhere(key), *elsewhere, *similar))) or difflib.get_close_matches(
        key, siblings or keys, n=1, cutoff=0.75
    )
    if counterpart is not None:
        meant = list(counterpart.here)
    if meant[:1] and meant[0] in _REMARKS:
        meant = meant[:1]
    if meant:
        return f"; did you mean {' or '.join(map(repr, meant[:_MOST]))}?{_REMARKS.get(meant[0], '')}"
    if siblings and section:
        return f"; {section} has the keys {', '.join(names)}"
    return f"; known: {', '.join(path for path in keys if '.' not in path) or ', '.join(keys) or 'none'}"


def _find_elsewhere(key: str) -> tuple[str, ...]:
    """Return the keys here of a key that ends as one of another library does."""
    *_, name = parts = key.split(".")
    endings = _endings() | NAMES_ELSEWHERE
    return endings.get(".".join(parts[-2:])) or endings.get(name, ())


@cache
def _endings() -> dict[str, tuple[str, ...]]:
    """Return the keys here by the last one and two names of other libraries' keys, if all keys with them agree."""
    meanings: dict[str, set[tuple[str, ...]]] = {}
    for table in TABLES:
        for key, counterpart in table.keys.items():
            parts = key.split(".")
            for ending in {parts[-1], ".".join(parts[-2:])} if "*" not in key else ():
                meanings.setdefault(ending, set()).add(counterpart.here)
    return {
        ending: next(iter(several)) for ending, several in meanings.items() if len(several) == 1 and several != {()}
    }


def tree_paths(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield every key path of nested mappings: "train", "train.steps", …."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from tree_paths(value, f"{prefix}{key}.")


def schema_paths(section: Any, prefix: str = "", elements: bool = False) -> Iterator[str]:
    """Yield every key path of a dataclass: "train", "train.steps", …; for a union, those of all its members.

    With `elements`, also yield the paths of the elements of lists, such as "data.mix[].weight".
    """
    hints = get_type_hints(section)
    for name in (field.name for field in fields(section)):
        path = f"{prefix}{name}"
        yield path
        for member in _dataclass_members(hints[name]):
            yield from schema_paths(member, f"{path}.", elements)
        if elements and get_origin(hints[name]) is tuple:
            for member in _dataclass_members(get_args(hints[name])[0]):
                yield from schema_paths(member, f"{path}[].", elements)


def explain(error: Exception, overrides: list[str], tree: Mapping[str, object]) -> str:
    """Return why Hydra refuses an override: wrong quoting, an unknown key or preset, or Hydra's own message.

    `tree` is the configuration composed with only the overrides that choose presets or the experiment.
    """
    if isinstance(error, OverrideParseException):
        return _explain_quoting(_restore_override(str(getattr(error, "override", "")), overrides))
    several = re.match(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE)
    if several is not None:
        return _explain_several_values(_restore_override(several[1], overrides))
    preset = re.search(
        r"Could not find '(.*)/([^/]*)'\s+Available options in '.*?':\s(.*)", _shorten_hydra_message(error), re.DOTALL
    )
    if preset is not None:
        group, name, names = preset.groups()
        suggest = suggest_method if group in ("loss", "algorithm") else nearest
        return f"{group}={name}: there is no such file{suggest(name, names.split())}"
    run_keys = {field.name for field in fields(schema.RunConfig)}
    keys = {*schema_paths(schema.StageConfig), *run_keys, "experiment", *tree_paths(tree)}
    for override in overrides:
        key = get_override_key(override)
        if "=" not in override and not override.startswith("~"):
            return f"override {override!r} has no '='; write key=value"
        if key not in keys and not key.startswith(OPEN_SECTIONS):
            return f"unknown key {key!r} in override {override!r}{suggest_key(key, keys)}"
    return " ".join(_shorten_hydra_message(error).split())


def _shorten_hydra_message(error: Exception) -> str:
    return str(error).partition("\nConfig search path:")[0]


def get_override_key(override: str) -> str:
    """Return the key path of an override, without a prefix `+`, `++` or `~`."""
    return override.split("=", 1)[0].lstrip("+~")


def _restore_override(override: str, overrides: list[str]) -> str:
    """Return an override in Hydra's message as the user wrote it, without the `++` of `as_additions`."""
    return (
        (override if override in overrides else override.removeprefix("++")).replace("\n", "\\n").replace("\t", "\\t")
    )


def _explain_quoting(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"override {override!r} has no '='; write key=value"
    written = format_list_override(key, value) if value.startswith("[") else format_override(key, value)
    if written is None:
        return f"override '{override}': Hydra cannot read the value; put each text in it in double quotes"
    argument = shlex.quote(written)
    return f"override '{override}': Hydra cannot read the value; quote it for Hydra and for the shell: {argument}"


def _explain_several_values(override: str) -> str:
    key, _, value = override.partition("=")
    as_list, as_text = shlex.quote(f"{key}=[{value}]"), shlex.quote(format_override(key, value))
    return (
        f"override '{override}' has several values; add --multirun to run a job for each of them, write "
        f"{as_list} for a list, or {as_text} for one text with commas"
    )


def _dataclass_members(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Annotated, Union, UnionType):
        for argument in get_args(hint):
            yield from _dataclass_members(argument)
