"""The store in which the ranks of one job meet, if the jobs of a sweep share the launcher's store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

JOB = "RL_MEGATRON_JOB"  # environment variable: the name of this process's job among the jobs of a sweep


def job_store(timeout: timedelta) -> tuple[Any, int, int] | None:
    """Return the store of this process's job, its rank and the world size, or None if it is not a job of a sweep.

    Each job has its own prefix, so that no rank reads an address which an earlier job has left in the store.
    """
    if JOB not in os.environ:
        return None
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(os.environ[JOB], store), rank, world_size
