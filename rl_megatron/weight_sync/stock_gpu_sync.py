"""Send weights to vLLM servers through vLLM's own backends `nccl` and `ipc`, which need GPUs and no plugin.

They are tested only as far as a CPU allows: vLLM's own classes take the bodies of the requests.
"""

from __future__ import annotations

import abc
import base64
import pickle
import time
from collections.abc import Sequence
from typing import Any

from torch.multiprocessing.reductions import reduce_tensor

from rl_megatron.weight_sync.ipc import device_key
from rl_megatron.weight_sync.nccl import NcclGroup, new_unique_id
from rl_megatron.weight_sync.plan import TensorSpec, WeightsRefused
from rl_megatron.weight_sync.plugin_sync import confirm
from rl_megatron.weight_sync.process_group import CollectiveFailed
from rl_megatron.weight_sync.sender import SyncTimings, WeightSender
from rl_megatron.weight_sync.servers import WeightServers
from rl_megatron.weight_sync.stock_sync import INCOMPLETE, compare_checksums, set_version

IPC_INIT_INFO = {"packed": False}  # the `init_info` of vLLM's backend `ipc`


class StockSync(abc.ABC):
    """A `ServerSync` through one of vLLM's own weight-transfer backends."""

    def __init__(self, sender: WeightSender, servers: WeightServers, bucket_bytes: int, timeout_seconds: float):
        """Keep what is needed; `connect` makes the connection.

        Args:
            sender: The policy's sender.
            servers: The servers.
            bucket_bytes: The most bytes of weights in a bucket.
            timeout_seconds: The longest time for joining a communicator, and for each of its broadcasts.
        """
        self._sender, self._servers = sender, servers
        self._bucket_bytes, self._timeout = bucket_bytes, timeout_seconds

    @abc.abstractmethod
    def connect(self) -> None:
        """Prepare the servers; see `ServerSync.connect`."""

    def send(self, version: int) -> dict[str, float]:
        """Send the policy's current weights; see `ServerSync.send`."""
        began = time.perf_counter()
        set_version(self._servers, INCOMPLETE)
        self._servers.post("/start_weight_update")
        self._transfer()
        timings = SyncTimings(self._sender.plan.num_bytes, began, time.perf_counter())
        timings.seconds["transfer"] = timings.ended - began
        self._sender.timings = timings
        self._servers.post("/finish_weight_update", [{"weight_version": str(version)}] * self._servers.count)
        compare_checksums(self._servers)
        confirm(self._servers, version)
        return timings.metrics_of_sync(time.perf_counter() - began, {})

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the connection holds; see `ServerSync.close`."""

    @abc.abstractmethod
    def _transfer(self) -> None:
        """Send all tensors."""


class SyncOverNccl(StockSync):
    """Send weights over an NCCL communicator of rank 0 and all workers of all servers (vLLM's backend `nccl`)."""

    _group: NcclGroup | None = None  # on rank 0

    def connect(self) -> None:
        """Join a new communicator with all workers; see `ServerSync.connect`."""
        self.close()
        self._sender.exporter(self._bucket_bytes)
        ranks = self._servers.ranks
        sizes = [answer["world_size"] for answer in self._servers.get("/get_world_size?include_dp=true")]
        world_size, bodies = 1 + sum(sizes), []
        unique_id, failure = b"", None
        if ranks.leads:
            try:
                unique_id = new_unique_id()
                self._group = NcclGroup(unique_id, world_size, self._sender.device, self._timeout)
            except CollectiveFailed as error:
                failure = str(error)
        failure = ranks.share(lambda: failure)
        if failure is not None:
            raise WeightsRefused(failure)
        for index in range(len(sizes)):
            bodies.append({"init_info": nccl_init_info(unique_id, 1 + sum(sizes[:index]), world_size)})
        self._servers.post("/init_weight_transfer_engine", bodies, meanwhile=self._joined)

    def close(self) -> None:
        """Leave the communicator."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _joined(self) -> None:
        if self._group is not None:
            self._group.joined(self._servers.has_failed)

    def _transfer(self) -> None:
        specs = [spec for bucket in self._sender.plan.buckets for spec in bucket.tensors]
        body = {"update_info": names_and_shapes(specs)}
        self._servers.post("/update_weights", [body] * self._servers.count, meanwhile=self._broadcast)

    def _broadcast(self) -> None:
        failure = None
        for _, weight in self._sender.stream():  # all ranks take part, also if rank 0 cannot send any more
            if self._group is not None and failure is None:
                try:
                    self._group.broadcast(weight.contiguous(), self._servers.has_failed)
                except CollectiveFailed as error:
                    failure = error
        if failure is not None:
            raise failure


class SyncThroughIpc(StockSync):
    """Send weights through memory of the ranks' GPUs, which servers on the same GPUs open (vLLM's backend `ipc`).

    The servers have to be started with VLLM_ALLOW_INSECURE_SERIALIZATION=1, because vLLM unpickles the handles.
    """

    def connect(self) -> None:
        """Prepare the servers; see `ServerSync.connect`."""
        if self._sender.device.type != "cuda":
            raise WeightsRefused(
                "generation.refit=ipc sends handles of GPU memory, and the policy computes on the CPU; set "
                "generation.refit=shared_memory, or collective"
            )
        self._sender.exporter(self._bucket_bytes)
        self._servers.post("/init_weight_transfer_engine", [{"init_info": IPC_INIT_INFO}] * self._servers.count)

    def close(self) -> None:
        """Free the shared memory."""
        self._sender.release()

    def _transfer(self) -> None:
        buckets = self._sender.plan.buckets
        for keys, bucket in zip(self._sender.groups_of_keys(self._bucket_bytes), buckets, strict=True):
            words = self._sender.share_words(keys)
            own = device_key(words.device)
            handles = [{own: reduce_tensor(bucket.tensor(words, i))[1]} for i in range(len(bucket.tensors))]
            each = self._servers.ranks.gather(handles)
            merged = [
                {uuid: args for part in parts for uuid, args in part.items()} for parts in zip(*each, strict=True)
            ]
            body = {"update_info": ipc_update_info(bucket.tensors, merged)}
            self._servers.post("/update_weights", [body] * self._servers.count)


def nccl_init_info(unique_id: bytes, rank_offset: int, world_size: int) -> dict[str, Any]:
    """Return the `init_info` of vLLM's backend `nccl`, whose workers have the ranks from `rank_offset` on."""
    encoded = base64.b64encode(unique_id).decode()
    return {"nccl_unique_id_b64": encoded, "rank_offset": rank_offset, "world_size": world_size, "packed": False}


def names_and_shapes(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Return what the `update_info` of vLLM's backends says about the tensors that follow."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def ipc_update_info(specs: Sequence[TensorSpec], handles: list[dict[str, tuple[Any, ...]]]) -> dict[str, Any]:
    """Return the `update_info` of vLLM's backend `ipc`.

    Args:
        specs: The tensors.
        handles: For each tensor, torch's arguments to open it, by the uuid of the GPU that has it.
    """
    pickled = base64.b64encode(pickle.dumps(handles)).decode()
    return {**names_and_shapes(specs), "ipc_handles_pickled": pickled}
