"""Read what a run has written so far: metrics, configuration, samples, results, and how it failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.metrics import METRICS_FILE, SAMPLES

CONFIG, SUMMARY, RUN_INFO = "config.yaml", "summary.json", "run_info.json"
ATTEMPTS, FAILURE = "attempts.jsonl", "failure.json"
_NOT_METRICS = ("stage", "step", "kind")


@dataclass(frozen=True)
class RecordedRun:
    """The content of the output directory of a run.

    Attributes:
        lines: The lines of metrics.jsonl.
        config: The effective configuration.
        summary: The content of summary.json; empty if the run has not ended in an orderly way.
        failure: The content of failure.json, or None if it is missing or cannot be read.
        samples: The lines of samples.jsonl: completions of evaluations.
        info: Git revision, versions and layout; empty if they are unknown.
        attempts: One entry for each start of the run: when this attempt began and, unless it was killed, how it ended.
    """

    directory: Path
    lines: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> RecordedRun:
        """Read the output directory of a run, finished or not. Raise ConfigError if it has no config.yaml."""
        if not (directory / CONFIG).is_file():
            raise ConfigError(f"{directory} is not the output_dir of a run: it has no {CONFIG}")
        return cls(
            directory,
            _read_lines(directory / METRICS_FILE),
            yaml.safe_load((directory / CONFIG).read_text()),
            _read_object(directory / SUMMARY) or {},
            _read_object(directory / FAILURE),
            _read_lines(directory / SAMPLES),
            _read_object(directory / RUN_INFO) or {},
            _join_attempts(_read_lines(directory / ATTEMPTS)),
        )

    @property
    def name(self) -> str:
        """Return the last part of the directory's path."""
        return self.directory.resolve().name

    @property
    def stages(self) -> list[str]:
        """Return the names of the stages that have metrics, in the order of their first lines."""
        return list(dict.fromkeys(line["stage"] for line in self.lines))

    @property
    def state(self) -> str:
        """Return the state of the run according to its files: complete, stopped, failed, hanging or running."""
        if self.failure is not None:
            return "failed" if self.failure.get("kind") == "error" else "hangs"
        if self.attempts and "how" not in self.attempts[-1]:
            return "running"  # or killed
        if "stopped" in self.summary:
            return "stopped, and can continue"
        return "complete" if self.summary else "running"

    def get_curve(self, stage: str, kind: str, name: str) -> list[tuple[int, float]]:
        """Return the (step, value) pairs of a metric, without values that are not finite."""
        return [
            (line["step"], line[name])
            for line in self.lines
            if line["stage"] == stage and line["kind"] == kind and _is_number(line.get(name))
        ]

    def list_metrics(self, stage: str, kind: str) -> list[str]:
        """Return the names of all metrics of a stage, in the order of their first lines."""
        lines = (line for line in self.lines if line["stage"] == stage and line["kind"] == kind)
        return [name for name in dict.fromkeys(name for line in lines for name in line) if name not in _NOT_METRICS]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if it is missing or cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a JSON-lines file; the last may be incomplete, because a run is writing it."""
    values = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            values.append(json.loads(line))
        except ValueError:
            continue
    return [value for value in values if isinstance(value, dict)]


def _join_attempts(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return one entry for each start of the run, merged from the lines about its beginning and its end."""
    attempts: list[dict[str, str]] = []
    for line in lines:
        if "began" in line:
            attempts.append(dict(line))
        elif attempts:
            attempts[-1] |= line
    return attempts


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys, such as `optimizer.lr`."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= flatten(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values
