"""Decoding steps run once, are then recorded, and are replayed until a tensor moves. A recorder stands for CUDA's."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rl_megatron.generation.decode_graphs import CudaRecorder, DecodeGraphs, make_graphs


class Recorder:
    """It stands for the capture of a step: it does not run the step, and a replay is noted."""

    def __init__(self, fails: bool = False):
        self.events: list[str] = []
        self._fails = fails

    def __call__(self, step):
        self.events.append("record")
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return SimpleNamespace(replay=lambda: self.events.append("replay"))

    def step(self):
        self.events.append("run")


def events(recorder, graphs, *keys):
    for key in keys:
        graphs.run(key, recorder.step)
    found, recorder.events = recorder.events, []
    return found


def test_a_step_runs_once_is_recorded_and_is_then_replayed():
    graphs = DecodeGraphs(recorder := Recorder())
    assert events(recorder, graphs, 8) == ["run"]
    assert events(recorder, graphs, 8) == ["record", "replay"]
    assert events(recorder, graphs, 8, 8) == ["replay", "replay"]


def test_other_keys_have_graphs_of_their_own():
    graphs = DecodeGraphs(recorder := Recorder())
    assert events(recorder, graphs, 8, 8, 16, 8) == ["run", "record", "replay", "run", "replay"]


def test_graphs_are_dropped_when_a_tensor_moves_and_not_when_it_changes():
    graphs, weight, cache = DecodeGraphs(recorder := Recorder()), torch.zeros(4), torch.zeros(8)
    graphs.follow([weight, cache])
    events(recorder, graphs, 8, 8)
    weight += 1
    graphs.follow([weight, cache])
    assert events(recorder, graphs, 8) == ["replay"]
    graphs.follow([weight, torch.zeros(16)])
    assert events(recorder, graphs, 8, 8) == ["run", "record", "replay"]


def test_the_graph_that_was_not_used_for_longest_is_dropped():
    graphs = DecodeGraphs(recorder := Recorder(), most_graphs=2)
    events(recorder, graphs, 8, 8, 16, 16, 8, 24)
    assert events(recorder, graphs, 8) == ["replay"]
    assert events(recorder, graphs, 16) == ["run"]


def test_steps_run_as_they_are_after_one_could_not_be_recorded(logged):
    graphs = DecodeGraphs(recorder := Recorder(fails=True))
    assert events(recorder, graphs, 8, 8, 8, 16, 16) == ["run", "record", "run", "run", "run", "run"]
    assert [message for message in logged if "not permitted when stream is capturing" in message]


class FakeCuda:
    """It stands for torch's captures: how many graphs use a pool, and in which pools one allocates for a capture."""

    def __init__(self, monkeypatch):
        self.users: dict[int, int] = {}
        self.capturing: set[int] = set()
        self.invalidates = False
        fake = self

        class CUDAGraph:
            def capture_begin(self, pool, capture_error_mode):
                if fake.users.get(pool) == 0:
                    raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
                fake.capturing.add(pool)
                self.pool = pool

            def capture_end(self):
                if fake.invalidates:  # as torch 2.11, which then forgets the pool
                    raise RuntimeError("operation failed due to a previous error during capture")
                fake.capturing.remove(self.pool)
                fake.users[self.pool] = fake.users.get(self.pool, 0) + 1
                weakref.finalize(self, fake.release, self.pool)

            def replay(self):
                pass

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "CUDAGraph": CUDAGraph,
            "graph_pool_handle": lambda: 7,
            "current_stream": lambda: stream,
            "current_device": lambda: 0,
            "stream": lambda stream: nullcontext(),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        end = lambda device, pool: self.capturing.remove(pool)  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        self.record = CudaRecorder(cast(Any, stream))

    def release(self, pool):
        self.users[pool] -= 1


def test_a_step_is_captured_after_all_graphs_were_dropped(monkeypatch, logged):
    cuda = FakeCuda(monkeypatch)
    graphs = DecodeGraphs(cuda.record)
    for capacity in (32, 64, 96):
        graphs.follow([torch.zeros(capacity)])
        for _ in range(3):
            graphs.run(8, lambda: None)
    assert not [message for message in logged if "CUDA graphs" in message]
    assert cuda.users == {7: 1}


def test_graphs_are_freed_after_a_step_could_not_be_captured(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    graphs = DecodeGraphs(cuda.record)
    del cuda.record
    for key in (8, 8, 16, 16):
        graphs.run(key, lambda: None)
    assert cuda.users == {7: 2}
    cuda.invalidates = True
    for key in (24, 24, 8):
        graphs.run(key, lambda: None)
    assert cuda.users == {7: 0}


@pytest.mark.parametrize("invalidates", [False, True])
def test_a_capture_that_fails_ends_and_reports_what_the_step_raised(monkeypatch, invalidates):
    def step():
        raise RuntimeError("the step waits for the GPU")

    cuda = FakeCuda(monkeypatch)
    cuda.invalidates = invalidates
    with pytest.raises(RuntimeError, match="the step waits for the GPU"):
        cuda.record(step)
    assert not cuda.capturing


@pytest.mark.parametrize(
    ("mode", "device", "reason", "message"),
    [
        ("off", "cuda", None, None),
        ("auto", "cpu", None, None),
        ("auto", "cuda", "a step of a model with experts waits for the GPU", "without CUDA graphs: a step of a model"),
    ],
)
def test_steps_that_cannot_be_captured_are_left_as_they_are(logged, mode, device, reason, message):
    replica: Any = SimpleNamespace(device=torch.device(device), why_not_captured=reason)
    assert make_graphs(replica, mode) is None
    said = [text for text in logged if "CUDA graphs" in text]
    assert len(said) == bool(message) and all(str(message) in text for text in said)
