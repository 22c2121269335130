"""Comparison of a checkpoint's files with their digests by all ranks. This module does not need megatron-core."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from rl_megatron.checkpoint.directory import Damaged, check_digests, name_random_state, read_manifest
from rl_megatron.checkpoint.metadata import check_metadata
from rl_megatron.config.errors import ConfigError, describe_error
from rl_megatron.topology.ranks import Ranks


def verify_checkpoint(path: Path, ranks: Ranks) -> None:
    """Compare every file of a checkpoint with its digest. Each rank reads its share of the files. Collective.

    Digests do not protect against somebody who replaces a file and its digest. Therefore the pickled files are also
    loaded, by readers that refuse to run code from them.

    Raises:
        Damaged: A rank found a file that has changed, or that cannot be read. It is raised on every rank.
    """
    failure = None
    try:
        manifest = read_manifest(path)
        check_digests(path, manifest, ranks.rank, ranks.size)
        _check_files(path, manifest["files"], ranks.rank)
    except ConfigError as error:
        failure = str(error)
    failure = ranks.find_first_failure(failure)
    if failure is not None:
        raise Damaged(failure)


def _check_files(checkpoint: Path, files: Collection[str], rank: int) -> None:
    checks: dict[str, Callable[[Path], object]] = {name_random_state(rank): _check_random_state}
    if rank == 0:
        check_metadata(checkpoint)
        checks |= {"metadata.json": lambda path: dict(json.loads(path.read_text())), "common.pt": _check_state}
    for name, check in checks.items():
        if name in files:
            try:
                check(checkpoint / name)
            except Exception as error:  # a damaged pickle may raise anything
                raise Damaged.from_cause(checkpoint, f"{name} cannot be read ({describe_error(error)})") from error


def _check_state(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, map_location="cpu", weights_only=True))


def _check_random_state(path: Path) -> None:
    state = _check_state(path)
    torch.Generator().set_state(state["cpu"])
    dict(state["megatron"])
