"""The settings of every data source. The code that reads the data is in rl_megatron/data/sources.

All sources of the package share the keys of `DataConfig`. A plugin's source may declare further keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from rl_megatron.config.data_kinds import ANSWERS, DOCUMENTS, LABELLED, PAIRS, PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.field_types import section
from rl_megatron.config.named_class import register_class
from rl_megatron.config.schema import ALGORITHM_CONFIGS, SOURCE_CONFIGS, DataConfig, StageConfig

_OF_RECORDS = (
    "format prompt_template answer_template system_prompt chat_template chat_template_kwargs trained_turns too_long"
).split()
_OF_TASKS = "task num_documents num_demonstrations".split()

register_source_config = register_class("source", SOURCE_CONFIGS, declared="heldout_kind")


def sources_providing(kind: str) -> list[str]:
    """Return the names of the registered sources that provide a kind of data."""
    return [name for name, config in SOURCE_CONFIGS.items() if kind in config.provides]


def choose_source(data: Mapping[str, Any], algorithm: str) -> str:
    """Return the data source for a section that does not name one.

    Args:
        data: The section.
        algorithm: The name of the stage's algorithm.

    Raises:
        ConfigError: No source has what the algorithm learns from.
    """
    needed = ALGORITHM_CONFIGS[algorithm].learns_from
    task = data.get("task") or {}
    if isinstance(task, Mapping) and "name" in task and "task" in sources_providing(needed):
        return "task"
    providing = [name for name in sources_providing(needed) if name != "task"]
    if not providing:
        raise ConfigError(
            f"algorithm={algorithm} needs {needed}, and no data source has them; use a plugin that registers one"
        )
    return providing[0]


def describe_source(stage: StageConfig) -> str:
    """Return what a stage reads and why, for the log."""
    data, learns_from = stage.data, stage.algorithm.learns_from
    place = {"path": data.path, "dataset_name": data.dataset_name, "task.name": data.task.get("name")}
    reads = [f"data.{key}={value}" for key, value in place.items() if value is not None]
    reads += [f"{each.shown_name}: weight {each.weight:g}" for each in data.mix]
    return f"algorithm={stage.algorithm.name} learns from {learns_from}, which data.source={data.source} has" + (
        f" ({', '.join(reads)})" if reads else ""
    )


@register_source_config
@section
class TextConfig(DataConfig):
    """Text files, or records with a text, read as one stream of tokens, for pretraining."""

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
    """Records with a prompt, an answer, and a label that says whether the answer is desirable, for KTO."""

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
    """Problems of a registered task, generated or from local files, for GRPO and PPO; also SFT and pretraining data."""

    provides: ClassVar[tuple[str, ...]] = (DOCUMENTS, ANSWERS, PROBLEMS)
    heldout_kind: ClassVar[str] = PROBLEMS
    reads_path: ClassVar[bool] = False
    ignores: ClassVar[tuple[str, ...]] = ("heldout_fraction",)

    source: Literal["task"] = "task"  # the data source

    def check(self, stage: StageConfig) -> None:
        """Check that a task is named.

        Raises:
            ConfigError: `data.task` has no name.
        """
        if not isinstance(self.task.get("name"), str):
            given = f" (it is {self.task['name']!r})" if "name" in self.task else ""
            raise ConfigError(
                f"data.source={self.source} needs data.task.name{given}, the name of a registered task such as "
                "arithmetic, or file.py:name of your own"
            )
