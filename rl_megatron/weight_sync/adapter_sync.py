"""Send the adapter of a policy to vLLM servers, which have its base from the start.

A server applies the adapter itself, in vLLM's LoRA layers. It verifies nothing, so only the logprob check shows whether
it computes with what was sent.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.exporter import AdapterExporter
from rl_megatron.weight_sync.plugin_sync import confirm
from rl_megatron.weight_sync.sender import SyncTimings, WeightSender
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers
from rl_megatron.weight_sync.stock_sync import INCOMPLETE, set_version
from rl_megatron.weight_sync.weights_on_disk import ADAPTER_FILES, WeightDirectory

ADAPTER = "adapter"  # the name by which requests choose the adapter
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_REMEDY = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


class BaseOnDisk:
    """The base of a policy's adapter in a directory, from which servers start. Every rank calls every method."""

    def __init__(self, sender: WeightSender, ranks: Ranks, max_shard_bytes: int, parent: Path):
        """Keep what is needed; nothing is written yet.

        Args:
            sender: The policy's sender.
            ranks: The exchange among the policy's ranks.
            max_shard_bytes: The most bytes of weights in a file.
            parent: A directory that rank 0 and the servers share.
        """
        self._sender, self._directory = sender, WeightDirectory(parent, ranks, max_shard_bytes)
        self._path: Path | None = None

    def path(self) -> Path:
        """Return the directory, which the first call writes; the base never changes. Collective.

        Raises:
            WeightsRefused: It cannot be written.
        """
        if self._path is None:
            self._path = self._directory.write("base", self._sender.exporter_of_base())
        return self._path

    def close(self) -> None:
        """Delete the files."""
        self._path = None
        self._directory.close()


class SyncOfAdapter:
    """A `ServerSync` to vLLM servers that have the base, and read each version of the adapter from a directory.

    No request may be unfinished while an adapter is sent: vLLM would finish it with the one before.
    """

    def __init__(self, sender: WeightSender, servers: WeightServers, directory: Path):
        """Keep what is needed.

        Args:
            sender: The policy's sender.
            servers: The servers.
            directory: The directory that servers reach under the same path.
        """
        self._sender, self._servers = sender, servers
        self._directory = WeightDirectory(directory, servers.ranks, sys.maxsize)  # one file, as adapters have
        self._exporter: AdapterExporter | None = None

    def connect(self) -> None:
        """Prepare the exporter; see `ServerSync.connect`. The servers need nothing."""
        self._exporter = self._exporter or self._sender.exporter_of_adapters()

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
        return timings.metrics_of_sync(time.perf_counter() - began, {})

    def _load(self, directory: Path) -> None:
        """Let all servers replace the adapter by the one in a directory.

        Raises:
            ServerRefused: A server takes no adapters, or not this one.
        """
        models = self._servers.get("/v1/models")
        have_one = [any(model["id"] == ADAPTER for model in answer["data"]) for answer in models]
        count = self._servers.count
        try:
            self._servers.post(_UNLOAD, [{"lora_name": ADAPTER}] * count, to=have_one)
            self._servers.post(_LOAD, [{"lora_name": ADAPTER, "lora_path": str(directory)}] * count)
        except ServerRefused as error:
            raise ServerRefused(f"{error}; {_REMEDY}") from error

    def close(self) -> None:
        """Delete the files."""
        self._directory.close()
