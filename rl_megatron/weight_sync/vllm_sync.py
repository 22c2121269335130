"""Choose how weights are sent to vLLM servers (`generation.refit`), and how servers are started for this."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.weight_sync.plugin_sync import SyncInSharedMemory, SyncOverGroup
from rl_megatron.weight_sync.sender import WeightSender
from rl_megatron.weight_sync.servers import ServerSync, WeightServers
from rl_megatron.weight_sync.stock_sync import AdapterSync, SyncFromDisk
from rl_megatron.weight_sync.vllm_plugin import BACKEND


def make_vllm_sync(
    refit: str,
    sender: WeightSender,
    servers: WeightServers,
    *,
    bucket_bytes: int,
    timeout_seconds: float,
    directory: Path,
) -> ServerSync:
    """Return the `ServerSync` to vLLM servers for this value of `generation.refit`. Collective.

    `timeout_seconds` limits joining a process group and each collective. Rank 0 and the servers share `directory`.
    """
    if refit == "adapter":
        return AdapterSync(sender, servers, directory)
    if refit == "disk":
        return SyncFromDisk(sender, servers, bucket_bytes, directory)
    with_plugin = SyncInSharedMemory if refit == "shared_memory" else SyncOverGroup
    return with_plugin(sender, servers, bucket_bytes, timeout_seconds)


def make_transfer_config(refit: str) -> dict[str, str] | None:
    """Return the `--weight-transfer-config` that a server needs for `generation.refit`, or None if it needs none."""
    return None if refit in ("disk", "adapter") else {"backend": BACKEND}


def make_transfer_environment(refit: str) -> dict[str, str]:
    """Return the environment variables that a server needs for this value of `generation.refit`."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if refit == "adapter" else {}
