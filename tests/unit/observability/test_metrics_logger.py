"""What a run writes and shows: lines of metrics, progress, and the final report."""

import io
import json
import logging
import resource

import pytest
from rich.console import Console

from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.report import plot_curves, write_report
from rl_megatron.observability.sinks import SINKS, MetricLine, register_sink
from tests.full_disk import files_of_at_most

PNG = b"\x89PNG\r\n\x1a\n"
SUMMARY = {
    "accuracy": {"sft": 0.5},
    "stages": {"sft": {"accuracy": 0.5}},
    "seconds": 1.0,
    "layout": "1 rank(s)",
}


def lines_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(directory):
    return [(line["stage"], line["step"], line["kind"]) for line in lines_of(directory)]


@pytest.fixture
def logger(tmp_path):
    return MetricsLogger(tmp_path, enabled=True)


def fill(logger, stage="sft", steps=4):
    logger.begin_stage(stage, 0, steps)
    logger.record(0, {"accuracy": 0.0}, kind="eval")
    for step in range(1, steps + 1):
        logger.record(step, {"loss": 1.0 / step})
        if step % 2 == 0:
            logger.record(step, {"accuracy": step / 10}, kind="eval")
    logger.end_stage()


def test_every_line_is_one_object_with_stage_step_and_kind(logger, tmp_path):
    fill(logger, steps=2)
    lines = lines_of(tmp_path)
    assert [line.pop("seconds") >= 0 for line in lines] == [True] * 4
    assert lines == [
        {"stage": "sft", "step": 0, "kind": "eval", "accuracy": 0.0},
        {"stage": "sft", "step": 1, "kind": "train", "loss": 1.0},
        {"stage": "sft", "step": 2, "kind": "train", "loss": 0.5},
        {"stage": "sft", "step": 2, "kind": "eval", "accuracy": 0.2},
    ]


def test_noted_metrics_are_added_to_the_next_line_only(logger, tmp_path):
    logger.begin_stage("sft", 0, 2)
    logger.note({"refit_bytes": 8.0})
    logger.note({"gate_max": 0.5})
    logger.record(0, {"accuracy": 0.1}, kind="eval")
    logger.record(1, {"loss": 1.0})
    first, second = lines_of(tmp_path)
    assert (first["accuracy"], first["refit_bytes"], first["gate_max"]) == (0.1, 8.0, 0.5)
    assert second.keys() == {"stage", "step", "kind", "loss", "seconds"}


def test_numbers_are_written_with_every_digit(logger, tmp_path):
    logger.begin_stage("sft", 0, 1)
    logger.record(1, {"loss": 0.1 + 0.2, "lr": 1e-300})
    assert lines_of(tmp_path)[0]["loss"] == 0.1 + 0.2
    assert lines_of(tmp_path)[0]["lr"] == 1e-300


def test_steps_after_the_checkpoint_are_removed_when_a_stage_resumes(logger, tmp_path):
    fill(logger, "pretrain")
    fill(logger)
    again = MetricsLogger(tmp_path, enabled=True)
    again.begin_stage("sft", 2, 4)
    kept = [("sft", 0, "eval"), ("sft", 1, "train"), ("sft", 2, "train"), ("sft", 2, "eval")]
    assert steps_of(tmp_path)[-4:] == kept
    assert ("pretrain", 4, "train") in steps_of(tmp_path), "the lines of another stage changed"
    again.record(3, {"loss": 0.0})
    assert steps_of(tmp_path)[-1] == ("sft", 3, "train")


def test_a_stage_that_starts_again_removes_all_its_steps(logger, tmp_path):
    fill(logger, "pretrain", steps=1)
    fill(logger)
    MetricsLogger(tmp_path, enabled=True).begin_stage("sft", 0, 4)
    assert steps_of(tmp_path) == [("pretrain", 0, "eval"), ("pretrain", 1, "train")]


def test_an_incomplete_last_line_is_removed(logger, tmp_path):
    fill(logger, steps=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "step": 3, "kind": "tr')
    again = MetricsLogger(tmp_path, enabled=True)
    again.begin_stage("sft", 2, 4)
    again.record(3, {"loss": 0.25})
    assert steps_of(tmp_path)[-2:] == [("sft", 2, "eval"), ("sft", 3, "train")]


def test_removing_steps_leaves_no_temporary_file(logger, tmp_path):
    fill(logger)
    logger.begin_stage("sft", 1, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_the_end_writes_a_summary_and_a_picture(logger, tmp_path, capsys):
    fill(logger)
    logger.finish(SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(PNG) and len(picture) > 5_000
    shown = capsys.readouterr().out
    assert "sft" in shown and "0.5000" in shown and "1 rank(s)" in shown
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_curves_of_several_stages(tmp_path):
    lines = [
        {"stage": "sft", "step": 1, "kind": "train", "loss": 2.0},
        {"stage": "sft", "step": 1, "kind": "eval", "nll_per_token": 2.0},
        {"stage": "grpo", "step": 1, "kind": "train", "loss": 0.0, "reward": 0.5},
        {"stage": "grpo", "step": 1, "kind": "eval", "accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    from matplotlib.image import imread

    height, width, _ = imread(tmp_path / "curves.png").shape
    assert width > height, "the picture does not have one column per stage"


def test_ranks_that_are_not_enabled_write_and_show_nothing(tmp_path, capsys):
    quiet = MetricsLogger(tmp_path / "nothing", enabled=False)
    fill(quiet)
    quiet.finish(SUMMARY)
    assert not (tmp_path / "nothing").exists()
    assert capsys.readouterr() == ("", "")


def test_progress_without_a_terminal_is_logged_in_a_few_lines(logger, capsys):
    logger.begin_stage("sft", 0, 200)
    for step in range(1, 201):
        logger.record(step, {"loss": 1.0})
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 20
    assert "sft step 200/200: loss 1" in shown[-1]


PAIRS = {"preference_accuracy": 0.5, "preference_margin": -1.25, "reward_accuracy": 0.5, "reward_margin": 0.0}
LONG = "outputs/a_name_that_is_long/and_another_that_is_longer/checkpoints/dpo/step-000300"


@pytest.fixture
def report(tmp_path):
    """`report(stages, commands, width)`: what the end of a run prints to a console of this width."""
    (tmp_path / "metrics.jsonl").write_text('{"stage": "sft", "step": 1, "kind": "train", "loss": 2.0}\n')

    def printed(stages, commands=(), width=80, has_trained=True):
        file = io.StringIO()
        summary = SUMMARY | {"stages": stages}
        write_report(tmp_path, summary, Console(file=file, width=width, soft_wrap=True), commands, has_trained)
        return file.getvalue()

    return printed


@pytest.mark.parametrize("width", [80, 200])
def test_no_header_of_the_result_table_is_cut(report, width):
    shown = report({"sft": {"nll_per_token": 2.5}, "dpo": PAIRS}, width=width)
    assert "…" not in shown
    for word in ("sft", "dpo", "nll_per_token", "2.5000", "-1.2500", *PAIRS):
        assert word in shown
    assert max(len(line) for line in shown.splitlines() if line and line[0] in "┏┃│└") <= width
    assert ("stage" in shown) == (width == 200) or "metric" in shown, "a narrow table has stages as columns"


def test_commands_and_paths_stay_in_one_piece(report):
    command = f"rl-megatron convert export {LONG} exported[bold]"
    shown = report({"sft": {"accuracy": 0.5}}, [("Export it:", command)]).splitlines()
    assert shown[-3:] == ["What you can do next:", "  Export it:", f"    {command}"]


def test_a_run_that_trained_nothing_writes_no_report_over_the_earlier_one(report, tmp_path):
    stages = {"sft": {"accuracy": 0.5}}
    assert f"Written to {tmp_path}" in report(stages, has_trained=False), "the earlier attempt left no report"
    before = (tmp_path / "summary.json").read_text()
    shown = report({"sft": {"accuracy": 0.75}}, has_trained=False)
    assert "nothing was trained" in shown and "Written to" not in shown
    assert (tmp_path / "summary.json").read_text() == before


def test_a_negative_mean_reward_is_not_called_accuracy(report):
    shown = report({"sft": {"accuracy": 0.25}, "grpo": {"accuracy": -0.975}})
    assert "mean reward" in shown and "-0.9750" in shown and "accuracy" not in shown
    assert "accuracy" in report({"sft": {"accuracy": 0.25}, "grpo": {"accuracy": 1.0}})


@pytest.mark.parametrize(
    ("train", "evaluation", "is_share"),
    [
        ({"reward": 0.5}, {"accuracy": 0.25}, True),
        ({"loss": 1.0}, {"preference_accuracy": 0.25, "reward_accuracy": 1.0}, True),
        ({"reward": -3.0}, {"accuracy": 0.25}, False),
        ({"reward": 0.5}, {"accuracy": -0.25}, False),
        ({"loss": 1.0}, {"accuracy": 0.5, "nll_per_token": 0.5}, False),
        ({"reward": 5.0}, {}, False),
    ],
)
def test_the_curves_go_from_zero_to_one_only_for_shares(tmp_path, monkeypatch, train, evaluation, is_share):
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    lines = [
        {"stage": "s", "step": step, "kind": kind, **values}
        for step in (1, 2)
        for kind, values in (("train", train), ("eval", evaluation))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    monkeypatch.undo()
    assert (figures[0].axes[1].get_ylim() == (0.0, 1.0)) == is_share
    pyplot.close(figures[0])


@pytest.fixture
def kept():
    """Register a sink that keeps all calls in a list, and yield the list; the sink is removed after the test."""
    calls = []

    @register_sink("kept")
    class Kept:
        def __init__(self, output_dir):
            calls.append(("open", output_dir))

        def begin_stage(self, stage, start):
            calls.append(("begin", stage, start))

        def write(self, line):
            calls.append(("write", line))

        def close(self):
            calls.append(("close",))

    yield calls
    del SINKS["kept"]


def test_a_registered_sink_gets_every_line(kept, tmp_path):
    logger = MetricsLogger(tmp_path, enabled=True, sinks=("jsonl", "kept"))
    fill(logger, steps=1)
    logger.finish(SUMMARY)
    lines = [call[1] for call in kept if call[0] == "write"]
    assert [(line.stage, line.step, line.kind, line.metrics) for line in lines] == [
        ("sft", 0, "eval", {"accuracy": 0.0}), ("sft", 1, "train", {"loss": 1.0}),
    ]  # fmt: skip
    assert all(isinstance(line, MetricLine) and line.seconds >= 0 for line in lines)
    assert [call for call in kept if call[0] != "write"] == [("open", tmp_path), ("begin", "sft", 0), ("close",)]
    assert steps_of(tmp_path) == [("sft", 0, "eval"), ("sft", 1, "train")]
    assert not (tmp_path / "tensorboard").exists(), "a sink that was not chosen got a line"


def test_only_the_rank_that_writes_opens_sinks(kept, tmp_path):
    MetricsLogger(tmp_path, enabled=False, sinks=("kept",))
    assert kept == []


def test_an_unknown_sink_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="there is no metric sink 'jsonlines'.*did you mean 'jsonl'"):
        MetricsLogger(tmp_path, enabled=True, sinks=("jsonlines",))


def test_tensorboard_has_one_point_for_each_metric_of_a_stage_and_kind(logger, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fill(logger, steps=2)
    logger.finish(SUMMARY)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["sft/eval/accuracy", "sft/train/loss"]
    assert [(point.step, point.value) for point in events.Scalars("sft/train/loss")] == [(1, 1.0), (2, 0.5)]


def test_lines_wait_while_the_disk_is_full_and_are_written_later(tmp_path, caplog, capsys):
    """All three files of metrics then have what they would have with space, in the same order. `capsys` keeps stdout in
    memory, because it would be a file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for name, size in (("always space", resource.RLIM_INFINITY), ("full for a while", 300)):
        directory = tmp_path / name
        directory.mkdir()
        logger = MetricsLogger(directory, enabled=True)
        logger.begin_stage("sft", 0, 4)
        logger.record(1, {"loss": 1.0})
        with files_of_at_most(size), caplog.at_level(logging.WARNING, logger="rl_megatron"):
            for step in (2, 3, 4):
                logger.record(step, {"loss": 1.0 / step})
                logger.record_samples(step, [{"prompt": "1+1=", "completion": "2" * 300}])
            if size != resource.RLIM_INFINITY:
                with pytest.raises(OSError, match="File too large"):
                    logger.finish_writing()
        logger.record(4, {"accuracy": 0.5}, kind="eval")
        logger.finish(SUMMARY)
        points = EventAccumulator(str(directory / "tensorboard")).Reload().Scalars("sft/train/loss")
        found[name] = (
            [{key: value for key, value in line.items() if key != "seconds"} for line in lines_of(directory)],
            (directory / "samples.jsonl").read_text(),
            [(point.step, point.value) for point in points],
        )
    assert found["full for a while"] == found["always space"]
    warnings = [record.getMessage() for record in caplog.records if "cannot be written (" in record.getMessage()]
    assert len(warnings) == 1 and "they wait in memory" in warnings[0]


def test_a_report_that_does_not_fit_is_said_and_shown_all_the_same(logger, tmp_path, capsys, caplog):
    fill(logger)
    with files_of_at_most(50), caplog.at_level(logging.WARNING, logger="rl_megatron"):
        logger.finish(SUMMARY)
    assert "0.5000" in capsys.readouterr().out
    said = "".join(record.getMessage() for record in caplog.records)
    for name in ("curves.png", "summary.json"):
        assert f"{name} cannot be written" in said and not (tmp_path / name).exists()
    assert not list(tmp_path.glob("*.incomplete"))


def test_lines_that_wait_are_dropped_with_their_steps_when_a_stage_goes_back(tmp_path, capsys):
    logger = MetricsLogger(tmp_path, enabled=True, sinks=("jsonl",))
    logger.begin_stage("sft", 0, 4)
    logger.record(1, {"loss": 1.0})
    with files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size):
        logger.record(2, {"loss": 0.5})
        logger.begin_stage("sft", 1, 4)
        logger.record(2, {"loss": 0.25})
    logger.record(3, {"loss": 0.125})
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(1, 1.0), (2, 0.25), (3, 0.125)]


def test_a_sink_that_fails_is_closed_with_all_others(tmp_path, monkeypatch):
    closed = []

    class Sink:
        def __init__(self, output_dir):
            pass

        def begin_stage(self, stage, start):
            pass

        def write(self, line):
            raise RuntimeError("the sink of a user")

        def close(self):
            closed.append("own")

    monkeypatch.setitem(SINKS, "own", Sink)
    logger = MetricsLogger(tmp_path, enabled=True, sinks=("jsonl", "own"))
    logger.begin_stage("sft", 0, 1)
    with pytest.raises(RuntimeError, match="the sink of a user"):
        logger.record(1, {"loss": 1.0})
    logger.close(has_failed=True)
    assert closed == ["own"]
