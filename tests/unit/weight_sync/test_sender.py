"""The trainer's side of a weight sync, with a model and a group that are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_megatron.weight_sync import sender
from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec, plan_buckets
from rl_megatron.weight_sync.sender import WeightSender

PLAN = RefitPlan({}, 10, plan_buckets([TensorSpec(name, (4,), "float32") for name in "abcde"], max_bytes=16))


class Exporter:
    """An exporter that fills bucket n with the number n."""

    plan = PLAN

    def __init__(self, model, max_bytes): ...

    def allocate_buffer(self):
        return torch.zeros(max(bucket.num_words for bucket in PLAN.buckets), dtype=torch.int64)

    def fill(self, index, buffer):
        return buffer[: PLAN.buckets[index].num_words].fill_(index)


class LateGroup:
    """A group that reads a bucket only when its sum is waited for."""

    def __init__(self):
        self.arrived = []

    def all_reduce(self, buffer):
        return SimpleNamespace(wait=lambda: self.arrived.append(buffer.tolist()))


@pytest.fixture
def joined(monkeypatch):
    """A sender of one rank, and the group that it has joined."""
    group = LateGroup()
    monkeypatch.setattr(sender, "PendingGroup", lambda *arguments: SimpleNamespace(group=lambda: group))
    topology = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    model = SimpleNamespace(topology=topology, frozen_adapters=(), gather_parameters=lambda: None)
    made = WeightSender(model, Exporter)  # pyright: ignore[reportArgumentType]
    made.join("127.0.0.1", 1234, 2, 5.0)
    return made, group


def test_a_buffer_is_filled_again_only_after_its_bucket_was_sent(joined):
    made, group = joined
    for handle in made.broadcast():
        handle.wait()
    assert group.arrived == [[index] * bucket.num_words for index, bucket in enumerate(PLAN.buckets)]
    assert len(group.arrived) == 5
