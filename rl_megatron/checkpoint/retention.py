"""Deletion of old checkpoints of a stage. The newest few are kept and, if asked for, the best one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.checkpoint.directory import LEFTOVERS, Damaged, find_checkpoints, read_manifest_alone
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.metrics import is_better


def find_best_checkpoint(checkpoints: list[Path], metric: str) -> Path | None:
    """Return the newest of the checkpoints with the best `metric` of their own step, or None if none has it."""
    best, best_value = None, None
    for path in checkpoints:
        try:
            value = read_eval_metric(read_manifest_alone(path), metric)
        except (Damaged, ConfigError) as error:
            log.once(f"{error}; this checkpoint is ignored in the search for the best one")
            continue
        if value is not None and (best_value is None or not is_better(metric, best_value, value)):
            best, best_value = path, value
    return best


def read_eval_metric(manifest: dict[str, Any], metric: str) -> float | None:
    """Return an eval metric of the checkpoint's own step, or None if this step was not evaluated with it."""
    if manifest.get("evaluated_at") != manifest["step"]:
        return None
    return manifest.get("results", {}).get("measures", {}).get(metric)


def delete_older(directory: Path, keep: int, companions: Path | None = None, keep_best: str | None = None) -> None:
    """Delete old checkpoints and the leftovers of interrupted saves. Call it in one process, while nothing is saved.

    Args:
        directory: The stage's checkpoints.
        keep: How many of the newest checkpoints are kept.
        companions: A second directory of checkpoints, such as the critic's. It keeps only checkpoints with the names of
            those that are kept in `directory`.
        keep_best: The eval metric whose best checkpoint is kept as well.
    """
    complete = find_checkpoints(directory)
    kept = {path.name for path in complete[-keep:]}
    best = find_best_checkpoint(complete, keep_best) if keep_best else None
    if best is not None:
        kept.add(best.name)
    _delete_all_but(kept, directory)
    if companions is not None:  # last, so that every complete checkpoint always has its companion
        _delete_all_but(kept, companions)


def _delete_all_but(names: set[str], directory: Path) -> None:
    for suffix in LEFTOVERS:
        for path in directory.glob(f"step-*{suffix}"):
            shutil.rmtree(path)
    for path in find_checkpoints(directory):
        if path.name not in names:  # renamed first, so that a kill during deletion leaves nothing that looks complete
            shutil.rmtree(path.rename(path.with_suffix(".deleted")))
