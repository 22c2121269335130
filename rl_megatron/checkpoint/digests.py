"""Comparison of a checkpoint's files with the digests in its manifest. This module does not need torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.directory import damaged, file_entry, size_of


def check_digests(path: Path, manifest: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Compare the files with their digests: all of them or, if `world_size` readers share them, those of one reader.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        rank: The number of this reader.
        world_size: The number of readers.

    Raises:
        Damaged: A file has changed since it was written. The message names it.
    """
    largest_first = sorted(manifest["files"], key=lambda name: (-size_of(manifest["files"][name]), name))
    damage = _find_damage(path, largest_first[rank::world_size], manifest)
    if damage is not None:
        raise damaged(path, damage)


def _find_damage(path: Path, names: Iterable[str], manifest: dict[str, Any]) -> str | None:
    """Return a description of the first damaged file of `names`, or None.

    Old checkpoints have no digests. A file without a digest counts as undamaged.
    """
    for name in names:
        entry = manifest["files"][name]
        if isinstance(entry, int):
            continue
        try:
            found = file_entry(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if found != entry:
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None
