"""Data sources; `data.source` selects one. Each registers itself for its config class."""

from rl_megatron.data.sources.answers import LabelledSource, PreferenceSource, PromptAnswerSource
from rl_megatron.data.sources.prompts import PromptsSource
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import SOURCES, build_source, register_source
from rl_megatron.data.sources.source import DataSource, HeldoutBatch, HeldoutProblemSet
from rl_megatron.data.sources.task import TaskSource
from rl_megatron.data.sources.text import TextSource

__all__ = [
    "SOURCES",
    "DataSource",
    "HeldoutBatch",
    "HeldoutProblemSet",
    "LabelledSource",
    "PreferenceSource",
    "PromptAnswerSource",
    "PromptsSource",
    "RecordSource",
    "TaskSource",
    "TextSource",
    "build_source",
    "register_source",
]
