"""Reading a checkpoint's files and comparing them with the digests in its manifest. No megatron-core is needed here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_megatron.checkpoint.directory import Damaged, damaged, file_entry, read_manifest, size_of
from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.collective_errors import agreed_failure


def verify_checkpoint(path: Path) -> None:
    """Compare every file of a checkpoint with its digest; each rank reads its share. Collective.

    Raises:
        Damaged: A rank found a file that changed; raised on every rank, naming the file.
    """
    failure = None
    try:
        manifest = read_manifest(path)
        check_digests(path, manifest, dist.get_rank(), dist.get_world_size())
    except ConfigError as error:
        failure = str(error)
    failure = agreed_failure(failure)
    if failure is not None:
        raise Damaged(failure)


def check_digests(path: Path, manifest: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Compare every file with its digest or, if there are `world_size` readers, only the share of reader `rank`.

    Raises:
        Damaged: A file is not as it was written; the message names it.
    """
    largest_first = sorted(manifest["files"], key=lambda name: (-size_of(manifest["files"][name]), name))
    found = _find_damage(path, largest_first[rank::world_size], manifest)
    if found is not None:
        raise damaged(path, found)


def _find_damage(path: Path, names: Iterable[str], manifest: dict[str, Any]) -> str | None:
    """Return what is wrong with the first damaged file of `names`, or None.

    A file without a digest, in a checkpoint older than digests, counts as undamaged.
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
            return f"the contents of {name} are not those that were written (SHA-256 differs)"
    return None
