"""Send weights to vLLM servers with our plugin (`weight_sync.vllm_plugin`): over a process group or in shared memory.

Every worker of a server verifies the weights that arrived, and reports the result, before the server may serve them.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping
from typing import Any

from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.sender import WeightSender
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused, WeightServers
from rl_megatron.weight_sync.vllm_plugin import BACKEND, PROTOCOL, REPORT

_INTRODUCE = "/init_weight_transfer_engine"
_REMEDY = (
    f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\' and VLLM_SERVER_DEV_MODE=1 from an '
    "environment that scripts/install_vllm.sh has prepared, or choose generation.refit=disk, which needs no plugin"
)


class PluginSync(abc.ABC):
    """A `ServerSync` to vLLM servers with our plugin. It owns the connection between the policy and the servers."""

    def __init__(self, sender: WeightSender, servers: WeightServers, bucket_bytes: int, timeout_seconds: float):
        """Prepare; `connect` makes the connection. `timeout_seconds` limits joining a group, and each collective."""
        self._sender, self._servers = sender, servers
        self._bucket_bytes, self._timeout = bucket_bytes, timeout_seconds

    def connect(self) -> None:
        """Give the servers the plan, and connect them to the policy; see `ServerSync.connect`."""
        self._sender.get_exporter(self._bucket_bytes)
        # A server may be in an unfinished weight sync, during which the trainer or another server ended.
        active = [any(report.get("active") for report in reports) for reports in self._ask_for_reports()]
        if any(active):
            self._servers.post("/finish_weight_update", to=active)
        init_info = {"protocol": PROTOCOL, "plan": self._sender.plan.to_json()}
        self._servers.post(_INTRODUCE, [{"init_info": init_info}] * self._servers.count)
        self._check_reports()  # fails before ranks wait for workers that refuse the model
        self._join(init_info)
        self._check_reports()

    def send(self, version: int) -> dict[str, float]:
        """Send the policy's current weights; see `ServerSync.send`."""
        began = time.perf_counter()
        self._servers.post("/start_weight_update")
        self._transfer(version)
        try:
            self._check_reports()
        except WeightsRefused:
            self._servers.post("/finish_weight_update")  # the servers serve no weights until the next weight sync
            raise
        finish = {"weight_version": str(version)}
        self._servers.post("/finish_weight_update", [finish] * self._servers.count)
        reports_by_server = self._check_reports()
        for server, reports in enumerate(reports_by_server):
            for worker, report in enumerate(reports):
                if report["version"] != version:
                    raise ServerRefused(
                        f"vLLM server {server}, worker {worker} has version {report['version']} of the weights after "
                        f"version {version} was sent"
                    )
        confirm(self._servers, version)
        reports = [report for reports in reports_by_server for report in reports]
        seconds = {phase: max(report["seconds"][phase] for report in reports) for phase in reports[0]["seconds"]}
        return self._sender.timings.metrics(time.perf_counter() - began, seconds)

    @abc.abstractmethod
    def close(self) -> None:
        """Leave process groups, and free memory; see `ServerSync.close`."""

    @abc.abstractmethod
    def _join(self, init_info: Mapping[str, object]) -> None:
        """Connect the servers with the policy. They have `init_info`: the plugin's `InitInfo` without `group`."""

    @abc.abstractmethod
    def _transfer(self, version: int) -> None:
        """Send all buckets."""

    def _ask_for_reports(self) -> list[list[dict[str, Any]]]:
        """Return the reports of every server's workers, including workers that refused weights or failed."""
        try:
            answers = self._servers.post("/collective_rpc", [{"method": REPORT}] * self._servers.count)
        except ServerRefused as error:
            raise ServerRefused(f"{error}; the server has no plugin of rl_megatron: {_REMEDY}") from error
        return [answer["results"] for answer in answers]

    def _check_reports(self) -> list[list[dict[str, Any]]]:
        """Return the reports of every server's workers, after checking that none has failed.

        Raises:
            WeightsRefused: A worker refused the weights, or its model differs from the policy's.
            ServerRefused: A server has no plugin, or a worker failed in another way.
        """
        reports = self._ask_for_reports()
        workers = [
            (f"vLLM server {server}, worker {worker}", report)
            for server, of_server in enumerate(reports)
            for worker, report in enumerate(of_server)
        ]
        for worker, report in workers:
            if report.get("refused") is not None:
                raise WeightsRefused(f"{worker}: {report['refused']}")
        for worker, report in workers:
            if report["protocol"] != PROTOCOL or "version" not in report:
                what = report.get("failed") or f"its plugin speaks version {report['protocol']} of the protocol"
                raise ServerRefused(f"{worker} cannot take weights: {what}; {_REMEDY}")
            if report["failed"] is not None:
                raise ServerRefused(f"{worker} failed in the weight sync: {report['failed']}")
        return reports


class SyncOverGroup(PluginSync):
    """A sync over a process group of the policy's ranks and all workers of all servers (gloo, or NCCL on GPUs).

    One all-reduce for each bucket gathers the shards of the policy's ranks and delivers them to the workers.
    """

    def close(self) -> None:
        """Leave the process group."""
        self._sender.leave()

    def _join(self, init_info: Mapping[str, object]) -> None:
        num_ranks = len(self._servers.ranks.gather(None))
        sizes = [answer["world_size"] for answer in self._servers.get("/get_world_size?include_dp=true")]
        world_size = num_ranks + sum(sizes)
        address, port = self._servers.find_meeting_point()
        common = {"address": address, "port": port, "world_size": world_size, "timeout_seconds": self._timeout}
        offsets = [num_ranks + sum(sizes[:index]) for index in range(len(sizes))]
        bodies = [{"init_info": {**init_info, "group": {**common, "rank_offset": offset}}} for offset in offsets]
        pending = self._sender.join(address, port, world_size, self._timeout)
        try:
            self._servers.post(_INTRODUCE, bodies, meanwhile=lambda: self._servers.meet(pending))
        except ServerDied:
            self._check_reports()  # a worker that could not join reports why
            raise

    def _transfer(self, version: int) -> None:
        def broadcast() -> None:
            for handle in self._sender.broadcast():
                handle.wait()

        body = {"update_info": {"version": version}}
        self._servers.post("/update_weights", [body] * self._servers.count, meanwhile=broadcast)


class SyncInSharedMemory(PluginSync):
    """A sync through memory of rank 0 that servers on the same machine open (CUDA IPC on GPUs)."""

    def close(self) -> None:
        """Free the shared memory."""
        self._sender.release()

    def _join(self, init_info: Mapping[str, object]) -> None:
        pass  # servers need no connection: they open the memory by the handles that `_transfer` sends

    def _transfer(self, version: int) -> None:
        for keys in self._sender.list_key_groups(self._bucket_bytes):
            (handle,) = self._sender.share(keys).values()
            body = {"update_info": {"version": version, "handle": handle.to_json()}}
            self._servers.post("/update_weights", [body] * self._servers.count)


def confirm(servers: WeightServers, version: int) -> None:
    """Check that vLLM servers report the version, and make them drop the KV cache of older weights."""
    for server, answer in enumerate(servers.get("/weight_info")):
        if answer["weight_version"] != str(version):
            raise ServerRefused(
                f"vLLM server {server} reports version {answer['weight_version']} of the weights, but version "
                f"{version} was sent"
            )
    answers = servers.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
    for server, answer in enumerate(answers):
        if not answer["success"]:
            raise ServerRefused(
                f"vLLM server {server} did not drop the keys and values of older weights (/reset_prefix_cache "
                "answered success=false); pause it before the weight sync"
            )
