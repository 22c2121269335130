"""Traces of steps: one clock for all processes, and spans that overlap are on tracks of their own."""

import gzip
import json

import pytest

from rl_megatron import log
from rl_megatron.config.loggers import ProfileConfig
from rl_megatron.observability.step_profiler import StepProfiler, convert_spans
from rl_megatron.timing import PhaseTimer, Span, record_span
from tests.full_disk import files_of_at_most


def test_spans_that_overlap_are_on_tracks_of_their_own():
    spans = [
        Span("server", "a", 0, 10),
        Span("server", "b", 5, 15),
        Span("server", "c", 6, 9),
        Span("rank", "d", 5, 15),
    ]
    tracks = {event["name"]: event["tid"] for event in convert_spans(spans)}
    assert tracks == {"a": "phases", "b": "phases 2", "c": "phases", "d": "phases"}


def take_steps(profiles):
    """Take three steps, of which the second is profiled."""
    timer = PhaseTimer()
    profiler = StepProfiler(ProfileConfig(steps=(2,)), profiles, timer, 0, is_cuda=False)
    for step in (1, 2, 3):
        profiler.begin(step)
        with timer.phase("generate"):
            record_span("engine 0", "generate", 0)
        with timer.phase("train"), timer.phase("forward"):
            pass
        profiler.end()


def repeat_a_step(profiles):
    """Begin a step that fails, and take it again, as after a roll-back."""
    for ends in (False, True):
        profiler = StepProfiler(ProfileConfig(steps=(2,)), profiles, PhaseTimer(), 0, is_cuda=False)
        profiler.begin(2)
        if ends:
            profiler.end()
        profiler.abandon()


def test_a_profiled_step_that_fails_can_be_taken_again(tmp_path, ranks):
    ranks.run(1, repeat_a_step, tmp_path / "profiles")
    assert (tmp_path / "profiles" / "step-000002.json.gz").is_file()


def take_steps_on_a_full_disk(profiles):
    with files_of_at_most(10), pytest.MonkeyPatch.context() as patched:
        warnings = []
        patched.setattr(log.LOGGER, "warning", lambda text, *values: warnings.append(text % values))
        take_steps(profiles)
    return warnings


def test_a_profile_that_does_not_fit_is_said_and_training_goes_on(tmp_path, ranks):
    (warnings,) = ranks.run(1, take_steps_on_a_full_disk, tmp_path / "profiles")
    assert warnings and all("the profile of step 2 cannot be written" in warning for warning in warnings)


def test_a_step_that_is_chosen_is_written_with_all_its_phases(tmp_path, ranks):
    ranks.run(1, take_steps, tmp_path / "profiles")
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == [
        "step-000002-rank-0.json", "step-000002.json.gz",
    ]  # fmt: skip
    trace = json.loads(gzip.decompress((tmp_path / "profiles" / "step-000002.json.gz").read_bytes()))
    processes = {
        event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"
    }
    phases = [(processes[e["pid"]], e["name"]) for e in trace["traceEvents"] if e.get("cat") == "phase"]
    assert sorted(phases) == [
        ("engine 0", "generate"), ("rank 0", "forward"), ("rank 0", "generate"), ("rank 0", "train"),
    ]  # fmt: skip
    spans = {e["name"]: e for e in trace["traceEvents"] if e.get("cat") == "phase" and processes[e["pid"]] == "rank 0"}
    train, forward = spans["train"], spans["forward"]
    assert train["ts"] <= forward["ts"] and forward["ts"] + forward["dur"] <= train["ts"] + train["dur"]
