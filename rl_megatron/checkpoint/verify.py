"""Comparison of a checkpoint's files with their digests by all ranks. This module does not need megatron-core."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from rl_megatron.checkpoint.digests import check_digests
from rl_megatron.checkpoint.directory import Damaged, read_manifest
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
