"""Comparison of a checkpoint's files with the digests in its manifest. This module does not need megatron-core."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_megatron.checkpoint.directory import Damaged, damaged, file_entry, read_manifest, size_of
from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.collective_errors import first_failure


def verify_checkpoint(path: Path) -> None:
    """Compare every file of a checkpoint with its digest. Each rank reads its share of the files. Collective.

    Raises:
        Damaged: A rank found a file that has changed. It is raised on every rank, and the message names the file.
    """
    failure = None
    try:
        manifest = read_manifest(path)
        check_digests(path, manifest, dist.get_rank(), dist.get_world_size())
    except ConfigError as error:
        failure = str(error)
    failure = first_failure(failure)
    if failure is not None:
        raise Damaged(failure)


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
