"""Weight syncs to SGLang servers through SGLang's own endpoints: bytes of buckets, broadcast in a process group.

SGLang does not verify tensors that arrive, so the policy's ranks verify a bucket before they send it. Afterwards,
SGLang's checksums show which tensors of its model have changed, and whether all servers have the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rl_megatron.topology.topology import Topology
from rl_megatron.weight_sync.buckets import Bucket, RefitPlan, TensorSpec, WeightsRefused
from rl_megatron.weight_sync.process_group import CollectiveFailed
from rl_megatron.weight_sync.sender import PendingGroup, SyncTimings, WeightSender
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers

_GROUP = "rl_megatron"
# A fused module of SGLang's model → the checkpoint's modules that it consists of.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_Checksums: TypeAlias = Mapping[str, tuple[str, ...]]  # of one server: tensor → its checksum on each rank


class SglangSync:
    """A `ServerSync` that broadcasts flattened buckets from rank 0 to all ranks of all servers."""

    def __init__(self, servers: WeightServers, weights: WeightSender, topology: Topology, timeout_seconds: float):
        """Prepare; nothing is sent yet. `timeout_seconds` limits joining the group, and each collective."""
        self._servers, self._weights, self._topology = servers, weights, topology
        self._timeout = timeout_seconds
        self._pending: PendingGroup | None = None  # on rank 0
        self._history = ChecksumHistory()

    def connect(self) -> None:
        """Connect all servers' ranks and rank 0 in a process group; see `ServerSync.connect`."""
        self.close()
        infos, models = self._servers.get("/server_info"), self._servers.get("/model_info")
        plan = self._weights.plan
        for number, (info, model) in enumerate(zip(infos, models, strict=True)):
            check_server(f"SGLang server {number}", info, model, plan)
        self._history = ChecksumHistory(all(info.get("dtype") == plan.hf_config["dtype"] for info in infos))
        self._leave_earlier_group()
        sizes = [int(info["tp_size"]) for info in infos]
        address, port = self._servers.find_meeting_point()
        backend = "nccl" if self._topology.is_cuda else "gloo"
        world_size = 1 + sum(sizes)
        bodies = [
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1 + sum(sizes[:number]),
                "world_size": world_size,
                "group_name": _GROUP,
                "backend": backend,
            }
            for number in range(len(sizes))
        ]
        if self._servers.ranks.leads:
            # torch prefixes the group's keys with the group's name twice, and then with the type of the device.
            prefixes = (_GROUP, f"{_GROUP}/", f"{self._topology.device.type}/")
            self._pending = PendingGroup(
                address, port, 0, world_size, self._topology.device, self._timeout, prefixes=prefixes
            )
        joining = self._pending or _Finished()
        self._servers.post("/init_weights_update_group", bodies, meanwhile=lambda: self._servers.meet(joining))

    def send(self, version: int) -> dict[str, float]:
        """Send the policy's current weights; see `ServerSync.send`.

        WeightsRefused is raised if a bucket differs from what the ranks have written, if a server did not load a
        tensor, or if servers have different weights.
        """
        exporter = self._weights.get_exporter()
        self._weights.timings = timings = SyncTimings(exporter.plan.num_bytes)
        fingerprints: dict[str, int] = {}
        self._begin()
        for number, (bucket, buffer) in enumerate(exporter.gather_buckets()):
            names = [spec.name for spec in bucket.tensors]
            fingerprints |= dict(zip(names, bucket.fingerprints(buffer).tolist(), strict=True))
            last = number + 1 == len(exporter.plan.buckets)
            sending = time.perf_counter()
            self._send_bucket(bucket, buffer, version if last else None)
            timings.seconds["transfer"] += time.perf_counter() - sending
        timings.ended = time.perf_counter()
        timings.seconds["fill"] = timings.ended - timings.began - timings.seconds["transfer"]
        self._servers.post("/end_weight_update")
        self._confirm(version)
        verifying = time.perf_counter()
        answers = self._servers.post("/weights_checker", [{"action": "checksum"}] * self._servers.count)
        self._history.check(answers, fingerprints)
        ended = time.perf_counter()
        return timings.metrics(ended - timings.began, {"verify": ended - verifying})

    def close(self) -> None:
        """Leave the process group."""
        if self._pending is not None:
            self._pending.leave()
            self._pending = None

    def _leave_earlier_group(self) -> None:
        """Make the servers leave the group of an earlier connection, or of an earlier run, if there is one."""
        try:
            bodies = [{"group_name": _GROUP}] * self._servers.count
            self._servers.post("/destroy_weights_update_group", bodies)
        except ServerRefused:
            pass  # there is usually no such group

    def _begin(self) -> None:
        """Open an update on every server, after closing one that an interrupted weight sync left open."""
        try:
            self._servers.post("/begin_weight_update")
        except ServerRefused as refusal:
            if "already open" not in str(refusal):
                raise
            self._servers.post("/end_weight_update")
            self._servers.post("/begin_weight_update")

    def _send_bucket(self, bucket: Bucket, buffer: Tensor, version: int | None) -> None:
        """Broadcast a bucket. Only the last has a `version`, which makes servers drop the KV cache of older weights."""
        specs = order_flat(bucket)
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": _GROUP,
            "load_format": "flattened_bucket",
            "flush_cache": version is not None,
            "weight_version": None if version is None else str(version),
        }
        bodies = [body] * self._servers.count
        path = "/update_weights_from_distributed"
        flat = flatten(bucket, buffer) if self._servers.ranks.leads else None
        try:
            self._servers.post(path, bodies, meanwhile=lambda: self._broadcast(flat))
        except ServerRefused as refusal:
            if "cache was not flushed" not in str(refusal):
                raise
            raise ServerRefused(
                f"{refusal} The server is paused during a weight sync, so these requests are not this run's, or it was "
                "resumed; let no other client use the server"
            ) from refusal

    def _broadcast(self, flat: Tensor | None) -> None:
        """Send a bucket from rank 0 while the other ranks wait. If a server has failed, rank 0 leaves the group."""
        try:
            sending = self._pending.group().broadcast(flat) if self._pending and flat is not None else _Finished()
            self._servers.meet(sending)
        except CollectiveFailed:
            self.close()
            raise

    def _confirm(self, version: int) -> None:
        for number, model in enumerate(self._servers.get("/model_info")):
            if model.get("weight_version") != str(version):
                raise WeightsRefused(
                    f"SGLang server {number} reports that its weights have version {model.get('weight_version')!r}, "
                    f"but version {version} was sent"
                )


class _Finished:
    """A `Pending` that is already over, for ranks other than 0, which send nothing."""

    def is_over(self, seconds: float) -> bool:
        return True

    def wait(self) -> None: ...


class ChecksumHistory:
    """The checksums of the servers' tensors after the last weight sync, and the fingerprints that were sent in it."""

    def __init__(self, same_dtype: bool = False):
        """Start with no recorded checksums.

        `same_dtype` means that the servers keep the weights in the dtype in which they are sent. Otherwise rounding may
        undo a small change of a weight, so servers are only compared with each other.
        """
        self._same_dtype = same_dtype
        self._checksums: list[dict[str, tuple[str, ...]]] = []
        self._fingerprints: dict[str, int] = {}

    def check(self, answers: Sequence[Mapping[str, Any]], fingerprints: Mapping[str, int]) -> None:
        """Compare the servers with each other, and their changes with what was sent. Keep the new values.

        Args:
            answers: Each server's answer to `/weights_checker`.
            fingerprints: The fingerprint of each tensor that was sent.

        Raises:
            WeightsRefused: The checksums do not agree. The message names the server and the tensor.
        """
        checksums = [_group_by_tensor(answer["ranks"]) for answer in answers]
        _check_equality(checksums)
        if self._same_dtype and len(checksums) == len(self._checksums):
            self._check_changes(checksums, fingerprints)
        self._checksums, self._fingerprints = checksums, dict(fingerprints)  # a refused weight sync changes neither

    def _check_changes(self, checksums: Sequence[_Checksums], fingerprints: Mapping[str, int]) -> None:
        for number, (old, new) in enumerate(zip(self._checksums, checksums, strict=True)):
            for name in sorted(old.keys() & new.keys()):
                sources = find_sources(name, fingerprints)
                sent = any(self._fingerprints.get(source) != fingerprints[source] for source in sources)
                if sources and sent != (old[name] != new[name]):
                    raise WeightsRefused(
                        f"SGLang server {number}: {name} "
                        + ("did not change, although" if sent else "changed, although no change of")
                        + f" {' or '.join(sources)} was sent"
                    )


def find_sources(name: str, sent: Iterable[str]) -> list[str]:
    """Return those names in `sent` whose checkpoint tensors make up SGLang's tensor `name`."""
    sent = set(sent)
    module = name.rpartition(".")[0].rpartition(".")[2]
    if name in sent:
        return [name]
    if module in _FUSED:
        parts = [name.replace(f".{module}.", f".{part}.") for part in _FUSED[module]]
        return [part for part in parts if part in sent]
    return [_TIED[name]] if _TIED.get(name) in sent else []


def order_flat(bucket: Bucket) -> list[TensorSpec]:
    """Sort the tensors of a bucket so that their bytes follow each other without gaps.

    Each tensor must begin at a multiple of the size of its elements. If all tensors fill whole words, they keep their
    order. Otherwise those with larger elements come first.
    """
    if _has_no_gaps(bucket):
        return list(bucket.tensors)
    return sorted(bucket.tensors, key=lambda spec: -spec.torch_dtype.itemsize)


def flatten(bucket: Bucket, buffer: Tensor) -> Tensor:
    """Return the tensors' bytes in the order of `order_flat`, [bytes] uint8; a view of `buffer` if it has no gaps."""
    if _has_no_gaps(bucket):
        return buffer[: bucket.starts[-1]].view(torch.uint8)
    tensors = {spec.name: bucket.tensor(buffer, index) for index, spec in enumerate(bucket.tensors)}
    return torch.cat([tensors[spec.name].flatten().view(torch.uint8) for spec in order_flat(bucket)])


def _has_no_gaps(bucket: Bucket) -> bool:
    return bucket.num_bytes == 8 * bucket.starts[-1]


def check_server(name: str, info: Mapping[str, Any], model: Mapping[str, Any], plan: RefitPlan) -> None:
    """Check that a server can take the policy's weights.

    Raises:
        ServerRefused: It serves another model or computes in another dtype, or its endpoints do not support its layout.
    """
    for key in ("dp_size", "pp_size"):
        if int(info.get(key) or 1) > 1:
            raise ServerRefused(
                f"{name} has {key}={info[key]}, but its endpoints for weights need {key}=1; start several servers, or "
                "raise its tp_size"
            )
    ours, theirs = plan.hf_config.get("architectures"), model.get("architectures")
    if ours and theirs and list(theirs) != list(ours):
        raise ServerRefused(f"{name} serves {', '.join(theirs)}, but the policy is {', '.join(ours)}; serve its model")
    dtype = info.get("dtype")
    if dtype not in (None, "auto", plan.hf_config["dtype"]):
        raise ServerRefused(
            f"{name} computes in {dtype}, but the policy in {plan.hf_config['dtype']}; start it with "
            f"--dtype {plan.hf_config['dtype']}"
        )


def _check_equality(servers: Sequence[_Checksums]) -> None:
    """Check that servers with the same layout have the same weights."""
    for number, checksums in enumerate(servers):
        first = next(index for index, other in enumerate(servers) if _get_layout(other) == _get_layout(checksums))
        for name, checksum in checksums.items():
            if servers[first][name] != checksum:
                raise WeightsRefused(
                    f"SGLang server {number} has other weights than server {first} in {name}, although both got the "
                    "same"
                )


def _group_by_tensor(ranks: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the checksum of every tensor on each rank of a server."""
    names = dict.fromkeys(name for rank in ranks for name in rank["checksums"])
    return {name: tuple(rank["checksums"].get(name, "") for rank in ranks) for name in names}


def _get_layout(checksums: _Checksums) -> tuple[int, frozenset[str]]:
    """Return what servers with comparable checksums have in common: the number of ranks, and the tensors."""
    return len(next(iter(checksums.values()), ())), frozenset(checksums)
