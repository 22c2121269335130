"""Cut a run down to seconds, whatever its configuration: fewer steps, sequences and problems, and small batches."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rl_megatron.config.loading import load
from rl_megatron.config.schema import RunConfig, StageConfig

# The largest value of a key, by section. Other keys keep their values.
LIMITS: dict[str, dict[str, Any]] = {
    "train": {"steps": 2, "global_batch_size": 16, "micro_batch_size": 4},
    "optimizer": {"warmup_steps": 1},
    "data": {"num_documents": 300, "num_demonstrations": 64, "num_eval_examples": 4},
    "generation": {"max_new_tokens": 6},
    "algorithm": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "dynamic_sampling_max_rounds": 2,
        "critic_warmup_steps": 1,
    },
}


def small(config: RunConfig) -> RunConfig:
    """Return the run with every stage cut down to LIMITS."""
    return replace(config, stages={name: _small_stage(stage) for name, stage in config.stages.items()})


def _small_stage(stage: StageConfig) -> StageConfig:
    sections = {name: _limited(getattr(stage, name), limits) for name, limits in LIMITS.items()}
    optimizer = replace(sections.pop("optimizer"), decay_steps=None)
    if not stage.data.task:  # small files hold out few records: all of them
        sections["data"] = replace(sections["data"], num_eval_examples=None)
    return replace(stage, optimizer=optimizer, **sections)


def _limited(section: Any, limits: dict[str, Any]) -> Any:
    known = {field.name for field in fields(section)}
    given = {key: getattr(section, key) for key in limits if key in known}
    return replace(
        section, **{key: limits[key] if value is None else min(value, limits[key]) for key, value in given.items()}
    )


def load_small_configs() -> None:
    """Let `load_config` return small runs in this process, as `rl-megatron` and Python blocks call it."""
    load_config = load.load_config

    def load_small(*arguments: Any, **options: Any) -> RunConfig:
        return small(load_config(*arguments, **options))

    load.load_config = load_small
