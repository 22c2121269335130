"""A process group beside the default one: processes that were started apart and know an address and their number.

An engine's process joins without `init_process_group`, and without megatron-core. What fails (a peer that died, or that
never comes) raises within the timeout on everyone who waits.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_POLL_SECONDS = 0.0005


class CollectiveFailed(RuntimeError):
    """A collective that a peer did not take part in to its end. The group is of no further use."""


class Handle(Protocol):
    """Work under way."""

    def wait(self) -> None:
        """Returns when the work is done. Raises: CollectiveFailed where it cannot be."""
        ...


class StandaloneGroup:
    """`world_size` processes around the address of rank 0. gloo on the CPU, NCCL on a GPU."""

    def __init__(
        self, ip: str, port: int, rank: int, world_size: int, device: torch.device, timeout_seconds: float = 600.0
    ):
        """Returns when all have joined; rank 0 listens at `ip`:`port`.

        Raises: CollectiveFailed where they do not within the timeout.
        """
        self.rank, self.world_size, self.device = rank, world_size, device
        self._timeout_seconds = timeout_seconds
        self._who = f"rank {rank} of the {world_size} around {ip}:{port}"
        timeout = timedelta(seconds=timeout_seconds)
        try:
            # Kept: rank 0's is the server that the others' connections need.
            self._store = dist.TCPStore(ip, port, world_size, is_master=rank == 0, timeout=timeout)
            self._group = self._connect(dist.PrefixStore("standalone", self._store), timeout)
        except (RuntimeError, ValueError) as error:  # torch's own are RuntimeErrors
            raise CollectiveFailed(f"{self._who} could not join: {error}") from error

    def _connect(self, store: dist.Store, timeout: timedelta) -> Any:
        if self.device.type != "cuda":
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 2 * timeout  # its watchdog would end the process: the wait below is over before
        return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Begins to add up `tensor` over all ranks, in place; it is not to be touched before the handle's `wait()`."""
        if self._group is None:
            raise CollectiveFailed(f"{self._who} has left, or a collective failed before")
        try:
            return _Work(self, self._group.allreduce([tensor], dist.AllreduceOptions()))
        except RuntimeError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Leaves. What is under way fails for everyone."""
        group, self._group, self._store = self._group, None, None
        if group is not None and self.device.type == "cuda":
            group.abort()

    def _failed(self, error: object) -> CollectiveFailed:
        self.close()
        within = f"within {self._timeout_seconds:g} s"
        return CollectiveFailed(f"{self._who}: a peer left, or did not answer {within}: {error}")


class _Work:
    def __init__(self, group: StandaloneGroup, work: Any):
        self._group, self._work = group, work
        self._deadline = time.monotonic() + group._timeout_seconds

    def wait(self) -> None:
        try:
            if self._group.device.type == "cuda":  # NCCL's own wait returns before the work is done
                self._wait_for_kernel()
            self._work.wait()
        except RuntimeError as error:
            raise self._group._failed(error) from error

    def _wait_for_kernel(self) -> None:
        while not self._work.is_completed():
            if time.monotonic() > self._deadline:
                raise RuntimeError("timed out")
            time.sleep(_POLL_SECONDS)
