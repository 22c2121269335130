"""Compare the prompts that the stages of a run make from the same record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from rl_megatron.config.data import DOCUMENTS
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.records import Record
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer

# The keys of a data section that decide how a record becomes a prompt.
_KEYS = ("format", "prompt_template", "system_prompt", "chat_template", "chat_template_kwargs")
_SHOWN = 100


def find_different_prompts(stages: Mapping[str, StageConfig], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a message for every two stages that would turn the same record into different prompts.

    Usually, a model should get prompts in the form that it was trained on. The first record of each stage is rendered
    by both, unless it lacks a field that one of them needs.
    """
    with_prompts = {name: stage for name, stage in stages.items() if stage.algorithm.learns_from != DOCUMENTS}
    for first, second in combinations(with_prompts, 2):
        sections = [with_prompts[name].data for name in (first, second)]
        differing = [key for key in _KEYS if getattr(sections[0], key) != getattr(sections[1], key)]
        for name in (first, second) if differing else ():
            record = build_source(with_prompts[name]).first_record()
            if record is None:
                continue
            texts = _render_prompts(with_prompts[first], with_prompts[second], record, tokenizer)
            if texts and texts[0] != texts[1]:
                keys = "; ".join(
                    f"stages.{first}.data.{key}={getattr(sections[0], key)!r}, "
                    f"stages.{second}.data.{key}={getattr(sections[1], key)!r}"
                    for key in differing
                )
                yield (
                    f"stages {first!r} and {second!r} turn the same record ({record.location}) into "
                    f"different prompts, {texts[0][-_SHOWN:]!r} and {texts[1][-_SHOWN:]!r}, because they differ in "
                    f"{keys}; set the same value in both unless this is what you want"
                )
                break


def _render_prompts(first: StageConfig, second: StageConfig, record: Record, tokenizer: Tokenizer) -> list[str]:
    """Return the record's prompt in each stage, or an empty list if a stage cannot read the record."""
    try:
        ids = [build_source(stage).renderer(tokenizer).encode_prompt(record) for stage in (first, second)]
    except ValueError:
        return []
    return [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in ids]
