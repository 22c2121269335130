"""The progress of a run: what fits a terminal of 80 columns, what moves, and what a file gets instead."""

import io
import itertools
import logging
import re
import sys

import pytest
from rich.console import Console

from rl_megatron import log
from rl_megatron.algorithms import ALGORITHMS
from rl_megatron.config.metrics import METRICS
from rl_megatron.observability.progress import ConsoleProgress

METRICS_OF = {
    "reward": {"loss": -1.179e-13, "reward": 0.4123, "grad_norm": 12.345, "lr": 2.982e-05, "gate_mean": 1e-7},
    "loss": {"loss": 1.811, "grad_norm": 1.436, "lr": 0.0002037, "packing_efficiency": 0.5},
}
COUNTS = {"evaluate": (96, 256, "evaluating 96/256"), "generate": (1000, 1024, "generating 1000/1024")}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shown(clock):
    """`shown(width, terminal)`: a display and the text file that it writes to; ended after the test."""
    displays = []

    def make(width=80, terminal=True):
        file = io.StringIO()
        console = Console(file=file, width=width, force_terminal=terminal, color_system=None, soft_wrap=True)
        displays.append(ConsoleProgress(console, clock))
        return displays[-1], file

    yield make
    for display in displays:
        display.end_stage()


def begun(display, clock, stage, metric, step=1234, steps=5000):
    """Take `step` of `steps` steps in 5 hours."""
    display.begin_stage(stage, 0, steps, metric)
    clock.seconds += 5 * 3600 + 61
    display.show(step, METRICS_OF[metric], "train")


def test_every_algorithm_names_a_metric_that_its_steps_have():
    assert {name: algorithm.progress_metric for name, algorithm in ALGORITHMS.items()} == {
        "pretrain": "loss", "sft": "loss", "dpo": "loss", "kto": "loss", "online_dpo": "reward", "reward_model": "loss",
        "grpo": "reward", "ppo": "reward", "distillation": "loss", "on_policy_distillation": "reward",
    }  # fmt: skip
    assert {algorithm.progress_metric for algorithm in ALGORITHMS.values()} <= set(METRICS)


def test_the_line_has_step_times_and_metric_uncut_at_every_width_in_every_phase(shown, clock):
    """The shortest and the longest name of an algorithm, with a loss and with a reward."""
    wrong = []
    for stage, metric in (
        ("sft", "loss"),
        ("ppo", "reward"),
        ("reward_model", "loss"),
        ("on_policy_distillation", "reward"),
    ):
        for phase, width in itertools.product([None, "train", *COUNTS], [70, 80, 100, 132, 250]):
            display, _ = shown()
            begun(display, clock, stage, metric)
            display.show_phase(phase)
            count = ""
            if phase in COUNTS:
                log.report_progress(*COUNTS[phase][:2], "sequences", "token 37/64")
                count = COUNTS[phase][2] if width >= 80 else ""
            clock.seconds += 1
            line = display.render_line(width).plain
            value = {"reward": "reward 0.4123", "loss": "loss 1.811"}[metric]
            begins = line.startswith(f"{stage if width >= 100 else stage[:14]} 1234/5000 ")
            has = all(text in line for text in (" 5:01:02 ETA 15:18:38", f" {value}", count))
            if not begins or not has or "…" in line or len(line) > width:
                wrong.append((stage, phase, width, line))
            display.end_stage()
    assert not wrong


@pytest.mark.parametrize("width", [20, 40])
def test_a_narrow_terminal_cuts_the_name_of_the_stage_first(shown, clock, width):
    display, _ = shown()
    begun(display, clock, "a_stage_with_a_long_name", "loss", step=4, steps=9)
    line = display.render_line(width).plain
    assert " 4/9 " in line and "5:01:01 ETA 6:16:" in line and "loss 1.811" in line


@pytest.mark.parametrize(("width", "kept"), [(66, 14), (71, 14), (75, 18), (90, 24)])
def test_a_long_name_of_a_stage_makes_room_for_the_activity(shown, clock, width, kept):
    display, _ = shown()
    begun(display, clock, "a_stage_with_a_long_name", "loss", step=4, steps=9)
    display.show_phase("generate")
    log.report_progress(3, 8, "sequences")
    clock.seconds += 1
    line = display.render_line(width).plain
    assert line.startswith(f"{'a_stage_with_a_long_name'[:kept]} 4/9 ") and line.endswith("generating 3/8")
    assert len(line) <= width


def test_the_bar_and_more_metrics_fill_a_wider_terminal(shown, clock):
    display, _ = shown()
    begun(display, clock, "grpo", "reward", step=20, steps=80)
    narrow, wide = (display.render_line(width).plain for width in (80, 200))
    assert 6 <= narrow.count("━") + narrow.count("─") < wide.count("━") + wide.count("─") == 30
    assert wide.count("━") == 7, "20 of 80 steps"
    assert "grad_norm" not in narrow and "grad_norm 12.35" in wide and "lr 2.982e-05" in wide


def test_the_line_does_not_change_its_length_when_an_activity_ends(shown, clock):
    display, _ = shown()
    begun(display, clock, "grpo", "reward")
    quiet = display.render_line(80).plain
    display.show_phase("generate")
    log.report_progress(3, 1024, "sequences")
    clock.seconds += 1
    busy = display.render_line(80).plain
    assert busy.replace("5:01:02", "5:01:01").startswith(quiet.partition(" ETA")[0]) and "generating 3/1024" in busy


def test_a_wide_terminal_has_the_unit_and_the_token(shown, clock):
    display, _ = shown()
    begun(display, clock, "grpo", "reward")
    display.show_phase("generate")
    log.report_progress(128, 512, "sequences", "token 37/64")
    clock.seconds += 1
    assert display.render_line(200).plain.endswith("generating 128/512 sequences, token 37/64")


def test_microbatches_are_counted_and_a_phase_that_just_began_is_not_shown(shown, clock):
    display, _ = shown()
    begun(display, clock, "sft", "loss")
    display.show_phase("train")
    log.report_progress(3, 64, "microbatches")
    assert "training" not in display.render_line(80).plain
    clock.seconds += 1
    assert display.render_line(80).plain.endswith("training 3/64")
    display.show_phase("train")
    clock.seconds += 1
    assert "training" not in display.render_line(80).plain, "one microbatch needs no count"
    display.show_phase("save")
    clock.seconds += 1
    assert display.render_line(80).plain.endswith("saving")


def test_the_time_left_is_that_of_the_steps_of_this_run(shown, clock):
    display, _ = shown()
    display.begin_stage("sft", 40, 100)
    assert "40/100" in display.render_line(80).plain and "ETA -:--:--" in display.render_line(80).plain
    clock.seconds += 30
    display.show(50, METRICS_OF["loss"], "train")
    assert "0:00:30 ETA 0:02:30" in display.render_line(80).plain
    clock.seconds += 10
    assert "0:00:40 ETA 0:02:20" in display.render_line(80).plain
    display.show(100, METRICS_OF["loss"], "train")
    assert "ETA" not in display.render_line(80).plain and "100/100" in display.render_line(80).plain


def test_a_terminal_gets_the_line_and_keeps_evaluations_above_it(shown, clock):
    display, file = shown(width=80)
    display.begin_stage("grpo", 0, 3, "reward")
    display.show(0, {"accuracy": 0.25, "gate_mean": 1e-7}, "eval")
    for step in (1, 2, 3):
        clock.seconds += 60
        display.show(step, METRICS_OF["reward"], "train")
    display.end_stage()
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n")
    assert "grpo step 0: held-out accuracy 0.25\n" in written, "and nothing that is not an evaluation's"
    assert re.search(r"grpo 3/3 ━+ 0:03:00 reward 0\.4123", written) and "…" not in written
    assert max(map(len, written.splitlines())) <= 80


def test_log_messages_are_printed_above_the_line_in_one_piece(shown, clock, monkeypatch):
    display, file = shown(width=40)
    stderr = io.StringIO()
    stderr.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stderr)
    handler = log.StderrHandler()
    display.begin_stage("sft", 0, 3)
    message = "the newest checkpoint is outputs/a_long_name/checkpoints/sft/step-000040"
    handler.emit(logging.LogRecord("rl_megatron", logging.WARNING, "", 0, message, (), None))
    display.end_stage()
    assert message in file.getvalue() and stderr.getvalue() == ""
    handler.emit(logging.LogRecord("rl_megatron", logging.WARNING, "", 0, "afterwards", (), None))
    assert stderr.getvalue() == "afterwards\n"


def test_a_log_in_a_file_of_its_own_stays_there(shown, monkeypatch):
    display, file = shown()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    display.begin_stage("sft", 0, 3)
    log.StderrHandler().emit(logging.LogRecord("rl_megatron", logging.WARNING, "", 0, "a message", (), None))
    assert sys.stderr.getvalue() == "a message\n" and "a message" not in file.getvalue()


def test_a_file_gets_plain_lines(shown, clock):
    display, file = shown(terminal=False)
    display.begin_stage("grpo", 0, 200, "reward")
    for step in range(1, 201):
        clock.seconds += 1
        display.show(step, METRICS_OF["reward"], "train")
    lines = file.getvalue().splitlines()
    assert len(lines) == 20 and "\x1b" not in file.getvalue()
    assert lines[0] == (
        "grpo step 10/200: reward 0.4123  loss -1.179e-13  grad_norm 12.35  lr 2.982e-05  (0:00:10, ETA 0:03:10)"
    ), "in one line, however wide"


def test_a_file_hears_of_slow_steps_and_of_what_happens_within_one(shown, clock):
    display, file = shown(terminal=False)
    display.begin_stage("grpo", 0, 1000, "reward")
    display.show_phase("evaluate")
    for done in range(100):
        clock.seconds += 1
        log.report_progress(done, 100, "sequences", "token 3/64")
    assert file.getvalue() == ("grpo step 0/1000: evaluating 59/100 sequences, token 3/64  (0:01:00, ETA -:--:--)\n")
    display.show_phase(None)
    clock.seconds += 60
    display.show(1, METRICS_OF["reward"], "train")
    assert file.getvalue().splitlines()[1].startswith("grpo step 1/1000: reward 0.4123")


def test_a_phase_that_has_just_begun_does_not_take_the_line_of_the_metrics(shown, clock):
    display, file = shown(terminal=False)
    display.begin_stage("sft", 0, 1000)
    display.show_phase("save")
    clock.seconds += 90
    display.show_phase("train")
    log.report_progress(1, 4, "microbatches")
    assert file.getvalue() == ""
    display.show(1, METRICS_OF["loss"], "train")
    assert "loss 1.811" in file.getvalue()


def test_a_negative_mean_reward_is_not_an_accuracy(shown):
    display, file = shown(terminal=False)
    display.begin_stage("grpo", 0, 3, "reward")
    display.show(0, {"accuracy": -0.975}, "eval")
    display.show(1, {"accuracy": 0.5}, "eval")
    display.show(2, {"accuracy": -0.0}, "eval")
    assert file.getvalue() == (
        "grpo step 0: held-out mean reward -0.975\ngrpo step 1: held-out accuracy 0.5\n"
        "grpo step 2: held-out accuracy 0\n"
    )


def test_nobody_watches_after_the_stage(shown):
    display, _ = shown()
    assert not log.has_watcher()
    display.begin_stage("sft", 0, 1)
    assert log.has_watcher()
    display.end_stage()
    assert not log.has_watcher()
    log.report_progress(1, 2, "sequences")
