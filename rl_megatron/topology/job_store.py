"""The store in which the ranks of a job meet.

torchrun's agents keep one store for all attempts of a job. A rank that is started again would find the addresses of
dead ranks there, and connect to them. So the ranks of each attempt meet under a separate name.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rl_megatron.config.addresses import is_loopback
from rl_megatron.config.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

JOB = "RL_MEGATRON_JOB"  # environment variable: the name of this process's job among the jobs of a sweep
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # environment variable: whether torchrun's agent holds the store
TIMEOUT_MINUTES = 10.0  # how long a rank waits for its peers by default
_POLL_SECONDS = 0.02


def open_job_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store of this process's job and attempt, this rank, and the world size. Collective."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    served = _serve_on_loopback(timeout)  # torch then uses it instead of a store that all machines reach
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    del served
    if JOB in os.environ:
        store = PrefixStore(os.environ[JOB], store)
    if launcher_has_store():
        store = open_attempt_store(store, rank, world_size, timeout)
    return store, rank, world_size


def is_on_one_node() -> bool:
    """Return whether all ranks of the job are on this machine, according to the launcher's environment variables."""
    is_only_node = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    return is_only_node or is_loopback(os.environ.get("MASTER_ADDR", ""))


def _serve_on_loopback(timeout: timedelta) -> Store | None:
    """Serve the store on rank 0 and return it if MASTER_ADDR is a loopback address; otherwise return None.

    torch would listen on all interfaces, but it reuses a store that this process already serves at the same port. If
    another process uses the port, torch reports it.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented

    host, port, size = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
    if launcher_has_store() or os.environ.get("RANK") != "0" or not (is_loopback(host) and port.isdecimal()):
        return None
    with suppress(OSError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, int(port)), family=family, backlog=int(size))
        return TCPStore(
            host, listening.getsockname()[1], int(size), is_master=True, timeout=timeout, wait_for_workers=False,
            multi_tenant=True, master_listen_fd=listening.detach(),
        )  # fmt: skip
    return None


def launcher_has_store() -> bool:
    """Return whether the launcher's process on the first node holds the store. Otherwise rank 0 holds it."""
    return os.environ.get(_AGENT_STORE) == "True"


def open_attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of the store that no earlier attempt has written to. Every rank of the attempt calls it.

    The attempt's number cannot name this part, because agents of different nodes count restarts differently. So rank 0
    chooses a random name. Each other rank asks for it with a random word, which no earlier attempt can have answered.
    Agents start ranks only after all ranks of the earlier attempt have ended, so no earlier rank 0 answers.
    """
    import torch.distributed as dist

    word = uuid.uuid4().hex
    try:
        name = _send_name(store, word, world_size, timeout) if rank == 0 else _ask_for_name(store, word, timeout)
    except dist.DistStoreError as error:
        raise ConfigError(
            f"rank {rank} of {world_size} waited {timeout.total_seconds():.0f} s for the other ranks to start "
            f"(train.collective_timeout_minutes): {error}; look for the message of a rank that did not start"
        ) from error
    return dist.PrefixStore(f"attempt/{name}", store)  # pyright: ignore[reportPrivateImportUsage]  # documented


def _send_name(store: Store, name: str, world_size: int, timeout: timedelta) -> str:
    """Send the name to every rank that asks until all ranks have it, and return the name."""
    import torch.distributed as dist

    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while (arrivals := store.add(f"known/{name}", 0)) < world_size - 1:
        words = store.get("asking").decode().split() if store.check(["asking"]) else []
        for word in words:
            if word not in answered:
                answered.add(word)
                store.set(f"answer/{word}", name)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{arrivals} of {world_size - 1} other ranks started")
        time.sleep(_POLL_SECONDS)
    return name


def _ask_for_name(store: Any, word: str, timeout: timedelta) -> str:
    """Ask rank 0 for the name, confirm that it has arrived, and return it."""
    store.append("asking", f"{word} ")
    store.wait([f"answer/{word}"], timeout)
    name = store.get(f"answer/{word}").decode()
    store.add(f"known/{name}", 1)
    return name
