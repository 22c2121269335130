"""Render report.html of a run, or a page that compares runs, from the files in their output directories."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined

from rl_megatron import disk, log
from rl_megatron.config.metrics import is_cost, is_eval_metric
from rl_megatron.observability.curves import draw_lines, draw_stack
from rl_megatron.observability.page_template import TEMPLATE
from rl_megatron.observability.run_files import RecordedRun, flatten
from rl_megatron.workers.child_process import build_child_environment

REPORT = "report.html"
_SAMPLES_PER_STEP, _STEPS_WITH_SAMPLES = 3, 6
_SECONDS_BETWEEN_PAGES = 600.0  # writing a page takes a process a few seconds of CPU time, mostly for imports
# The charts that a report shows first: (title, names of metrics, whether the axis is logarithmic).
_MAIN = (
    ("loss", ("loss",), False),
    ("reward", ("reward",), False),
    ("gradient norm", ("grad_norm", "grad_norm_clipped"), True),
    ("gradient norm of quarters of the layers", tuple(f"grad_norm_layers_{quarter}" for quarter in range(1, 5)), True),
    ("learning rate", ("lr",), False),
    ("entropy (nats)", ("entropy", "approx_entropy"), False),
    ("KL to the reference (nats)", ("kl_penalty", "reward_kl"), False),
    ("clipped tokens (share)", ("clip_fraction",), False),
    ("engine − trainer (nats)", ("mismatch_mean", "mismatch_max"), True),
    ("completion length (tokens)", ("completion_tokens",), False),
    ("stopped and informative (shares)", ("stopped", "informative_groups"), False),
)
_SPEED = (
    ("tokens per second", ("tokens_per_s_train", "tokens_per_s_generate", "tokens_per_s_logprobs"), False),
    ("TFLOP/s per rank", ("tflops_per_rank",), False),
    ("MFU", ("mfu",), False),
    ("pipeline bubble (share)", ("pipeline_bubble",), False),
    ("packing efficiency (share)", ("packing_efficiency",), False),
)
_PHASE, _PEAK = ("time_", "_s"), ("peak_memory_", "_gb")  # prefix and suffix of the metrics' names
_OTHERS = "Other metrics"  # the heading of charts that are collapsed


def write_html_report(output_dir: Path) -> None:
    """Write report.html into the output directory of a run."""
    disk.replace_file(output_dir / REPORT, render_report(RecordedRun.read(output_dir)))


def render_report(run: RecordedRun) -> str:
    """Return the HTML page of one run."""
    return _render(
        title=run.name,
        facts=_list_facts(run),
        failure=_describe_failure(run),
        stages=[_build_section(run, stage) for stage in run.stages],
        changes=_list_changes(run),
        columns=("key", "default", "this run"),
        attempts=_list_attempts(run),
        versions=run.info.get("versions", {}),
    )


def render_comparison(runs: Sequence[RecordedRun]) -> str:
    """Return an HTML page that overlays the curves of several runs, and lists the settings that differ."""
    names = _choose_distinct_names(runs)
    stages = list(dict.fromkeys(stage for run in runs for stage in run.stages))
    sections = [
        {"name": stage, "groups": _draw_comparison(runs, names, stage), "samples": [], "shares": []} for stage in stages
    ]
    return _render(
        title=" and ".join(names),
        facts=[(name, f"{run.state}, {_describe_progress(run)}") for name, run in zip(names, runs, strict=True)],
        failure=None,
        stages=sections,
        changes=_list_differences(runs),
        columns=("key", *names),
        attempts=[],
        versions={},
    )


def _render(**values: object) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.from_string(TEMPLATE).render(written=now, **values)


def _list_facts(run: RecordedRun) -> list[tuple[str, str]]:
    info, summary = run.info, run.summary
    facts = [
        ("state", run.state),
        ("steps", _describe_progress(run)),
        ("layout", summary.get("layout") or info.get("layout") or ""),
        ("device", info.get("device") or ""),
        ("time", f"{summary['seconds']:.0f} s in the last start" if "seconds" in summary else ""),
        ("git revision", info.get("git_revision") or ""),
        ("directory", str(run.directory.resolve())),
    ]
    return [(name, value) for name, value in facts if value]


def _describe_progress(run: RecordedRun) -> str:
    """Return the number of steps that each stage has done."""
    parts = []
    for stage, settings in run.config.get("stages", {}).items():
        done = max((line["step"] for line in run.lines if line["stage"] == stage), default=0)
        parts.append(f"{stage} {done} of {settings['train']['steps']}")
    return ", ".join(parts)


def _describe_failure(run: RecordedRun) -> dict[str, str] | None:
    content = run.failure
    if content is None:
        return None
    place = ", ".join(
        f"{name} {content[name]}"
        for name in ("rank", "host", "stage", "step", "phase")
        if content.get(name) is not None
    )
    return {"message": str(content.get("message", "")), "place": place}


def _build_section(run: RecordedRun, stage: str) -> dict[str, object]:
    train, evals = run.list_metrics(stage, "train"), run.list_metrics(stage, "eval")
    shown = {name for _, names, _ in (*_MAIN, *_SPEED) for name in names}
    phases = [name for name in train if name.startswith(_PHASE[0]) and name != "time_step_s"]
    outer = [name for name in phases if not _is_part_of_training(name)]
    inner = [name for name in phases if _is_part_of_training(name) and not name.startswith("time_train_critic_")]
    groups = [
        ("Learning", [*_draw_charts(run, stage, _MAIN), *_draw_evaluations(run, stage, evals)]),
        ("Time of a step", [
            *_draw_phases(run, stage, "seconds by phase", outer),
            *_draw_phases(run, stage, "seconds of training", inner),
        ]),
        ("Speed", _draw_charts(run, stage, _SPEED)),
        ("Memory", _draw_memory(run, stage, train)),
        (_OTHERS, [
            draw_lines(name, {name: points})
            for name in train
            if name not in shown and not is_cost(name) and len(points := run.get_curve(stage, "train", name)) > 1
        ]),
    ]  # fmt: skip
    return {
        "name": stage,
        "groups": [(title, charts) for title, charts in groups if charts],
        "samples": _choose_samples(run, stage),
        "shares": _compute_shares(run, stage, outer),
    }


def _is_part_of_training(name: str) -> bool:
    return name.startswith("time_train_") and name not in ("time_train_s", "time_train_critic_s")


def _draw_charts(run: RecordedRun, stage: str, wanted: Iterable[tuple[str, tuple[str, ...], bool]]) -> list[str]:
    charts = []
    for title, names, logarithmic in wanted:
        curves = {name: points for name in names if (points := run.get_curve(stage, "train", name))}
        if curves:
            charts.append(draw_lines(title, curves, logarithmic=logarithmic))
    return charts


def _draw_evaluations(run: RecordedRun, stage: str, names: Iterable[str]) -> list[str]:
    curves = {name: run.get_curve(stage, "eval", name) for name in names if is_eval_metric(name)}
    return [draw_lines(f"evaluation: {name}", {name: points}) for name, points in curves.items() if points]


def _draw_phases(run: RecordedRun, stage: str, title: str, names: Sequence[str]) -> list[str]:
    parts = {_strip(name, _PHASE).removeprefix("train_"): run.get_curve(stage, "train", name) for name in names}
    parts = {name: points for name, points in parts.items() if any(value > 0 for _, value in points)}
    return [draw_stack(title, parts)] if parts else []


def _draw_memory(run: RecordedRun, stage: str, names: Iterable[str]) -> list[str]:
    peaks = {_strip(name, _PEAK): run.get_curve(stage, "train", name) for name in names if name.startswith(_PEAK[0])}
    return [draw_lines("peak memory (GB)", peaks)] if peaks else []


def _compute_shares(run: RecordedRun, stage: str, names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return each phase, its mean seconds per step and its share of the sum of all phases, longest first."""
    sums = {_strip(name, _PHASE): sum(value for _, value in run.get_curve(stage, "train", name)) for name in names}
    steps, total = len(run.get_curve(stage, "train", "time_step_s")), sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return [(name, f"{value / steps:.3f}", f"{value / total:.1%}") for name, value in ordered if total and steps]


def _strip(name: str, ends: tuple[str, str]) -> str:
    return name.removeprefix(ends[0]).removesuffix(ends[1])


def _choose_samples(run: RecordedRun, stage: str) -> list[dict[str, object]]:
    """Return completions of the first and the last evaluation, and of a few between them, evenly spaced."""
    lines = [line for line in run.samples if line["stage"] == stage and line["samples"]]
    most = _STEPS_WITH_SAMPLES
    if len(lines) > most:
        lines = [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]
    return [{"step": line["step"], "samples": line["samples"][:_SAMPLES_PER_STEP]} for line in lines]


def _list_changes(run: RecordedRun) -> list[tuple[str, ...]]:
    """Return the settings of the run that differ from those of configs/config.yaml."""
    from rl_megatron.config.loading.load import load_config, to_yaml

    base = flatten(next(iter(yaml.safe_load(to_yaml(load_config([])))["stages"].values())))
    rows: list[tuple[str, ...]] = []
    for stage, settings in run.config.get("stages", {}).items():
        prefix = f"stages.{stage}." if len(run.config["stages"]) > 1 else ""
        for key, value in flatten(settings).items():
            if key not in base or base[key] != value:
                rows.append((prefix + key, _format_value(base.get(key, "")), _format_value(value)))
    return rows


def _list_differences(runs: Sequence[RecordedRun]) -> list[tuple[str, ...]]:
    """Return the settings that are not the same in all runs."""
    configs = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, "") for config in configs]) for key in keys]
    return [(key, *map(_format_value, values)) for key, values in rows if any(value != values[0] for value in values)]


def _format_value(value: object) -> str:
    return "null" if value is None else str(value)


def _list_attempts(run: RecordedRun) -> list[tuple[str, ...]]:
    """Return a row for each attempt: when it began, its layout, and when, how and where it ended (empty if unknown)."""
    rows = []
    for attempt in run.attempts:
        no_end = "is running, or was killed" if attempt is run.attempts[-1] else "was killed"
        values = attempt | {"how": attempt.get("how", no_end)}
        rows.append(tuple(values.get(key) or "" for key in ("began", "layout", "ended", "how", "place")))
    return rows


def _draw_comparison(runs: Sequence[RecordedRun], names: Sequence[str], stage: str) -> list[tuple[str, list[str]]]:
    """Return the charts that compare a stage of several runs, grouped under headings."""
    charts: dict[str, list[str]] = {"Evaluations": [], "Learning": [], "Speed": [], _OTHERS: []}
    main, speed = ([name for _, group, _ in several for name in group] for several in (_MAIN, _SPEED))
    for kind in ("eval", "train"):
        recorded = dict.fromkeys(name for run in runs for name in run.list_metrics(stage, kind))
        first = [name for name in (*main, "time_step_s", *speed) if name in recorded]
        for name in dict.fromkeys([*first, *recorded]) if kind == "train" else recorded:
            curves = {
                run_name: points
                for run_name, run in zip(names, runs, strict=True)
                if (points := run.get_curve(stage, kind, name))
            }
            if curves and _is_compared(kind, name):
                heading = "Learning" if name in main else "Speed" if is_cost(name) else _OTHERS
                chart = draw_lines(name, curves, logarithmic=name.startswith("grad_norm"))
                charts["Evaluations" if kind == "eval" else heading].append(chart)
    return [(heading, group) for heading, group in charts.items() if group]


def _is_compared(kind: str, name: str) -> bool:
    if kind == "eval":
        return is_eval_metric(name)
    return name != "seconds" and not name.startswith(("peak_memory_", "time_train_"))


def _choose_distinct_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the name of each run, or its path if another run has the same name."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.directory) for name, run in zip(names, runs, strict=True)]


class ReportPages:
    """The updater of report.html during a run, which writes the page in a process of low priority."""

    def __init__(self, output_dir: Path, seconds: float = _SECONDS_BETWEEN_PAGES):
        self._output_dir, self._seconds = output_dir, seconds
        self._started_at = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def renew(self) -> None:
        """Start a process that writes the page if the last one has ended and was started at least `seconds` ago."""
        now = time.monotonic()
        if now - self._started_at < self._seconds or (self._process is not None and self._process.poll() is None):
            return
        self._started_at = now
        self._process = start_writing_report(self._output_dir)

    def end(self) -> None:
        """Kill the process, so that it does not overwrite a newer page."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def start_writing_report(output_dir: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes report.html even if the calling process ends."""
    program = f"import os; os.nice(19); from {__name__} import main; main()"  # before the imports, which take longest
    command = [sys.executable, "-c", program, str(output_dir)]
    null, variables = subprocess.DEVNULL, build_child_environment()
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=variables, start_new_session=True)


def warn_if_it_fails(name: str, write: Callable[[], object]) -> None:
    """Call `write`, which writes file `name`. An error only causes a warning, because nothing else needs the file."""
    try:
        write()
    except Exception as error:  # `write` may raise any error, which must not end the run
        log.LOGGER.warning("%s cannot be written: %s: %s", name, type(error).__name__, error)


def main() -> None:
    """Write the page of the run whose directory is the first command-line argument."""
    write_html_report(Path(sys.argv[1]))
