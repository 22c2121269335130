"""Write results as tables, as Markdown, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.logprobs.cases import Case
from benchmarks.logprobs.race import Result

EvalResult = list[tuple[Case, list[Result]]]
_HEADINGS = (
    "", "time", "/ ours", "forward", "/ floor", "bytes/logit", "from memory", "extra B/token", "collectives", "error",
    "gradient error",
)  # fmt: skip
_PACKAGES = ("torch", "megatron-core", "triton", "trl", "liger-kernel", "cut-cross-entropy", "flash-attn")


def environment(device: torch.device, threads: int, bandwidth: float) -> dict[str, Any]:
    """Return what the figures depend on."""
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device.type, "processor": processor, "cores": os.cpu_count(), "threads": threads,
        "copy_bytes_per_second": bandwidth, "versions": versions, "commit": _commit(),
    }  # fmt: skip


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def heading(where: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    copies = f"copies at {where['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    commit = f"; commit {where['commit']}" if where["commit"] else ""
    return f"{where['processor']}, {where['threads']} thread(s) per rank, {copies}; {versions}{commit}"


def table(case: Case, results: Sequence[Result]) -> Table:
    made = Table(title=case.title, title_justify="left")
    for index, name in enumerate(_HEADINGS):
        made.add_column(name, justify="right" if index else "left")
    for result in results:
        made.add_row(*_cells(result), style="bold" if result.is_ours else None)
    return made


def markdown(measured: EvalResult, where: dict[str, Any]) -> str:
    """Return one table per mode, with its cases one after the other."""
    parts = [heading(where)]
    for mode in dict.fromkeys(case.mode for case, _ in measured):
        rows = [f"**{mode}**\n", "| case |" + "".join(f" {name} |" for name in _HEADINGS)]
        rows.append("|---|---" + "|---:" * (len(_HEADINGS) - 1) + "|")
        for case, results in measured:
            if case.mode == mode:
                title = case.title.removeprefix(f"{mode}: ")
                rows += [f"| {title if not index else ''} | " + " | ".join(_cells(result)) + " |"
                         for index, result in enumerate(results)]  # fmt: skip
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _cells(result: Result) -> list[str]:
    if result.failed:
        return [result.variant, result.failed, *[""] * (len(_HEADINGS) - 2)]

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    collectives = f"{result.collectives_forward} + {result.collectives_backward}"
    return [
        result.variant, _duration(result.seconds), number(result.ratio_to_ours, ".2f"),
        _duration(result.forward_seconds), number(result.ratio_to_floor, ".2f"), number(result.bytes_per_logit, ".1f"),
        number(result.memory_bytes_per_logit, ".1f"),
        f"{result.peak_extra_bytes_per_token:,.0f}", collectives, number(result.logprob_error, ".1e"),
        number(result.gradient_error, ".1e"),
    ]  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def write(directory: Path, measured: EvalResult, where: dict[str, Any]) -> None:
    """Write `logprobs.json` and `logprobs.png` to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    cases = [
        {"case": case.to_json(), "results": [result.to_json() for result in results]} for case, results in measured
    ]
    (directory / "logprobs.json").write_text(json.dumps({"environment": where, "cases": cases}, indent=2) + "\n")
    plot(measured, heading(where), directory / "logprobs.png")


def plot(measured: EvalResult, title: str, path: Path) -> None:
    """Plot the time over ours, and the extra bytes per token, of the largest case of each mode and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    largest: dict[tuple, tuple[Case, list[Result]]] = {}
    for case, results in measured:
        key = (case.mode, case.dtype, case.tensor)
        if key not in largest or _size(case) > _size(largest[key][0]):
            largest[key] = (case, results)
    figure, axes = pyplot.subplots(
        len(largest), 2, figsize=(13, 0.8 + 2.1 * len(largest)), layout="constrained", squeeze=False
    )
    for (case, results), (ratios, bytes_) in zip(largest.values(), axes, strict=True):
        there = [result for result in results if result.seconds is not None][::-1]
        names = [result.variant for result in there]
        colors = ["tab:blue" if result.is_ours else "tab:gray" for result in there]
        bars = ratios.barh(names, [result.ratio_to_ours or 0 for result in there], color=colors)
        ratios.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        ratios.axvline(1, color="black", linewidth=0.8)
        ratios.set_title(case.title, fontsize=9, loc="left")
        ratios.set_xlabel("time / ours", fontsize=8)
        bars = bytes_.barh(names, [max(1, result.peak_extra_bytes_per_token) for result in there], color=colors)
        bytes_.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=2)
        bytes_.set_xscale("log")
        bytes_.set_xlim(left=1)
        bytes_.set_yticks([])
        bytes_.set_xlabel("peak extra bytes per token", fontsize=8)
        ratios.tick_params(labelsize=8)
        bytes_.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _size(case: Case) -> int:
    return case.local_logits * (case.hidden or 1)
