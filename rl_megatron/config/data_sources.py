"""The settings of every data source. The code that reads the data is in rl_megatron/data/sources.

All sources of the package share the keys of `DataConfig`. A plugin's source may declare further keys.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rl_megatron.config.data_kinds import ANSWERS, DOCUMENTS, PAIRS, PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.named_class import register_class
from rl_megatron.config.schema import SOURCE_CONFIGS, DataConfig, StageConfig, section

register_source_config = register_class("source", SOURCE_CONFIGS, declared="heldout_kind")


def sources_providing(kind: str) -> list[str]:
    """Return the names of the registered sources that provide a kind of data."""
    return [name for name, config in SOURCE_CONFIGS.items() if kind in config.provides]


@register_source_config
@section
class TextConfig(DataConfig):
    """A text file, read as one stream of tokens, for pretraining."""

    provides: ClassVar[tuple[str, ...]] = (DOCUMENTS,)
    heldout_kind: ClassVar[str] = DOCUMENTS

    source: Literal["text"] = "text"  # the data source


@register_source_config
@section
class PromptAnswerConfig(DataConfig):
    """JSONL records with a prompt and its answer, for SFT."""

    provides: ClassVar[tuple[str, ...]] = (ANSWERS,)
    heldout_kind: ClassVar[str] = ANSWERS

    source: Literal["prompt_answer"] = "prompt_answer"  # the data source


@register_source_config
@section
class PreferenceConfig(DataConfig):
    """JSONL of preference pairs, or of graded solutions that are combined into pairs, for DPO and reward models."""

    provides: ClassVar[tuple[str, ...]] = (PAIRS,)
    heldout_kind: ClassVar[str] = PAIRS

    source: Literal["preference"] = "preference"  # the data source


@register_source_config
@section
class TaskConfig(DataConfig):
    """Problems of a registered task, generated or from local files, for GRPO and PPO; also SFT and pretraining data."""

    provides: ClassVar[tuple[str, ...]] = (DOCUMENTS, ANSWERS, PROBLEMS)
    heldout_kind: ClassVar[str] = PROBLEMS
    reads_path: ClassVar[bool] = False

    source: Literal["task"] = "task"  # the data source

    def check(self, stage: StageConfig) -> None:
        """Check that a task is named.

        Raises:
            ConfigError: `data.task` has no name.
        """
        super().check(stage)
        if "name" not in self.task:
            raise ConfigError(
                f"data.source={self.source} needs data.task.name, the name of a registered task such as arithmetic"
            )
