"""A communicator with vLLM's workers: what NCCL is asked for, by a stand-in for its library."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.weight_sync.nccl import NcclGroup

FLOAT32, SUM = 7, 0  # NCCL's numbers


@pytest.fixture
def calls(monkeypatch):
    """What the library was asked for; the GPU's streams are always done."""
    asked = []

    def join(communicator, world_size, unique_id, rank):
        communicator._obj.value = 77
        asked.append(("join", world_size, rank))
        return 0

    def all_reduce(source, target, count, dtype, operation, communicator, stream):
        asked.append(("all_reduce", count, dtype, operation))
        return 0

    names = ("ncclGetErrorString", "ncclGetUniqueId", "ncclBroadcast")
    library = SimpleNamespace(
        **{name: lambda *arguments: 0 for name in names}, ncclCommInitRank=join, ncclAllReduce=all_reduce,
        ncclCommAbort=lambda communicator: asked.append(("abort", communicator.value)),
    )  # fmt: skip
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return asked


def test_a_group_sums_one_number_as_soon_as_it_has_joined_and_is_left_once(calls):
    group = NcclGroup(bytes(128), 3, torch.device("cpu"), 5.0)
    group.joined(lambda: False)
    assert calls == [("join", 3, 0), ("all_reduce", 1, FLOAT32, SUM)], "as vLLM's workers do"
    group.close()
    group.close()
    assert calls[2:] == [("abort", 77)]
