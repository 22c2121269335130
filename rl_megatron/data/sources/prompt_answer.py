"""The data source for records of prompts and answers."""

from __future__ import annotations

from rl_megatron.config.data_sources import PromptAnswerConfig
from rl_megatron.data.sources.answer_source import AnswerSource
from rl_megatron.data.sources.registry import register_source


@register_source(PromptAnswerConfig)
class PromptAnswerSource(AnswerSource[PromptAnswerConfig]):
    """The source of prompts with answers."""
