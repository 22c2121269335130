"""Report which stages of an output directory are skipped or resumed, and keep the settings of finished stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rl_megatron import log
from rl_megatron.algorithms.verify import manifest_at_the_end
from rl_megatron.checkpoint.directory import complete_checkpoints
from rl_megatron.config.load import from_yaml, to_yaml
from rl_megatron.config.schema import RunConfig, StageConfig

CONFIG = "config.yaml"
_SHOWN = 6  # settings that differ


def recorded_config(config: RunConfig, output_dir: Path) -> str:
    """Return the YAML that config.yaml and new checkpoints get: finished stages keep the settings that they had.

    Call it before the first stage begins, on every rank. Rank 0 logs which stages are skipped, and what differs from
    the settings that a stage began with.
    """
    path = output_dir / CONFIG
    stages = dict(config.stages)
    for name, stage in config.stages.items():
        saved = complete_checkpoints(output_dir / "checkpoints" / name) if config.resume else []
        if not saved:
            continue
        finished = manifest_at_the_end(saved[-1].parent, stage)
        before = _settings_of(name, saved[-1] / CONFIG, path)
        changed = [] if before is None else _changed(config, replace(config, stages={name: before}), name)
        if finished is not None:
            log.LOGGER.info("stage %s: skipped, it is complete at step %d: %s", name, finished["step"], saved[-1])
            if changed and before is not None:
                stages[name] = before
        if changed:
            effect = "have no effect on this finished stage" if finished is not None else "apply from here on"
            remedy = f"; set another output_dir to train with them ({path} is kept)" if finished is not None else ""
            log.LOGGER.warning("stage %s: settings that changed %s: %s%s", name, effect, _listed(changed), remedy)
    return to_yaml(replace(config, stages=stages))


def _settings_of(name: str, *files: Path) -> StageConfig | None:
    """Return the settings of a stage from the first file that exists and has them, or None.

    A checkpoint has the settings that it was trained with. The run's config.yaml may have those of an attempt that
    failed before it saved.
    """
    for file in files:
        if file.is_file() and (found := from_yaml(file.read_text(), str(file)).stages.get(name)) is not None:
            return found
    return None


def _changed(config: RunConfig, before: RunConfig, name: str) -> list[str]:
    """Return the settings of a stage that differ, as "key: value before → value now"."""
    was, now = (dict(_leaves(yaml.safe_load(to_yaml(each))["stages"][name])) for each in (before, config))
    keys = dict.fromkeys((*was, *now))
    return [f"{key}: {was.get(key)} → {now.get(key)}" for key in keys if was.get(key) != now.get(key)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _listed(changed: list[str]) -> str:
    more = len(changed) - _SHOWN
    return ", ".join(changed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
