"""The plugin for vLLM: what it needs, and what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec, WeightsRefused, fingerprint, plan_buckets
from rl_megatron.weight_sync.ipc import SharedBuffer, WeightHandle, open_handle
from rl_megatron.weight_sync.plugin_sync import SyncInSharedMemory
from rl_megatron.weight_sync.servers import ServerRefused, WeightServers
from rl_megatron.weight_sync.vllm_plugin import PROTOCOL, InitInfo, UpdateInfo, VllmReceiver, report_state
from rl_megatron.weight_sync.vllm_sink import LayerwiseSink

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
    with open_handle(WeightHandle.from_json(json.loads(json.dumps(buffer.make_handle(2, 3).to_json())))) as words:
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
            future.set_result({"results": [report_state(None)]} if path == "/collective_rpc" else {})
            return future

    servers = WeightServers([Server()], Ranks(), timeout_seconds=5)
    sender = SimpleNamespace(get_exporter=lambda size: None, plan=RefitPlan({}, 10, ()))
    with pytest.raises(ServerRefused, match=r"no weight-transfer backend; start it with --weight-transfer-config"):
        SyncInSharedMemory(sender, servers, 1 << 20, 5.0).connect()


def test_a_server_without_the_backend_says_so():
    assert report_state(None)["failed"] == "the server was started with no weight-transfer backend"
    assert report_state(object())["failed"] == "the server was started with the backend object"


# --- a model of vLLM, whose layers take their tensors when all of them have come ---


class Model(torch.nn.Module):
    """A model of one layer. `names` is what its loader returns of the names that it has loaded."""

    def __init__(self, names=set):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(3), requires_grad=False) for _ in range(2))
        self._kept, self._names = {}, names

    def load_weights(self, weights):
        came = dict(weights)
        self._kept |= came
        return self._names(came)

    def take(self):
        for name, weight in self._kept.items():
            self.get_parameter(name).copy_(weight)

    def compute_logits(self):
        return self.a + self.b


@pytest.fixture
def config(monkeypatch):
    """vLLM's configuration of the model; the parts of vLLM that load weights are stand-ins."""
    package = "vllm.model_executor.model_loader"
    parts = {name: ModuleType(name) for name in ("vllm", "vllm.model_executor", package)}
    parts[f"{package}.mtp_validation"] = SimpleNamespace(disable_mtp_completeness_check=nullcontext)
    parts[f"{package}.reload"] = SimpleNamespace(
        initialize_layerwise_reload=lambda model: None, finalize_layerwise_reload=lambda model, config: model.take()
    )
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(hf_config=SimpleNamespace())


def test_a_tensor_that_waits_for_its_layer_survives_the_buckets_after_it(config):
    model, buffer = Model(), torch.zeros(3)
    sink = LayerwiseSink(model, config)
    sink.begin()
    for name, value in (("a", 1.0), ("b", 2.0)):
        sink.load([(name, buffer.fill_(value))])
    with pytest.raises(RuntimeError, match="weights are incomplete"):
        model.compute_logits()
    sink.finish()
    assert model.compute_logits().tolist() == [3, 3, 3]


def test_a_missing_parameter_is_noticed_if_the_loader_names_what_it_has_loaded(config):
    for names, problem in ((set, "b of the server's model is missing"), (lambda came: None, None)):
        sink = LayerwiseSink(Model(names), config)
        sink.begin()
        sink.load([("a", torch.ones(3))])
        with pytest.raises(WeightsRefused, match=problem) if problem else nullcontext():
            sink.finish()


def test_weights_without_a_parameter_of_the_server_are_not_served(config):
    plan = RefitPlan({}, 10, plan_buckets([TensorSpec("a", (3,), "float32")], max_bytes=24))
    (bucket,) = plan.buckets
    shared = SharedBuffer(bucket.num_words, torch.device("cpu"))
    bucket.fingerprints(shared.words)[0] = fingerprint(bucket.tensor(shared.words, 0).fill_(1.0))
    receiver = VllmReceiver()
    receiver.model, receiver.model_config = Model(), config
    receiver.init_transfer_engine(InitInfo(PROTOCOL, plan.to_json()))
    receiver.start_weight_update()
    receiver.receive_weights(UpdateInfo(7, shared.make_handle(0, bucket.num_words).to_json()))
    receiver.finish_weight_update()
    shared.close()
    report = receiver.report()
    assert report["version"] is None and "b of the server's model is missing" in report["refused"]
