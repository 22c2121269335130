"""`WeightSender`: the trainer's side of a weight sync, over a process group with engines, or in shared memory.

Both ways need one collective per bucket. Over a process group, one all-reduce gathers the shards of all ranks and
delivers them to the engines. In shared memory, the trainer's ranks gather the shards, and engines only read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.weight_sync.buckets import RefitPlan
from rl_megatron.weight_sync.exporter import DEFAULT_BUCKET_BYTES, AdapterExporter, BaseExporter, WeightExporter
from rl_megatron.weight_sync.ipc import SharedBuffer, WeightHandle, get_device_key
from rl_megatron.weight_sync.process_group import Handle, StandaloneGroup

_GIGABYTE = 1e9


@dataclass
class SyncTimings:
    """The time and size of a weight sync on this rank. Phases overlap, so their seconds may exceed the total."""

    bytes: int = 0
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {"fill": 0.0, "transfer": 0.0})

    def metrics(self, total: float | None = None, at_engines: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return `refit_bytes`, `refit_seconds` and `refit_gb_per_s`, and the seconds and GB/s of each phase.

        The phases are `refit_fill_…` (copying this rank's shards and fingerprinting them), `refit_transfer_…` (waiting
        for collectives), and those of engines.

        Args:
            total: The seconds until the last engine served the weights. None: until this rank had sent them.
            at_engines: The seconds of each phase in the slowest engine.
        """
        total = self.ended - self.began if total is None else total
        phases = {**self.seconds, **(at_engines or {})}
        metrics: dict[str, float] = {"refit_bytes": self.bytes}
        for phase, spent in {"": total, **{f"{phase}_": spent for phase, spent in phases.items()}}.items():
            metrics[f"refit_{phase}seconds"] = spent
            metrics[f"refit_{phase}gb_per_s"] = self.bytes / _GIGABYTE / spent if spent > 0 else 0.0
        return metrics


class WeightSender:
    """The sender of a model's weights to rollout engines.

    Every rank of the model calls every method with the same arguments. The object owns the exporter, the process group
    that engines join, and the shared memory that engines read.

    Attributes:
        timings: The time and size of the last weight sync.
    """

    def __init__(self, model: ShardedModel, kind: type[WeightExporter] = WeightExporter):
        """Prepare. `kind` chooses what is sent: all weights, with adapters merged; the base; or the adapters."""
        self.timings = SyncTimings()
        self._model, self._kind = model, kind
        self._exporter: WeightExporter | None = None
        self._frozen_adapters = model.frozen_adapters  # the adapters that the exporter merges
        self._max_bytes = DEFAULT_BUCKET_BYTES
        self._pending_group: PendingGroup | None = None
        self._shared: SharedBuffer | None = None

    def get_exporter(self, max_bytes: int | None = None) -> WeightExporter:
        """Return the exporter. Collective if there is none yet, or if `max_bytes` or the model's adapters have changed.

        `max_bytes` limits the weights in a bucket. None keeps the current value.
        """
        if self._exporter is None or max_bytes not in (None, self._max_bytes):
            self.release()
            self._max_bytes, self._exporter = max_bytes or self._max_bytes, None
        if self._exporter is None or self._frozen_adapters != self._model.frozen_adapters:
            self._exporter = self._kind(self._model, self._max_bytes)
            self._frozen_adapters = self._model.frozen_adapters
        return self._exporter

    @property
    def device(self) -> torch.device:
        return self._model.topology.device

    @property
    def plan(self) -> RefitPlan:
        """Return the plan that an engine needs before the first weights. Collective the first time."""
        return self.get_exporter().plan

    def list_tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each Hugging Face tensor, in the order in which they are sent."""
        specs = (spec for bucket in self.plan.buckets for spec in bucket.tensors)
        return {spec.name: (spec.shape, spec.torch_dtype) for spec in specs}

    def make_base_exporter(self) -> BaseExporter:
        """Return a new exporter of the weights without the model's adapters. Collective."""
        return BaseExporter(self._model, self._max_bytes)

    def make_adapter_exporter(self) -> AdapterExporter:
        """Return a new exporter of the model's adapters. Collective."""
        return AdapterExporter(self._model, self._max_bytes)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of every Hugging Face tensor. Each is valid until the next one. Collective."""
        return self.get_exporter().stream()

    # --- over a process group ---

    def join(self, ip: str, port: int, world_size: int, timeout_seconds: float) -> PendingGroup:
        """Start joining a process group with engines, and leave the group that was joined earlier.

        In the group, the model's ranks come first, then the engines. Rank 0 listens at `ip`:`port`. Tell the engines to
        join, and then wait for the returned group. Waiting raises CollectiveFailed if a process does not join.
        """
        self.leave()
        topology = self._model.topology
        if world_size <= topology.world_size:
            raise ValueError(
                f"world_size={world_size} must include the policy's {topology.world_size} ranks and at least one engine"
            )
        self._pending_group = PendingGroup(ip, port, topology.rank, world_size, topology.device, timeout_seconds)
        return self._pending_group

    def broadcast(self) -> list[Handle]:
        """Send all weights over the joined group, and return one handle per bucket, in order.

        Engines call `WeightReceiver.receive` meanwhile. A bucket is filled while the previous one is sent.

        Raises:
            CollectiveFailed: An engine died. A handle's `wait` may raise it, too. Join a new group then.
        """
        group = self.group()
        exporter = self.get_exporter()
        self._model.gather_parameters()
        self.timings = SyncTimings(exporter.plan.num_bytes)
        handles: list[Handle] = []
        buffers = [exporter.allocate_buffer() for _ in range(min(2, len(exporter.plan.buckets)))]
        for index in range(len(exporter.plan.buckets)):
            if index >= len(buffers):
                handles[index - len(buffers)].wait()
            filled = self._fill(exporter, index, buffers[index % 2])
            handles.append(_Transfer(group.all_reduce(filled), self.timings))
        return handles

    def group(self) -> StandaloneGroup:
        """Return the group of `join`, once every process has joined; raise CollectiveFailed if one does not."""
        if self._pending_group is None:
            raise RuntimeError("there is no group to send weights over; call init_collective() first")
        return self._pending_group.group()

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if self._pending_group is not None:
            self._pending_group.leave()
            self._pending_group = None

    # --- in shared memory ---

    def list_key_groups(self, max_bytes: int | None = None) -> list[list[str]]:
        """Return the tensor names of each bucket, as arguments for `share`, in order.

        A new `max_bytes` changes `plan`, and the engines then need the new plan.
        """
        exporter = self.get_exporter(max_bytes)
        self.timings = SyncTimings()
        return [[spec.name for spec in bucket.tensors] for bucket in exporter.plan.buckets]

    def share(self, keys: list[str]) -> dict[str, WeightHandle]:
        """Gather one bucket into this rank's shared memory, replacing the previous one, and return its handle.

        A process on this machine reads the bucket with `weight_sync.ipc.open_handle`, and must finish before the next
        bucket is shared. Collective.

        Args:
            keys: One of the lists that `list_key_groups` returned.

        Returns:
            The handle, under the key of this rank's device: a GPU's uuid, or "cpu".
        """
        index, exporter = self._find_bucket(keys), self.get_exporter()
        self._model.gather_parameters()
        topology = self._model.topology
        if self._shared is None:
            self._shared = SharedBuffer(exporter.num_words, topology.device)
        filled = self._fill(exporter, index, self._shared.words)
        if topology.world_size > 1:
            work = dist.all_reduce(filled, async_op=True)
            assert work is not None  # it is None only for processes outside the group
            _Transfer(work, self.timings).wait()
        self.timings.bytes += exporter.plan.buckets[index].num_bytes
        self.timings.ended = time.perf_counter()
        return {get_device_key(filled.device): self._shared.make_handle(index, filled.numel())}

    def _find_bucket(self, keys: list[str]) -> int:
        buckets = self.plan.buckets
        index = next((i for i, b in enumerate(buckets) if [spec.name for spec in b.tensors] == list(keys)), None)
        if index is None:
            raise ValueError(
                f"{keys[:3]}… ({len(keys)} keys) are not one of the groups that prepare_weights_for_ipc() returned"
            )
        return index

    def release(self) -> None:
        """Release the shared memory. Handles to it are invalid from now on."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def close(self) -> None:
        """Leave the process group and drop everything that refers to the model's weights."""
        self.leave()
        self.release()
        self._exporter = None

    def _fill(self, exporter: WeightExporter, index: int, buffer: Tensor) -> Tensor:
        began = time.perf_counter()
        filled = exporter.fill(index, buffer)
        if filled.is_cuda:
            torch.cuda.current_stream(filled.device).synchronize()
        self.timings.seconds["fill"] += time.perf_counter() - began
        return filled


class PendingGroup:
    """A process group that a thread is joining, so that the caller can tell engines to join meanwhile.

    The arguments are those of `StandaloneGroup`.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_seconds: float,
        **options: object,
    ):
        self._group: StandaloneGroup | None = None
        self._error: Exception | None = None
        self._left = False
        arguments = (ip, port, rank, world_size, device, timeout_seconds)
        self._thread = threading.Thread(target=self._join, args=arguments, kwargs=options, daemon=True)
        self._thread.start()

    def _join(self, *arguments: Any, **options: Any) -> None:
        try:
            self._group = StandaloneGroup(*arguments, **options)
        except Exception as error:  # `group` raises it again
            self._error = error
        if self._left and self._group is not None:
            self._group.close()

    def group(self) -> StandaloneGroup:
        """Return the group once every process has joined; raise CollectiveFailed if one does not."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._group is not None  # the thread has ended without an error
        return self._group

    def wait(self) -> None:
        """Wait until every process has joined; raise what `group` raises."""
        self.group()

    def is_over(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and return whether joining is over by then; it may have failed."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Leave the group, without waiting for processes that have not joined."""
        self._left = True
        if self._group is not None:
            self._group.close()


class _Transfer:
    """The collective of one bucket. The time spent waiting for it is counted as transfer time."""

    def __init__(self, work: Handle | dist.Work, timings: SyncTimings):
        self._work: Handle | dist.Work | None = work
        self._timings = timings

    def wait(self) -> None:
        if self._work is None:
            return
        began = time.perf_counter()
        self._work.wait()
        self._work = None
        self._timings.ended = time.perf_counter()
        self._timings.seconds["transfer"] += self._timings.ended - began
