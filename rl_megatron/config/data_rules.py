"""The rules within the section `data`: keys that contradict each other, and keys that have no effect."""

from __future__ import annotations

from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import DEFAULT_SHUFFLE_BLOCK, DataConfig

# The keys that apply to conversations only, with their defaults.
_OF_CHAT = {"system_prompt": None, "chat_template": None, "chat_template_kwargs": {}, "trained_turns": "all"}
_OF_READERS = "dataset_name split eval_path eval_split columns mix streaming".split()


def check_data(data: DataConfig) -> None:
    """Check the keys of a data section against one another.

    Raises:
        ConfigError: A key contradicts another or has no effect; the message names it.
    """
    places = {"path": data.path, "dataset_name": data.dataset_name, "mix": data.mix}
    given = [key for key, place in places.items() if place]
    if len(given) > 1:
        raise ConfigError(f"data.{given[0]} and data.{given[1]} both say where the data is; remove one")
    if data.mix:
        _check_mix(data)
    elif data.mix_weights is not None:
        raise ConfigError(f"data.mix_weights={data.mix_weights} has no effect without data.mix; remove it")
    if data.shuffle_block != DEFAULT_SHUFFLE_BLOCK and not data.streaming:
        raise ConfigError(f"data.shuffle_block={data.shuffle_block} has no effect without data.streaming; remove it")
    if data.subset is not None and data.dataset_name is None:
        raise ConfigError(f"data.subset={data.subset} has no effect without data.dataset_name; remove it")
    for key in () if data.reads_records else _OF_READERS:
        if getattr(data, key):
            raise ConfigError(
                f"data.{key}={getattr(data, key)} has no effect: data.source={data.source} does not read it; remove it"
            )
    _check_ignored(data)
    if data.format == "plain":
        check_plain(data, "data.format=plain")


def check_plain(data: DataConfig, why: str) -> None:
    """Refuse keys of conversations for records that are plain text.

    Args:
        data: The section.
        why: What makes the records plain text, for the message.

    Raises:
        ConfigError: Such a key is set.
    """
    for key, default in _OF_CHAT.items():
        if getattr(data, key) != default:
            raise ConfigError(
                f"data.{key}={getattr(data, key)!r} has no effect with {why}; set data.format=chat, or leave it out"
            )


def require_place(data: DataConfig) -> None:
    """Check that the section says where its data is. It is checked before a run, but not to print a configuration.

    Raises:
        ConfigError: It does not, and the source reads files.
    """
    if data.reads_path and data.path is None and data.dataset_name is None and not data.mix:
        records = ", data.dataset_name to a data set of the Hub" if data.reads_records else ""
        raise ConfigError(
            f"data.path is not set and data.source={data.source} reads it; set data.path to a file or directory"
            f"{records}, or data=arithmetic to try without files"
        )


def _check_ignored(data: DataConfig) -> None:
    """Refuse keys that have no effect on the source."""
    chosen: Any = type(data)
    defaults = chosen() if data.ignores else data
    for key in data.ignores:
        if getattr(data, key) != getattr(defaults, key):
            raise ConfigError(
                f"data.{key}={getattr(data, key)!r} has no effect on data.source={data.source}; leave it out"
            )


def _check_mix(data: DataConfig) -> None:
    """Check the data sets of a mixture against one another.

    Raises:
        ConfigError: One has no place or two, two have one name, or all weights are 0.
    """
    for key in ("subset", "split"):
        if getattr(data, key) is not None:
            raise ConfigError(f"data.{key} has no effect with data.mix; set it in the data sets of data.mix")
    names: list[str] = []
    for number, each in enumerate(data.mix):
        where = f"data.mix[{number}]"
        if (each.path is None) == (each.dataset_name is None):
            raise ConfigError(f"{where} needs a path or a dataset_name, and not both; set one")
        if each.subset is not None and each.dataset_name is None:
            raise ConfigError(f"{where}.subset={each.subset} has no effect without dataset_name; remove it")
        if each.shown_name in names:
            raise ConfigError(
                f"{where} and data.mix[{names.index(each.shown_name)}] are both called {each.shown_name!r}; set "
                f"{where}.name"
            )
        names.append(each.shown_name)
    if not any(each.weight for each in data.mix):
        raise ConfigError("data.mix: every weight is 0, so that no record would be read; set one of them")
