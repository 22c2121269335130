"""The plugin for vLLM: what it needs, and what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.weight_sync.ipc import SharedBuffer, WeightHandle, opened
from rl_megatron.weight_sync.plan import RefitPlan, TensorSpec, plan_buckets
from rl_megatron.weight_sync.plugin_sync import SyncInSharedMemory
from rl_megatron.weight_sync.policy_ranks import PolicyRanks
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers
from rl_megatron.weight_sync.vllm_plugin import PROTOCOL, InitInfo, VllmReceiver, report_of

# vLLM's environment has other packages than ours, so the plugin may need only torch and the standard library.
BLOCKED = """
import sys

ALLOWED = {"torch", "torchgen", "functorch", "rl_megatron", *sys.stdlib_module_names}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            blocked.add(name.partition(".")[0])
            raise ImportError(f"{name} is not in vLLM's environment")

blocked = set()
import torch, torch.distributed, torch.multiprocessing.reductions
sys.meta_path.insert(0, Blocker())
for name in [name for name in sys.modules if name.partition(".")[0] in ("numpy", "yaml")]:
    del sys.modules[name]
import rl_megatron.weight_sync.vllm_plugin
print(sorted(blocked))
"""


def test_the_plugin_needs_only_torch_and_the_standard_library():
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_plan_survives_json():
    specs = [TensorSpec("a", (4, 3), "bfloat16"), TensorSpec("b", (5,), "float32")]
    plan = RefitPlan({"model_type": "llama"}, 10, plan_buckets(specs, max_bytes=24))
    assert RefitPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_handle_survives_json():
    buffer = SharedBuffer(4, torch.device("cpu"))
    buffer.words.copy_(torch.arange(4))
    with opened(WeightHandle.from_json(json.loads(json.dumps(buffer.handle(2, 3).to_json())))) as words:
        assert words.tolist() == [0, 1, 2]
    del words
    buffer.close()
    # What torch's reduce_tensor makes of a tensor on a GPU.
    arguments = (torch.Tensor, torch.Size([4]), (1,), 0, torch.UntypedStorage, torch.int64, 3, b"\0\xff", 32, 0, False)
    handle = WeightHandle(1, 4, None, (*arguments, b"\1", 5, b"", True), "uuid")
    assert WeightHandle.from_json(json.loads(json.dumps(handle.to_json()))) == handle


def test_a_trainer_of_another_protocol_is_told_what_to_install():
    receiver = VllmReceiver()
    receiver.init_transfer_engine(InitInfo(PROTOCOL + 1, {}))
    assert "install the trainer's version into the server's environment" in receiver.report()["failed"]


def test_a_trainer_tells_a_server_without_the_backend_how_to_start():
    class Server:
        name = "vLLM server 0"

        def request(self, method, path, body=None, timeout_seconds=None):
            future = Future()
            future.set_result({"results": [report_of(None)]} if path == "/collective_rpc" else {})
            return future

    servers = WeightServers([Server()], PolicyRanks(0, 1, torch.device("cpu")), timeout_seconds=5)
    sender = SimpleNamespace(exporter=lambda size: None, plan=RefitPlan({}, 10, ()))
    with pytest.raises(ServerRefused, match=r"no weight-transfer backend; start it with --weight-transfer-config"):
        SyncInSharedMemory(sender, servers, 1 << 20, 5.0).connect()


def test_a_server_without_the_backend_says_so():
    assert report_of(None)["failed"] == "the server was started with no weight-transfer backend"
    assert report_of(object())["failed"] == "the server was started with the backend object"
