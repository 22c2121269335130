"""Weights on their way to a rollout engine: over a process group that it joins, or in memory that it opens.

Both take one collective a bucket. Over a group, that one all-reduce gathers the policy's shards and delivers them at
once; in shared memory the policy's ranks gather among themselves, and the engine takes part in nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.weight_sync.exporter import DEFAULT_BUCKET_BYTES, WeightExporter
from rl_megatron.weight_sync.ipc import SharedBuffer, WeightHandle, device_key
from rl_megatron.weight_sync.plan import RefitPlan
from rl_megatron.weight_sync.process_group import Handle, StandaloneGroup

if TYPE_CHECKING:
    from rl_megatron.policy.megatron_policy import MegatronPolicy

_GIGABYTE = 1e9


@dataclass
class RefitCost:
    """What the last hand-over took on this rank. Phases overlap: their seconds may add up to more than the whole's."""

    bytes: int = 0
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {"fill": 0.0, "transfer": 0.0})

    def metrics(self) -> dict[str, float]:
        """`refit_bytes`, `refit_seconds`, `refit_gb_per_s`; seconds and GB/s of `refit_fill_…` (this rank's rows and
        their fingerprints) and `refit_transfer_…` (waiting for collectives)."""
        whole = {"": self.ended - self.began} | {f"{phase}_": spent for phase, spent in self.seconds.items()}
        costs: dict[str, float] = {"refit_bytes": self.bytes}
        for phase, spent in whole.items():
            costs[f"refit_{phase}seconds"] = spent
            costs[f"refit_{phase}gb_per_s"] = self.bytes / _GIGABYTE / spent if spent > 0 else 0.0
        return costs


class HandOver:
    """A policy's ways out. `cost`: of the last hand-over."""

    def __init__(self, policy: MegatronPolicy):
        self.cost = RefitCost()
        self._policy = policy
        self._exporter: WeightExporter | None = None
        self._max_bytes = DEFAULT_BUCKET_BYTES
        self._joining: Joining | None = None
        self._shared: SharedBuffer | None = None

    def exporter(self, max_bytes: int | None = None) -> WeightExporter:
        """Collective where there is none yet, or `max_bytes` is another than so far."""
        if self._exporter is None or max_bytes not in (None, self._max_bytes):
            self.release()
            self._max_bytes = max_bytes or self._max_bytes
            self._exporter = WeightExporter(self._policy, self._max_bytes)
        return self._exporter

    @property
    def plan(self) -> RefitPlan:
        return self.exporter().plan

    # --- over a process group ---

    def join(self, ip: str, port: int, world_size: int, timeout_seconds: float) -> Joining:
        """Begins to join, as the first ranks of `world_size`; leaves the group joined before."""
        self.leave()
        topology = self._policy.topology
        if world_size <= topology.world_size:
            raise ValueError(
                f"world_size={world_size} must count the policy's {topology.world_size} ranks and at least one engine's"
            )
        self._joining = Joining(ip, port, topology.rank, world_size, topology.device, timeout_seconds)
        return self._joining

    def broadcast(self) -> list[Handle]:
        """One all-reduce for each bucket; filling a bucket and sending the one before it overlap."""
        if self._joining is None:
            raise RuntimeError("there is no group to send weights over; call init_collective() first")
        group = self._joining.group()
        exporter, handles = self.exporter(), []
        self._policy.finish_training()
        self.cost = RefitCost(exporter.plan.num_bytes)
        buffers = [exporter.new_buffer() for _ in range(min(2, len(exporter.plan.buckets)))]
        for index in range(len(exporter.plan.buckets)):
            if index >= len(buffers):
                handles[index - len(buffers)].wait()
            handles.append(_Transfer(group.all_reduce(self._fill(index, buffers[index % 2])), self.cost))
        return handles

    def leave(self) -> None:
        if self._joining is not None:
            self._joining.leave()
            self._joining = None

    # --- in shared memory ---

    def groups_of_keys(self, max_bytes: int | None) -> list[list[str]]:
        exporter = self.exporter(max_bytes)
        self.cost = RefitCost()
        return [[spec.name for spec in bucket.tensors] for bucket in exporter.plan.buckets]

    def share(self, keys: list[str]) -> dict[str, WeightHandle]:
        """Gathers one group of keys into this rank's shared memory, over what was there before."""
        exporter = self.exporter()
        plan = exporter.plan
        index = next((i for i, b in enumerate(plan.buckets) if [spec.name for spec in b.tensors] == list(keys)), None)
        if index is None:
            raise ValueError(
                f"{keys[:3]}… ({len(keys)} keys) are not one of the groups that prepare_weights_for_ipc() gave"
            )
        self._policy.finish_training()
        topology = self._policy.topology
        if self._shared is None:
            self._shared = SharedBuffer(exporter.num_words, topology.device)
        filled = self._fill(index, self._shared.words)
        if topology.world_size > 1:
            _Transfer(dist.all_reduce(filled, async_op=True), self.cost).wait()
        handle = self._shared.handle(index, filled.numel())
        self.cost.bytes += plan.buckets[index].num_bytes
        self.cost.ended = time.perf_counter()
        return {device_key(topology.device): handle}

    def release(self) -> None:
        """Gives shared memory back; handles to it are void."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def close(self) -> None:
        self.leave()
        self.release()
        self._exporter = None

    def _fill(self, index: int, buffer: Tensor) -> Tensor:
        began = time.perf_counter()
        filled = self.exporter().fill(index, buffer)
        if filled.is_cuda:
            torch.cuda.current_stream(filled.device).synchronize()
        self.cost.seconds["fill"] += time.perf_counter() - began
        return filled


class Joining:
    """A group that is being joined: the call returns while engines, told by the same caller, still come."""

    def __init__(self, *arguments):
        self._group: StandaloneGroup | None = None
        self._error: Exception | None = None
        self._left = False
        self._thread = threading.Thread(target=self._join, args=arguments, daemon=True)
        self._thread.start()

    def _join(self, *arguments) -> None:
        try:
            self._group = StandaloneGroup(*arguments)
        except Exception as error:  # raised again by whoever waits
            self._error = error
        if self._left and self._group is not None:
            self._group.close()

    def group(self) -> StandaloneGroup:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._group

    def wait(self) -> None:
        self.group()

    def is_over(self, seconds: float) -> bool:
        """Whether `wait` would return or raise at once; it may take `seconds` to say no."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Does not wait for those who have not come."""
        self._left = True
        if self._group is not None:
            self._group.close()


class _Transfer:
    """A bucket on its way; waiting for it is what a transfer costs."""

    def __init__(self, work: Handle, cost: RefitCost):
        self._work: Handle | None = work
        self._cost = cost

    def wait(self) -> None:
        if self._work is None:
            return
        began = time.perf_counter()
        self._work.wait()
        self._work = None
        self._cost.ended = time.perf_counter()
        self._cost.seconds["transfer"] += self._cost.ended - began
