"""A policy without a model, and a weight sync without weights, for tests of engines on servers."""

from types import SimpleNamespace

import torch

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import Bucket, RefitPlan, TensorSpec
from tests.fake_vllm import VOCAB_SIZE

PLAN = RefitPlan({"model_type": "fake", "dtype": "float32"}, VOCAB_SIZE, (Bucket((TensorSpec("w", (4,), "float32"),)),))


class StubPolicy:
    """What `ServerEngine` needs of a policy."""

    def __init__(self, rank=0, world_size=1):
        ranks = Ranks(rank, world_size, torch.device("cpu"))
        self.topology = SimpleNamespace(rank=rank, world_size=world_size, device=ranks.device, ranks=ranks)
        self.model = SimpleNamespace(require_head=lambda head, what: None)
        self.model_config = SimpleNamespace(max_sequence_length=64)
        self.vocab_size = VOCAB_SIZE
        self.weight_version, self.weights = 1, SimpleNamespace(plan=PLAN)
        self.offloads: list[str] = []

    def offload_before_refit(self):
        self.offloads.append("before")

    def offload_after_refit(self):
        self.offloads.append("after")

    def prepare_weights_for_ipc(self, max_bytes=None):
        return [["w"]]


class StubSync:
    """Tells fake servers their version, by a path that the fake servers know."""

    def __init__(self, servers, log):
        self.servers, self.log = servers, log

    def connect(self):
        self.log.append("connect")

    def send(self, version):
        self.log.append(f"send {version}")
        self.servers.post("/finish_weight_update", [{"weight_version": str(version)}] * self.servers.count)
        return {"refit_bytes": 16.0, "refit_seconds": 0.1}

    def close(self):
        self.log.append("close")
