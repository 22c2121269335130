"""Verify the checkpoints that a run will read, before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rl_megatron.algorithms.registry import get_algorithm
from rl_megatron.checkpoint.directory import Damaged, find_checkpoints, read_manifest
from rl_megatron.checkpoint.verify import verify_checkpoint
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.metrics import find_reached_goal
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.runs.checkpointer import critic_checkpoints
from rl_megatron.topology.ranks import Ranks


def refuse_damage(config: RunConfig, output_dir: Path, ranks: Ranks) -> None:
    """Check every byte of the checkpoints that the run will load. Collective; each rank reads a share of the files.

    `Damaged`, raised on every rank, names a file that has changed since it was written, and the newest undamaged
    checkpoint.
    """
    for path in _list_checkpoints_to_read(config, output_dir):
        try:
            verify_checkpoint(path, ranks)
        except Damaged as error:
            raise add_remedy(error, path, config, partial(verify_checkpoint, ranks=ranks)) from error


def find_last_manifest(directory: Path, stage: StageConfig) -> dict[str, Any] | None:
    """Return the manifest of the checkpoint of a stage's last step, or None if there is no such checkpoint.

    The last step is `train.steps`, or a step whose evaluation has reached a goal of `train.stop_at`.
    """
    saved = find_checkpoints(directory)
    if not saved:
        return None
    manifest = read_manifest(saved[-1], stage.model)
    evaluated = manifest["results"].get("measures", {}) if manifest.get("evaluated_at") == manifest["step"] else {}
    has_ended = manifest["step"] >= stage.train.steps or find_reached_goal(stage.train.stop_at, evaluated) is not None
    return manifest if has_ended else None


def _list_checkpoints_to_read(config: RunConfig, output_dir: Path) -> Iterator[Path]:
    """Yield the checkpoints that the run will load.

    They are the initial weights of the first unfinished stage, and the newest checkpoints of this and later stages.
    """
    begins_with = Path(config.init_from) if config.init_from else None
    reads = False
    for name, stage in config.stages.items():
        directory = output_dir / "checkpoints" / name
        saved = find_checkpoints(directory)
        finished = saved and find_last_manifest(directory, stage) is not None
        if not finished and not reads and begins_with is not None:
            yield begins_with
        reads = reads or not finished
        if saved:
            if reads:
                yield saved[-1]
            if not finished and get_algorithm(stage).critic is not None:
                yield critic_checkpoints(directory) / saved[-1].name
            begins_with = saved[-1]


def add_remedy(error: Damaged, damaged: Path, config: RunConfig, check: Callable[[Path], object]) -> Damaged:
    """Return the error with a remedy: the newest undamaged checkpoint before `damaged`, and how to continue from it.

    `check` raises ConfigError for a damaged checkpoint.
    """
    policy_directory = damaged.parent.with_name(damaged.parent.name.removesuffix(".critic"))
    earlier = [path for path in find_checkpoints(policy_directory) if path.name < damaged.name]
    good = next((path for path in reversed(earlier) if _is_whole(path, check)), None)
    return Damaged(f"{error}: {_remedy(damaged, good, config)}")


def _remedy(damaged: Path, good: Path | None, config: RunConfig) -> str:
    if config.init_from and damaged == Path(config.init_from):
        return "set init_from to another checkpoint" if good is None else f"use init_from={good}, which is undamaged"
    stage = damaged.parent.name.removesuffix(".critic")
    removed = f"remove {damaged.parent.with_name(stage) / damaged.name} to"
    if good is None:
        return f"there is no undamaged checkpoint of stage {stage!r}; {removed} restart the stage"
    return f"the newest undamaged checkpoint is {good}; {removed} continue from there"


def _is_whole(path: Path, check: Callable[[Path], object]) -> bool:
    critic = critic_checkpoints(path.parent) / path.name
    try:
        check(path)
        if critic.is_dir():
            check(critic)
    except ConfigError:
        return False
    return True
