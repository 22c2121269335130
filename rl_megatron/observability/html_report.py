"""Write report.html of a run, or a page that compares runs. Both are made from files of runs, and need no others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from rl_megatron import disk
from rl_megatron.config.metrics import is_cost, is_eval_metric
from rl_megatron.observability.curves import Points, line_chart, stacked_chart
from rl_megatron.observability.page_template import TEMPLATE
from rl_megatron.observability.run_files import RecordedRun, flat
from rl_megatron.workers.child_process import build_child_environment

REPORT = "report.html"
_SAMPLES_PER_STEP, _STEPS_WITH_SAMPLES = 3, 6
_SECONDS_BETWEEN_PAGES = 600.0  # a process for a page takes a few seconds of one core, most of them for imports
# Charts that a report shows first: (title, names of metrics, whether the axis is logarithmic).
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
_PHASE, _PEAK = ("time_", "_s"), ("peak_memory_", "_gb")
_NOT_PHASES = ("time_step_s",)
_OTHERS = "Other metrics"  # the heading of charts that are folded


def write_html_report(output_dir: Path) -> None:
    """Write report.html into the output directory of a run.

    Raises:
        ConfigError: The directory is not that of a run.
        OSError: The file cannot be written.
    """
    disk.replace_file(output_dir / REPORT, report_page(RecordedRun.read(output_dir)))


def report_page(run: RecordedRun) -> str:
    """Return the HTML page of one run."""
    sections = [_stage_section(run, stage, number) for number, stage in enumerate(run.stages)]
    return _rendered(
        title=run.name,
        facts=_facts(run),
        failure=_failure(run),
        stages=sections,
        changes=_changed_from_defaults(run),
        columns=("key", "default", "this run"),
        attempts=_attempts(run),
        versions=run.info.get("versions", {}),
    )


def compare_page(runs: Sequence[RecordedRun]) -> str:
    """Return an HTML page with the curves of several runs above each other, and what differs in their settings."""
    names = _distinct_names(runs)
    stages = list(dict.fromkeys(stage for run in runs for stage in run.stages))
    sections = [
        {"name": stage, "groups": _compared(runs, names, stage), "samples": [], "shares": []} for stage in stages
    ]
    return _rendered(
        title=" and ".join(names),
        facts=[(name, f"{run.state}, {_progress(run)}") for name, run in zip(names, runs, strict=True)],
        failure=None,
        stages=sections,
        changes=_differences(runs),
        columns=("key", *names),
        attempts=[],
        versions={},
    )


def _rendered(**values: Any) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.from_string(TEMPLATE).render(written=now, **values)


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    info, summary = run.info, run.summary
    found = [
        ("state", run.state),
        ("steps", _progress(run)),
        ("layout", summary.get("layout") or info.get("layout") or ""),
        ("device", info.get("device") or ""),
        ("time", f"{summary['seconds']:.0f} s in the last start" if "seconds" in summary else ""),
        ("git revision", info.get("git_revision") or ""),
        ("directory", str(run.directory.resolve())),
    ]
    return [(name, value) for name, value in found if value]


def _progress(run: RecordedRun) -> str:
    """Return how far each stage is."""
    parts = []
    for stage, settings in run.config.get("stages", {}).items():
        done = max((line["step"] for line in run.lines if line["stage"] == stage), default=0)
        parts.append(f"{stage} {done} of {settings['train']['steps']}")
    return ", ".join(parts)


def _failure(run: RecordedRun) -> dict[str, str] | None:
    content = run.failure
    if content is None:
        return None
    place = ", ".join(
        f"{name} {content[name]}"
        for name in ("rank", "host", "stage", "step", "phase")
        if content.get(name) is not None
    )
    return {"message": str(content.get("message", "")), "place": place}


def _stage_section(run: RecordedRun, stage: str, number: int) -> dict[str, Any]:
    train, evals = run.metric_names(stage, "train"), run.metric_names(stage, "eval")
    shown = {name for _, names, _ in (*_MAIN, *_SPEED) for name in names}
    phases = [name for name in train if name.startswith(_PHASE[0]) and name not in _NOT_PHASES]
    outer = [name for name in phases if not _is_part_of_training(name)]
    inner = [name for name in phases if _is_part_of_training(name) and not name.startswith("time_train_critic_")]
    groups = [
        ("Learning", [*_charts(run, stage, _MAIN), *_eval_charts(run, stage, evals)]),
        ("Time of a step", [
            *_stacked(run, stage, "seconds by phase", outer), *_stacked(run, stage, "seconds of training", inner),
        ]),
        ("Speed", _charts(run, stage, _SPEED)),
        ("Memory", _memory(run, stage, train)),
        (_OTHERS, [
            line_chart(name, {name: points})
            for name in train
            if name not in shown and not is_cost(name) and len(points := run.curve(stage, "train", name)) > 1
        ]),
    ]  # fmt: skip
    return {
        "name": stage,
        "groups": [(title, charts) for title, charts in groups if charts],
        "samples": _samples(run, stage),
        "shares": _shares(run, stage, outer),
    }


def _is_part_of_training(name: str) -> bool:
    return name.startswith("time_train_") and name not in ("time_train_s", "time_train_critic_s")


def _charts(run: RecordedRun, stage: str, wanted: Iterable[tuple[str, tuple[str, ...], bool]]) -> list[str]:
    charts = []
    for title, names, logarithmic in wanted:
        curves = {name: points for name in names if (points := run.curve(stage, "train", name))}
        if curves:
            charts.append(line_chart(title, curves, logarithmic=logarithmic))
    return charts


def _eval_charts(run: RecordedRun, stage: str, names: Iterable[str]) -> list[str]:
    curves = {name: run.curve(stage, "eval", name) for name in names if is_eval_metric(name)}
    return [line_chart(f"evaluation: {name}", {name: points}) for name, points in curves.items() if points]


def _stacked(run: RecordedRun, stage: str, title: str, names: Sequence[str]) -> list[str]:
    parts = {_between(name, _PHASE).removeprefix("train_"): run.curve(stage, "train", name) for name in names}
    parts = {name: points for name, points in parts.items() if any(value > 0 for _, value in points)}
    return [stacked_chart(title, parts)] if parts else []


def _memory(run: RecordedRun, stage: str, names: Iterable[str]) -> list[str]:
    peaks = {_between(name, _PEAK): run.curve(stage, "train", name) for name in names if name.startswith(_PEAK[0])}
    return [line_chart("peak memory (GB)", peaks)] if peaks else []


def _shares(run: RecordedRun, stage: str, names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return each phase with its mean seconds per step and its share, the longest first."""
    sums = {_between(name, _PHASE): sum(value for _, value in run.curve(stage, "train", name)) for name in names}
    steps, total = len(run.curve(stage, "train", "time_step_s")), sum(sums.values())
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return [(name, f"{value / steps:.3f}", f"{value / total:.1%}") for name, value in ordered if total and steps]


def _between(name: str, ends: tuple[str, str]) -> str:
    return name.removeprefix(ends[0]).removesuffix(ends[1])


def _samples(run: RecordedRun, stage: str) -> list[dict[str, Any]]:
    """Return completions of some evaluations, from the first to the last."""
    of_stage = [line for line in run.samples if line["stage"] == stage and line["samples"]]
    most = _STEPS_WITH_SAMPLES
    if len(of_stage) > most:
        of_stage = [of_stage[round(place * (len(of_stage) - 1) / (most - 1))] for place in range(most)]
    return [{"step": line["step"], "samples": line["samples"][:_SAMPLES_PER_STEP]} for line in of_stage]


def _changed_from_defaults(run: RecordedRun) -> list[tuple[str, ...]]:
    """Return the settings of the run that differ from those of configs/config.yaml."""
    from rl_megatron.config.loading.load import load_config, to_yaml

    base = flat(next(iter(yaml.safe_load(to_yaml(load_config([])))["stages"].values())))
    rows: list[tuple[str, ...]] = []
    for stage, settings in run.config.get("stages", {}).items():
        where = f"stages.{stage}." if len(run.config["stages"]) > 1 else ""
        for key, value in flat(settings).items():
            if key not in base or base[key] != value:
                rows.append((where + key, _shown(base.get(key, "")), _shown(value)))
    return rows


def _differences(runs: Sequence[RecordedRun]) -> list[tuple[str, ...]]:
    """Return the settings that are not the same in all runs."""
    each = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for settings in each for key in settings)
    rows = [(key, [settings.get(key, "") for settings in each]) for key in keys]
    return [(key, *map(_shown, values)) for key, values in rows if any(value != values[0] for value in values)]


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _attempts(run: RecordedRun) -> list[tuple[str, ...]]:
    """Return when each start of the run began and ended, how and where; of a start that was killed there is no end."""
    newest = run.attempts[-1] if run.attempts else None
    rows = []
    for each in run.attempts:
        unknown = "goes on, or was killed" if each is newest else "was killed"
        cells = (each.get("began"), each.get("layout"), each.get("ended"), each.get("how", unknown), each.get("place"))
        rows.append(tuple(cell or "" for cell in cells))
    return rows


def _compared(runs: Sequence[RecordedRun], names: Sequence[str], stage: str) -> list[tuple[str, list[str]]]:
    """Return the charts of a stage of several runs, in groups with their headings."""
    charts: dict[str, list[str]] = {"Evaluations": [], "Learning": [], "Speed": [], _OTHERS: []}
    main, speed = ([name for _, group, _ in several for name in group] for several in (_MAIN, _SPEED))
    for kind in ("eval", "train"):
        recorded = dict.fromkeys(name for run in runs for name in run.metric_names(stage, kind))
        first = [name for name in (*main, "time_step_s", *speed) if name in recorded]
        for name in dict.fromkeys([*first, *recorded]) if kind == "train" else recorded:
            curves = _curves_of_runs(runs, names, stage, kind, name)
            if not curves or not _is_shown_in_comparisons(kind, name):
                continue
            chart = line_chart(name, curves, logarithmic=name.startswith("grad_norm"))
            known = "Learning" if name in main else "Speed" if is_cost(name) else _OTHERS
            charts["Evaluations" if kind == "eval" else known].append(chart)
    return [(heading, group) for heading, group in charts.items() if group]


def _is_shown_in_comparisons(kind: str, name: str) -> bool:
    if kind == "eval":
        return is_eval_metric(name)
    return name != "seconds" and not name.startswith(("peak_memory_", "time_train_"))


def _curves_of_runs(
    runs: Sequence[RecordedRun], names: Sequence[str], stage: str, kind: str, metric: str
) -> Mapping[str, Points]:
    found = {name: run.curve(stage, kind, metric) for name, run in zip(names, runs, strict=True)}
    return {name: points for name, points in found.items() if points}


def _distinct_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the name of each run or, where names are the same, its path."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.directory) for name, run in zip(names, runs, strict=True)]


class ReportPages:
    """What writes report.html while a run goes on: a process of low priority, from time to time."""

    def __init__(self, output_dir: Path, seconds: float = _SECONDS_BETWEEN_PAGES):
        self._output_dir, self._seconds = output_dir, seconds
        self._written = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def renew(self) -> None:
        """Start to write the page if that was long ago, and nothing is writing it."""
        now = time.monotonic()
        if now - self._written < self._seconds or (self._process is not None and self._process.poll() is None):
            return
        self._written = now
        self._process = start_to_write(self._output_dir)

    def end(self) -> None:
        """Wait for the process, so that it does not overwrite a newer page."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def start_to_write(output_dir: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes report.html, and that goes on if this one ends."""
    program = f"import os; os.nice(19); from {__name__} import main; main()"  # before the imports, which take longest
    command = [sys.executable, "-c", program, str(output_dir)]
    nothing, variables = subprocess.DEVNULL, build_child_environment()
    return subprocess.Popen(
        command, stdin=nothing, stdout=nothing, stderr=nothing, env=variables, start_new_session=True
    )


def quietly(name: str, write: Callable[[], object]) -> None:
    """Call `write`, which writes the file `name`; if it cannot, that is said, because nothing else depends on it."""
    from rl_megatron import log

    try:
        write()
    except Exception as error:  # a plot or a file may fail in any way, and the run must not
        log.LOGGER.warning("%s cannot be written: %s: %s", name, type(error).__name__, error)


def main() -> None:
    """Write the page of the run whose directory is the argument."""
    write_html_report(Path(sys.argv[1]))
