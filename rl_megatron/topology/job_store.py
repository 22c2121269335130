"""The store in which the ranks of a job meet.

torchrun's agents keep one store for all attempts of a job. A rank that is started again would find the addresses of
dead ranks there, and connect to them. So the ranks of each attempt meet under a name of their own.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rl_megatron.config.addresses import is_loopback
from rl_megatron.config.errors import ConfigError

JOB = "RL_MEGATRON_JOB"  # environment variable: the name of this process's job among the jobs of a sweep
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # environment variable: whether torchrun's agent has the store
TIMEOUT_MINUTES = 10.0  # how long a rank waits for its peers if the caller does not say
_POLL_SECONDS = 0.02


def job_store(timeout: timedelta) -> tuple[Any, int, int]:
    """Return the store of this process's job and attempt, its rank and the world size.

    Raises:
        ConfigError: Not all ranks came within `timeout`.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    kept = _serve_on_loopback(timeout)  # which torch then finds, and would otherwise serve to all machines
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    del kept
    if JOB in os.environ:
        store = PrefixStore(os.environ[JOB], store)
    if launcher_has_the_store():
        store = store_of_attempt(store, rank, world_size, timeout)
    return store, rank, world_size


def is_on_one_node() -> bool:
    """Return whether all ranks of the job are on this machine, as far as the variables of its launcher tell."""
    is_only_node = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    return is_only_node or is_loopback(os.environ.get("MASTER_ADDR", ""))


def _serve_on_loopback(timeout: timedelta) -> Any:
    """Serve the store of rank 0 at the loopback address, if MASTER_ADDR is one, and return it.

    torch alone would listen at all interfaces. It shares a store that this process serves at the same port already. If
    something else has the port, torch reports it.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented

    host, port, size = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    if launcher_has_the_store() or os.environ.get("RANK") != "0" or not (is_loopback(host) and port.isdecimal()):
        return None
    with suppress(OSError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, int(port)), family=family, backlog=int(size))
        return TCPStore(
            host, listening.getsockname()[1], int(size), is_master=True, timeout=timeout, wait_for_workers=False,
            multi_tenant=True, master_listen_fd=listening.detach(),
        )  # fmt: skip
    return None


def launcher_has_the_store() -> bool:
    """Return whether the launcher's process on the first node holds the store. Otherwise rank 0 holds it."""
    return os.environ.get(_AGENT_STORE) == "True"


def store_of_attempt(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a part of the store that no earlier attempt has written to. Every rank of the attempt calls it.

    The number of the attempt cannot name that part: agents of several nodes count restarts differently. So rank 0 makes
    a name up. Each other rank asks for it with a number of its own, which no earlier attempt can have answered. Agents
    start ranks only after all ranks of the earlier attempt have ended, so rank 0 is that of this attempt.

    Args:
        store: The store that attempts share.
        rank: This process's rank.
        world_size: The number of ranks.
        timeout: How long to wait for the others.

    Raises:
        ConfigError: Not all ranks came in time.
    """
    import torch.distributed as dist

    own = uuid.uuid4().hex
    try:
        name = _name_for_all(store, own, world_size, timeout) if rank == 0 else _asked(store, own, timeout)
    except dist.DistStoreError as error:
        raise ConfigError(
            f"rank {rank} of {world_size} waited {timeout.total_seconds():.0f} s for the other ranks to start "
            f"(train.collective_timeout_minutes): {error}; look for the message of a rank that did not start"
        ) from error
    return dist.PrefixStore(f"attempt/{name}", store)  # pyright: ignore[reportPrivateImportUsage]  # documented


def _name_for_all(store: Any, name: str, world_size: int, timeout: timedelta) -> str:
    """Send the name to every rank that asks, until all have it."""
    import torch.distributed as dist

    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while (known := store.add(f"known/{name}", 0)) < world_size - 1:
        asking = store.get("asking").decode().split() if store.check(["asking"]) else []
        for each in asking:
            if each not in answered:
                answered.add(each)
                store.set(f"answer/{each}", name)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{known} of {world_size - 1} others came")
        time.sleep(_POLL_SECONDS)
    return name


def _asked(store: Any, own: str, timeout: timedelta) -> str:
    """Ask rank 0 for the name, and say that it is known."""
    store.append("asking", f"{own} ")
    store.wait([f"answer/{own}"], timeout)
    name = store.get(f"answer/{own}").decode()
    store.add(f"known/{name}", 1)
    return name
