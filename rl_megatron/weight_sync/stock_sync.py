"""Send weights to vLLM servers without our plugin, in vLLM's own ways.

Such a server verifies nothing, so only the logprob check shows whether it computes with the weights that were sent. The
servers' own checksums are compared with each other.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.plugin_sync import confirm
from rl_megatron.weight_sync.sender import SyncTimings, WeightSender
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers
from rl_megatron.weight_sync.weights_on_disk import WeightDirectory

INCOMPLETE = "incomplete"  # the version that a server reports during a weight sync
_REMEDY = "start it with VLLM_SERVER_DEV_MODE=1"


class SyncFromDisk:
    """A `ServerSync` to vLLM servers that read safetensors files from a directory that they share with rank 0."""

    def __init__(self, sender: WeightSender, servers: WeightServers, bucket_bytes: int, directory: Path):
        """Keep what is needed.

        Args:
            sender: The policy's sender.
            servers: The servers.
            bucket_bytes: The most bytes of weights in a bucket, and in a file.
            directory: The directory that servers reach under the same path.
        """
        self._sender, self._servers, self._bucket_bytes = sender, servers, bucket_bytes
        self._directory = WeightDirectory(directory, servers.ranks, bucket_bytes)

    def connect(self) -> None:
        """Make the servers read safetensors files when they reload; see `ServerSync.connect`."""
        self._sender.exporter(self._bucket_bytes)
        overrides = {"overrides": {"load_config": {"load_format": "safetensors"}}}
        try:
            self._call_workers("update_config", overrides)
        except ServerRefused as error:
            raise ServerRefused(f"{error}; the server does not reload weights: {_REMEDY}") from error

    def send(self, version: int) -> dict[str, float]:
        """Write the weights, and let all servers reload; see `ServerSync.send`."""
        began = time.perf_counter()
        self._sender.timings = timings = SyncTimings(self._sender.plan.num_bytes)
        directory = self._directory.write(f"weights-{version}", self._sender)
        timings.seconds["fill"] = time.perf_counter() - began
        set_version(self._servers, INCOMPLETE)
        reloading = time.perf_counter()
        self._call_workers("reload_weights", {"weights_path": str(directory)})
        timings.ended = time.perf_counter()
        timings.seconds["transfer"] = timings.ended - reloading
        compare_checksums(self._servers)
        set_version(self._servers, str(version))
        confirm(self._servers, version)
        self._directory.keep_only(directory)
        return timings.metrics_of_sync(time.perf_counter() - began, {})

    def close(self) -> None:
        """Delete the files."""
        self._directory.close()

    def _call_workers(self, method: str, keywords: dict[str, Any]) -> None:
        self._servers.post("/collective_rpc", [{"method": method, "kwargs": keywords}] * self._servers.count)


def set_version(servers: WeightServers, version: str) -> None:
    """Let all servers report `version` for the tokens that they generate from now on."""
    servers.post("/update_weight_version", [{"new_version": version}] * servers.count)


def compare_checksums(servers: WeightServers) -> None:
    """Compare the servers' own checksums of their parameters, if there are several servers.

    Raises:
        WeightsRefused: The same part of a parameter has different values on two servers.
    """
    if servers.count < 2:
        return
    answers = servers.post("/weight_checker", [{"action": "checksum"}] * servers.count)
    first: dict[str, str] = answers[0]["checksums"]
    for number, answer in enumerate(answers[1:], start=1):
        checksums = answer["checksums"]
        if checksums.keys() != first.keys():
            continue  # servers that divide the model otherwise
        wrong = next((name for name in sorted(first) if checksums[name] != first[name]), None)
        if wrong is not None:
            raise WeightsRefused(
                f"{wrong} differs between vLLM servers 0 and {number} after the same weights were sent"
            )
