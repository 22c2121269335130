"""Write the HTML page of a run or of several, for `rl-megatron report` and `rl-megatron compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError


def report(run: Path) -> int:
    """Write report.html of a run, which may still be running, and return the exit status."""
    from rl_megatron.observability.html_report import REPORT, render_report
    from rl_megatron.observability.run_files import RecordedRun

    return _write_page(run / REPORT, render_report(RecordedRun.read(run)))


def compare(runs: Sequence[Path], output: Path) -> int:
    """Write a page with the curves of several runs and the settings that differ, and return the exit status."""
    from rl_megatron.observability.html_report import render_comparison
    from rl_megatron.observability.run_files import RecordedRun

    if len(runs) < 2:
        raise ConfigError("compare needs at least two runs; rl-megatron report shows one")
    return _write_page(output, render_comparison([RecordedRun.read(run) for run in runs]))


def _write_page(path: Path, page: str) -> int:
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {disk.describe(error, path)}") from error
    print(f"Written to {path}")
    return 0
