"""Decoding steps run once, are then recorded, and are replayed until a tensor moves. A recorder stands for CUDA's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.generation.decode_graphs import DecodeGraphs, graphs_for


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
    assert graphs_for(replica, mode) is None
    said = [text for text in logged if "CUDA graphs" in text]
    assert len(said) == bool(message) and all(str(message) in text for text in said)
