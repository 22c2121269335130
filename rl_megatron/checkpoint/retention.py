"""Which checkpoints of a stage are kept: the newest few and, where asked for, the best."""

from __future__ import annotations

import shutil
from pathlib import Path

from rl_megatron import log
from rl_megatron.checkpoint.directory import LEFTOVERS, Damaged, complete_checkpoints, manifest_of
from rl_megatron.config.eval_metrics import better


def best_checkpoint(checkpoints: list[Path], measure: str) -> Path | None:
    """The one of the best held-out `measure`, of its own step; of equals the newest; None where there is none."""
    best, found = None, None
    for path in checkpoints:
        try:
            value = measured(manifest_of(path), measure)
        except Damaged as error:
            log.once(f"{error}: it is not counted among the best")
            continue
        if value is not None and (found is None or not better(measure, found, value)):
            best, found = path, value
    return best


def measured(manifest: dict, measure: str) -> float | None:
    """`measure` of the weights in the checkpoint: an evaluation of an earlier step says nothing of them."""
    if manifest.get("evaluated_at") != manifest["step"]:
        return None
    return manifest.get("results", {}).get("measures", {}).get(measure)


def delete_older(directory: Path, keep: int, companions: Path | None = None, keep_best: str | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints and the one of the best `keep_best`, leftovers of interrupted
    saves, and in `companions` whatever has no namesake left. For one process to call, when no save is under way."""
    complete = complete_checkpoints(directory)
    kept = {path.name for path in complete[-keep:]}
    best = best_checkpoint(complete, keep_best) if keep_best else None
    if best is not None:
        kept.add(best.name)
    _delete_all_but(kept, directory)
    if companions is not None:  # last: a checkpoint never stands without its companion
        _delete_all_but(kept, companions)


def _delete_all_but(names: set[str], directory: Path) -> None:
    for suffix in LEFTOVERS:
        for path in directory.glob(f"step-*{suffix}"):
            shutil.rmtree(path)
    for path in complete_checkpoints(directory):
        if path.name not in names:  # under another name first: a kill while files go leaves nothing that looks whole
            shutil.rmtree(path.rename(path.with_suffix(".deleted")))
