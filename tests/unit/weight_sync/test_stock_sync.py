"""Weight syncs without our plugin: what vLLM servers are asked, and in which order."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec, WeightsRefused, plan_buckets
from rl_megatron.weight_sync.sender import SyncTimings
from rl_megatron.weight_sync.servers import WeightServers
from rl_megatron.weight_sync.vllm_sync import make_transfer_config, make_transfer_environment, make_vllm_sync

SPECS = [TensorSpec("a", (4, 3), "bfloat16"), TensorSpec("b", (5,), "float32"), TensorSpec("c", (2, 2), "bfloat16")]
FINISHING = ["/weight_checker", "/weight_info", "/reset_prefix_cache?reset_running_requests=true&reset_external=true"]


class Server:
    """Stands in for a vLLM server of two workers, and keeps what it is asked."""

    def __init__(self, name: str, checksum: str = "same"):
        self.name, self._checksum, self.asked = name, checksum, []
        self.version, self.models = "", ["policy"]

    def request(self, method, path, body=None, timeout_seconds=None) -> Future:
        self.asked.append((path, body))
        body = body or {}
        self.version = body.get("weight_version") or body.get("new_version") or self.version
        answers = {
            "/weight_checker": {"checksums": {"dp0:pp0:tp0:a": self._checksum}},
            "/v1/models": {"data": [{"id": name} for name in self.models]},
            "/weight_info": {"weight_version": self.version},
            FINISHING[-1]: {"success": True},
        }
        future: Future = Future()
        future.set_result(answers.get(path))
        return future


class Sender:
    """Stands in for a `WeightSender`, whose tensors are filled with their numbers."""

    plan = RefitPlan({"model_type": "llama"}, 10, plan_buckets(SPECS, max_bytes=24))

    def __init__(self):
        self.timings = SyncTimings()

    def get_exporter(self, max_bytes):
        return None

    def make_adapter_exporter(self):
        return self

    def stream(self):
        for number, spec in enumerate(SPECS):
            yield spec.name, torch.full(spec.shape, number, dtype=spec.torch_dtype)


def sync_of(refit: str, servers: list[Server], directory: Path | None = None, sender: Sender | None = None):
    together = WeightServers(servers, Ranks(), 10)
    arguments = {"bucket_bytes": 24, "timeout_seconds": 5.0, "directory": directory or Path()}
    return make_vllm_sync(refit, sender or Sender(), together, **arguments)  # pyright: ignore[reportArgumentType]


def paths(server: Server) -> list[str]:
    return [path for path, _ in server.asked]


def test_servers_reload_files_and_report_the_version_only_afterwards(tmp_path):
    servers = [Server("0"), Server("1")]
    sync = sync_of("disk", servers, tmp_path)
    sync.connect()
    metrics = sync.send(7)
    for server in servers:
        updates = ["/collective_rpc", "/update_weight_version", "/collective_rpc"]
        assert paths(server) == [*updates, "/weight_checker", "/update_weight_version", *FINISHING[1:]]
        configure, reported, reload = (body for _, body in server.asked[:3])
        assert configure["kwargs"] == {"overrides": {"load_config": {"load_format": "safetensors"}}}
        assert reported == {"new_version": "incomplete"}
        assert reload["method"] == "reload_weights" and Path(reload["kwargs"]["weights_path"]).name == "weights-7"
        assert server.version == "7"
    assert metrics["refit_bytes"] == Sender.plan.num_bytes
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_replaces_the_one_before_on_servers_that_have_one(tmp_path):
    servers = [Server("0"), Server("1")]
    sync = sync_of("adapter", servers, tmp_path)
    servers[1].models = ["policy", "adapter"]  # it was not started again, as the other one was
    sync.connect()
    metrics = sync.send(7)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    begin = ["/update_weight_version", "/v1/models"]
    assert paths(servers[0]) == [*begin, load, "/update_weight_version", *FINISHING[1:]]
    assert paths(servers[1]) == [*begin, unload, load, "/update_weight_version", *FINISHING[1:]]
    for server in servers:
        body = dict(server.asked)[load]
        assert body["lora_name"] == "adapter" and Path(body["lora_path"]).name == "adapter-7" and server.version == "7"
        versions = [body["new_version"] for path, body in server.asked if path == "/update_weight_version"]
        assert versions == ["incomplete", "7"], "no server reports a version before it has the adapter"
    assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
    assert metrics["refit_bytes"] == Sender.plan.num_bytes
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_servers_whose_parameters_differ_are_refused(tmp_path):
    servers = [Server("0"), Server("1", "other")]
    sync = sync_of("disk", servers, tmp_path)
    sync.connect()
    with pytest.raises(WeightsRefused, match="dp0:pp0:tp0:a differs between vLLM servers 0 and 1"):
        sync.send(7)
    assert servers[1].version == "incomplete"


def test_stock_servers_are_started_without_our_backend():
    assert make_transfer_config("disk") is None and make_transfer_config("adapter") is None
    assert make_transfer_environment("disk") == {}
