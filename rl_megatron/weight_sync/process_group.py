"""`StandaloneGroup`: a process group besides the default one, for processes that were started separately.

An engine's process joins without `init_process_group` and without megatron-core. If a peer dies or never joins, every
process that waits for it gets an error within the timeout.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented

from rl_megatron.config.addresses import is_loopback
from rl_megatron.topology.job_store import is_on_one_node

_POLL_SECONDS = 0.0005
_PREFIXES = ("standalone",)
# torch's NCCL groups read these when they are made. By default their threads end the process if a peer dies, before
# `wait` can report this. With these settings `wait` raises the error, and no thread ends the process.
_RAISE_ERRORS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class CollectiveFailed(RuntimeError):
    """Raised for a collective that a peer did not complete. The group cannot be used afterwards."""


class Handle(Protocol):
    """A collective that was started."""

    def wait(self) -> None:
        """Wait until the collective is done.

        Raises:
            CollectiveFailed: A peer did not complete it.
        """
        ...


class Transfer(Handle, Protocol):
    """A collective that was started, and that can be waited for with a time limit."""

    def is_over(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether the collective is over by then; it may have failed."""
        ...


class StandaloneGroup:
    """A group of `world_size` processes that meet at the address of rank 0. It uses gloo on the CPU, NCCL on a GPU.

    Attributes:
        process_group: torch's process group; None once this process has left.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_seconds: float = 600.0,
        prefixes: Sequence[str] = _PREFIXES,
    ):
        """Join, and return when all processes have joined. Rank 0 listens at `ip`:`port`.

        Args:
            ip: The address of rank 0.
            port: The port of rank 0.
            rank: This process's rank.
            world_size: The number of processes.
            device: The device of the tensors.
            timeout_seconds: The longest time for joining, and for each collective.
            prefixes: The prefixes of the group's keys in the store, leftmost first; the same in all processes.

        Raises:
            CollectiveFailed: Not all processes joined within the timeout.
        """
        self.rank, self.world_size, self.device = rank, world_size, device
        self._timeout_seconds = timeout_seconds
        self._who = f"rank {rank} of the {world_size} processes that meet at {ip}:{port}"
        timeout = timedelta(seconds=timeout_seconds)
        try:
            # The store is kept, because rank 0's store is the server for the other ranks' connections.
            self._store = _make_store(ip, port, rank, world_size, timeout)
            store: Store = self._store
            for prefix in prefixes:
                store = PrefixStore(prefix, store)
            self.process_group = self._connect(store, timeout, ip)
        except (RuntimeError, ValueError, OSError) as error:  # torch's own errors are RuntimeErrors
            raise CollectiveFailed(f"{self._who} could not join: {error}") from error

    def _connect(self, store: Store, timeout: timedelta, ip: str) -> Any:
        if self.device.type != "cuda":
            gloo: Any = dist.ProcessGroupGloo  # torch's stub leaves its options out
            if not is_loopback(ip) or os.environ.get("GLOO_SOCKET_IFNAME"):
                return gloo(store, self.rank, self.world_size, timeout)
            gloo_options = gloo._Options()  # torch's default would listen at the address of the machine's name
            gloo_options._timeout, gloo_options._devices = timeout, [gloo.create_device(hostname=ip)]
            return gloo(store, self.rank, self.world_size, gloo_options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # our own timeout comes first
        with _set_environment(_RAISE_ERRORS):
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Start summing `tensor` over all ranks in place; do not use it before the handle's `wait` returns.

        Raises:
            CollectiveFailed: This process has left the group, or a peer did not complete a collective.
        """
        if self.process_group is None:
            raise CollectiveFailed(f"{self._who} has left the group, or an earlier collective failed")
        try:
            return _Work(self, self.process_group.allreduce([tensor], dist.AllreduceOptions()))
        except RuntimeError as error:
            raise self._fail(error) from error

    def broadcast(self, tensor: Tensor) -> Transfer:
        """Start sending rank 0's `tensor` to all ranks; see `all_reduce`."""
        if self.process_group is None:
            raise CollectiveFailed(f"{self._who} has left the group, or an earlier collective failed")
        try:
            return _Work(self, self.process_group.broadcast([tensor], dist.BroadcastOptions()))
        except RuntimeError as error:
            raise self._fail(error) from error

    def close(self) -> None:
        """Leave the group. Unfinished collectives fail on all ranks."""
        group, self.process_group, self._store = self.process_group, None, None
        if group is not None and self.device.type == "cuda":
            group.abort()

    def _fail(self, error: object) -> CollectiveFailed:
        self.close()
        within = f"within {self._timeout_seconds:g} s"
        return CollectiveFailed(f"{self._who}: a peer left the group or did not answer {within}: {error}")


@contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
    original = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in original.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Work:
    def __init__(self, group: StandaloneGroup, work: dist.Work):
        self._group, self._work = group, work
        self._deadline = time.monotonic() + group._timeout_seconds

    def wait(self) -> None:
        try:
            if self._group.device.type == "cuda":  # NCCL's own wait returns before the work is done
                self._wait_for_kernel()
            self._work.wait()
        except RuntimeError as error:
            raise self._group._fail(error) from error

    def is_over(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._work.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return self._work.is_completed()

    def _wait_for_kernel(self) -> None:
        while not self._work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError("timed out")
            time.sleep(_POLL_SECONDS)


def _make_store(ip: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Make the group's store, which rank 0 serves. By default, torch would listen at all interfaces."""
    if rank != 0:
        return TCPStore(ip, port, world_size, is_master=False, timeout=timeout)
    listening = open_listening_socket(ip, port, world_size)
    return TCPStore(ip, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listening.detach())


def open_listening_socket(ip: str, port: int, backlog: int) -> socket.socket:
    """Open a socket that listens at one address.

    In two cases, the socket listens at all interfaces instead: if the address is not one of this machine's, as in a
    container with forwarded ports; or if it is the loopback address of a job with several nodes, because the other
    nodes reach this one by its name.
    """
    family, _, _, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
    try:
        if is_on_one_node() or not is_loopback(str(address[0])):
            return socket.create_server(address[:2], family=family, backlog=backlog)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return socket.create_server(("", port), family=family, backlog=backlog)


def find_free_address(hosts: Sequence[str] = ()) -> tuple[str, int]:
    """Return rank 0's address and a free port, at which servers can meet the policy's ranks.

    `hosts` are the hosts of servers that do not run on the ranks' nodes.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    others = [host for host in hosts if not is_loopback(host)]
    if others and is_loopback(address):  # the ranks are on one node, and the servers may be on another one
        address = _find_address_towards(others[0])
    with socket.socket() as probe:
        probe.bind(("", 0))
        return address, probe.getsockname()[1]


def _find_address_towards(host: str) -> str:
    """Return the address at which `host` reaches this machine; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
