"""Send weights or an adapter to vLLM servers without our plugin: through files, which vLLM itself can reload.

Such a server verifies nothing, so only the logprob check shows whether it computes with the weights that were sent.
After a sync of all weights, the servers' checksums are compared with each other. An adapter is applied by vLLM's LoRA
layers, on servers that have loaded its base at their start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import AdapterExporter
from rl_megatron.weight_sync.plugin_sync import confirm
from rl_megatron.weight_sync.sender import SyncTimings, WeightSender
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers
from rl_megatron.weight_sync.weights_on_disk import ADAPTER_FILES, WeightDirectory

INCOMPLETE = "incomplete"  # the version that a server reports during a weight sync
ADAPTER = "adapter"  # the name by which requests choose the adapter
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_REMEDY = "start it with VLLM_SERVER_DEV_MODE=1"
_ADAPTER_REMEDY = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


class SyncFromDisk:
    """A `ServerSync` to vLLM servers that read safetensors files from a directory that they share with rank 0."""

    def __init__(self, sender: WeightSender, servers: WeightServers, bucket_bytes: int, directory: Path):
        """Prepare; nothing is sent yet. `bucket_bytes` also limits files. Servers reach `directory` by this path."""
        self._sender, self._servers, self._bucket_bytes = sender, servers, bucket_bytes
        self._directory = WeightDirectory(directory, servers.ranks, bucket_bytes)

    def connect(self) -> None:
        """Make the servers read safetensors files when they reload; see `ServerSync.connect`."""
        self._sender.get_exporter(self._bucket_bytes)
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
        return timings.metrics(time.perf_counter() - began)

    def close(self) -> None:
        """Delete the files."""
        self._directory.close()

    def _call_workers(self, method: str, keywords: Mapping[str, object]) -> None:
        self._servers.post("/collective_rpc", [{"method": method, "kwargs": keywords}] * self._servers.count)


class BaseOnDisk:
    """A directory with an adapter's base, which servers load at their start. Every rank calls every method."""

    def __init__(self, sender: WeightSender, ranks: Ranks, max_shard_bytes: int, parent: Path):
        """Prepare; nothing is written yet. Rank 0 and the servers share `parent`."""
        self._sender, self._directory = sender, WeightDirectory(parent, ranks, max_shard_bytes)
        self._path: Path | None = None

    def write(self) -> Path:
        """Return the directory, which the first call writes; the base never changes. Collective."""
        if self._path is None:
            self._path = self._directory.write("base", self._sender.make_base_exporter())
        return self._path

    def close(self) -> None:
        """Delete the files."""
        self._path = None
        self._directory.close()


class AdapterSync:
    """A `ServerSync` to vLLM servers that have the base, and read each version of the adapter from a directory.

    No request may be unfinished while an adapter is sent: vLLM would finish it with the previous adapter.
    """

    def __init__(self, sender: WeightSender, servers: WeightServers, directory: Path):
        """Prepare; nothing is sent yet. Servers reach `directory` by this path."""
        self._sender, self._servers = sender, servers
        self._directory = WeightDirectory(directory, servers.ranks, sys.maxsize)  # one file, as adapters have
        self._exporter: AdapterExporter | None = None

    def connect(self) -> None:
        """Prepare the exporter; see `ServerSync.connect`. The servers need no preparation."""
        self._exporter = self._exporter or self._sender.make_adapter_exporter()

    def send(self, version: int) -> dict[str, float]:
        """Write the adapter, and let all servers read it; see `ServerSync.send`."""
        assert self._exporter is not None, "the engine connects first"
        began = time.perf_counter()
        self._sender.timings = timings = SyncTimings(self._exporter.plan.num_bytes)
        directory = self._directory.write(f"adapter-{version}", self._exporter, ADAPTER_FILES)
        timings.seconds["fill"] = time.perf_counter() - began
        set_version(self._servers, INCOMPLETE)
        loading = time.perf_counter()
        self._load(directory)
        timings.ended = time.perf_counter()
        timings.seconds["transfer"] = timings.ended - loading
        set_version(self._servers, str(version))
        confirm(self._servers, version)
        self._directory.keep_only(directory)
        return timings.metrics(time.perf_counter() - began)

    def _load(self, directory: Path) -> None:
        """Make all servers replace their adapter by the one in `directory`."""
        models = self._servers.get("/v1/models")
        have_one = [any(model["id"] == ADAPTER for model in answer["data"]) for answer in models]
        count = self._servers.count
        try:
            self._servers.post(_UNLOAD, [{"lora_name": ADAPTER}] * count, to=have_one)
            self._servers.post(_LOAD, [{"lora_name": ADAPTER, "lora_path": str(directory)}] * count)
        except ServerRefused as error:
            raise ServerRefused(f"{error}; {_ADAPTER_REMEDY}") from error

    def close(self) -> None:
        """Delete the files."""
        self._directory.close()


def set_version(servers: WeightServers, version: str) -> None:
    """Make all servers report `version` for the tokens that they generate from now on."""
    servers.post("/update_weight_version", [{"new_version": version}] * servers.count)


def compare_checksums(servers: WeightServers) -> None:
    """Compare the servers' own checksums of their parameters, and raise WeightsRefused if two servers differ."""
    if servers.count < 2:
        return
    answers = servers.post("/weight_checker", [{"action": "checksum"}] * servers.count)
    first: dict[str, str] = answers[0]["checksums"]
    for number, answer in enumerate(answers[1:], start=1):
        checksums = answer["checksums"]
        if checksums.keys() != first.keys():
            continue  # these servers shard the model differently
        wrong = next((name for name in sorted(first) if checksums[name] != first[name]), None)
        if wrong is not None:
            raise WeightsRefused(
                f"{wrong} differs between vLLM servers 0 and {number} after the same weights were sent"
            )
