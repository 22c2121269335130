"""The settings of every data source, and the rules within the section `data`.

The code that reads the data is in rl_megatron/data/sources. All sources of the package share the keys of `DataConfig`.
A plugin's source may declare further keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rl_megatron.config.data import ANSWERS, DOCUMENTS, LABELLED, PAIRS, PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import register_class, section
from rl_megatron.config.schema import ALGORITHM_CONFIGS, DEFAULT_SHUFFLE_BLOCK, SOURCE_CONFIGS, DataConfig, StageConfig

_OF_RECORDS = (
    "format prompt_template answer_template system_prompt chat_template chat_template_kwargs trained_turns too_long"
).split()
_OF_TASKS = "task num_documents num_demonstrations".split()

register_source_config = register_class("source", SOURCE_CONFIGS, declared="heldout_kind")


def find_sources(kind: str) -> list[str]:
    """Return the names of the registered sources that provide a kind of data."""
    return [name for name, config in SOURCE_CONFIGS.items() if kind in config.provides]


def choose_source(data: Mapping[str, object], algorithm: str) -> str:
    """Return the default source of a data section: one that provides what the algorithm learns from."""
    needed = ALGORITHM_CONFIGS[algorithm].learns_from
    task = data.get("task") or {}
    if isinstance(task, Mapping) and "name" in task and "task" in find_sources(needed):
        return "task"
    providing = [name for name in find_sources(needed) if name != "task"]
    if not providing:
        raise ConfigError(
            f"algorithm={algorithm} needs {needed}, but no data source provides them; use a plugin that registers one"
        )
    return providing[0]


def describe_source(stage: StageConfig) -> str:
    """Return what a stage reads and why, for the log."""
    data, learns_from = stage.data, stage.algorithm.learns_from
    sources = {"path": data.path, "dataset_name": data.dataset_name, "task.name": data.task.get("name")}
    reads = [f"data.{key}={value}" for key, value in sources.items() if value is not None]
    reads += [f"{data_set.shown_name}: weight {data_set.weight:g}" for data_set in data.mix]
    return f"algorithm={stage.algorithm.name} learns from {learns_from}, which data.source={data.source} has" + (
        f" ({', '.join(reads)})" if reads else ""
    )


@register_source_config
@section
class TextConfig(DataConfig):
    """Text files, or records with a text, for pretraining. They are read as one stream of tokens."""

    provides: ClassVar[tuple[str, ...]] = (DOCUMENTS,)
    heldout_kind: ClassVar[str] = DOCUMENTS
    ignores: ClassVar[tuple[str, ...]] = (*_OF_RECORDS, *_OF_TASKS)
    reads_records: ClassVar[bool] = True

    source: Literal["text"] = "text"  # the data source


@register_source_config
@section
class PromptAnswerConfig(DataConfig):
    """Records with a prompt and its answer, for SFT."""

    provides: ClassVar[tuple[str, ...]] = (ANSWERS,)
    heldout_kind: ClassVar[str] = ANSWERS
    ignores: ClassVar[tuple[str, ...]] = ("sequence_length", *_OF_TASKS)
    reads_records: ClassVar[bool] = True

    source: Literal["prompt_answer"] = "prompt_answer"  # the data source


@register_source_config
@section
class PreferenceConfig(DataConfig):
    """Preference pairs, or graded solutions that are combined into pairs, for DPO and reward models."""

    provides: ClassVar[tuple[str, ...]] = (PAIRS,)
    heldout_kind: ClassVar[str] = PAIRS
    ignores: ClassVar[tuple[str, ...]] = ("sequence_length", *_OF_TASKS)
    reads_records: ClassVar[bool] = True

    source: Literal["preference"] = "preference"  # the data source


@register_source_config
@section
class LabelledConfig(DataConfig):
    """Records with a prompt, an answer, and a label (desirable or not), for KTO."""

    provides: ClassVar[tuple[str, ...]] = (LABELLED,)
    heldout_kind: ClassVar[str] = LABELLED
    ignores: ClassVar[tuple[str, ...]] = ("sequence_length", *_OF_TASKS)
    reads_records: ClassVar[bool] = True

    source: Literal["labelled"] = "labelled"  # the data source


@register_source_config
@section
class PromptsConfig(DataConfig):
    """Records with a prompt, and an answer if the rewards need one, for GRPO and PPO with your own rewards."""

    provides: ClassVar[tuple[str, ...]] = (PROBLEMS,)
    heldout_kind: ClassVar[str] = PROBLEMS
    reads_records: ClassVar[bool] = True
    ignores: ClassVar[tuple[str, ...]] = ("answer_template", "trained_turns", "sequence_length", *_OF_TASKS)
    has_rewards: ClassVar[bool] = False

    source: Literal["prompts"] = "prompts"  # the data source


@register_source_config
@section
class TaskConfig(DataConfig):
    """Problems of a registered task, generated or from local files, for GRPO and PPO; also for SFT and pretraining."""

    provides: ClassVar[tuple[str, ...]] = (DOCUMENTS, ANSWERS, PROBLEMS)
    heldout_kind: ClassVar[str] = PROBLEMS
    reads_path: ClassVar[bool] = False
    ignores: ClassVar[tuple[str, ...]] = ("heldout_fraction",)

    source: Literal["task"] = "task"  # the data source

    def check(self, stage: StageConfig) -> None:
        """Check that a task is named."""
        if not isinstance(self.task.get("name"), str):
            actual = f" (it is {self.task['name']!r})" if "name" in self.task else ""
            raise ConfigError(
                f"data.source={self.source} needs data.task.name{actual}, the name of a registered task such as "
                "arithmetic, or file.py:name of your own"
            )


# The keys that apply to conversations only, with their defaults.
_OF_CHAT = {"system_prompt": None, "chat_template": None, "chat_template_kwargs": {}, "trained_turns": "all"}
_OF_READERS = "dataset_name split eval_path eval_split columns mix streaming".split()


def check_data(data: DataConfig) -> None:
    """Check the keys of a data section against one another, and that each of them has an effect."""
    sources = {"path": data.path, "dataset_name": data.dataset_name, "mix": data.mix}
    used = [key for key, source in sources.items() if source]
    if len(used) > 1:
        raise ConfigError(f"data.{used[0]} and data.{used[1]} both name the data; remove one")
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
    """Refuse keys of conversations for records that are plain text; `why` is the reason, for the message."""
    for key, default in _OF_CHAT.items():
        if getattr(data, key) != default:
            raise ConfigError(
                f"data.{key}={getattr(data, key)!r} has no effect with {why}; set data.format=chat, or leave it out"
            )


def require_place(data: DataConfig) -> None:
    """Check that the section names its data. A configuration that is only printed is not checked for this."""
    if data.reads_path and data.path is None and data.dataset_name is None and not data.mix:
        records = ", data.dataset_name to a data set of the Hub" if data.reads_records else ""
        raise ConfigError(
            f"data.path is not set, but data.source={data.source} needs it; set data.path to a file or "
            f"directory{records}, or data=arithmetic to try without files"
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
    """Check that each data set of a mixture has one location and a unique name, and that some weight is not 0."""
    for key in ("subset", "split"):
        if getattr(data, key) is not None:
            raise ConfigError(f"data.{key} has no effect with data.mix; set it in the data sets of data.mix")
    names: list[str] = []
    for number, data_set in enumerate(data.mix):
        where = f"data.mix[{number}]"
        if (data_set.path is None) == (data_set.dataset_name is None):
            raise ConfigError(f"{where} needs either a path or a dataset_name; set exactly one")
        if data_set.subset is not None and data_set.dataset_name is None:
            raise ConfigError(f"{where}.subset={data_set.subset} has no effect without dataset_name; remove it")
        if data_set.shown_name in names:
            raise ConfigError(
                f"{where} and data.mix[{names.index(data_set.shown_name)}] are both called {data_set.shown_name!r}; "
                f"set {where}.name"
            )
        names.append(data_set.shown_name)
    if not any(data_set.weight for data_set in data.mix):
        raise ConfigError("data.mix: every weight is 0, so no record would be read; set one above 0")
