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
from rl_megatron.observability.attempts import ATTEMPTS, joined
from rl_megatron.observability.failure_file import FAILURE, PREVIOUS

CONFIG, SUMMARY, RUN_INFO = "config.yaml", "summary.json", "run_info.json"


@dataclass(frozen=True)
class RecordedRun:
    """What is in the output directory of a run.

    Attributes:
        directory: The directory.
        lines: The lines of metrics.jsonl.
        config: The effective configuration.
        summary: The content of summary.json; empty if the run has not ended in an orderly way.
        failure: The content of failure.json, or None.
        earlier_failure: That of the attempt before, or None.
        samples: The lines of samples.jsonl: completions of evaluations.
        info: Git revision, versions and layout; empty if they are unknown.
        attempts: The starts of the run, as `attempts.joined` returns them.
    """

    directory: Path
    lines: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] | None = None
    earlier_failure: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path) -> RecordedRun:
        """Read the directory of a run, which may still go on.

        Raises:
            ConfigError: It is not the output directory of a run.
        """
        if not (directory / CONFIG).is_file():
            raise ConfigError(f"{directory} is not the output_dir of a run: it has no {CONFIG}")
        return cls(
            directory,
            _lines(directory / METRICS_FILE),
            yaml.safe_load((directory / CONFIG).read_text()),
            _object(directory / SUMMARY) or {},
            _object(directory / FAILURE),
            _object(directory / PREVIOUS),
            _lines(directory / SAMPLES),
            _object(directory / RUN_INFO) or {},
            joined(_lines(directory / ATTEMPTS)),
        )

    @property
    def name(self) -> str:
        """Return the last part of the directory's path."""
        return self.directory.resolve().name

    @property
    def stages(self) -> list[str]:
        """Return the names of the stages that have metrics, in their order."""
        return list(dict.fromkeys(line["stage"] for line in self.lines))

    @property
    def state(self) -> str:
        """Return whether the run is complete, stopped, failed, or has not ended as far as its files say."""
        if self.failure is not None:
            return "failed" if self.failure.get("kind") == "error" else "hangs"
        if self.attempts and "how" not in self.attempts[-1]:
            return "running"  # or killed
        if "stopped" in self.summary:
            return "stopped, and can go on"
        return "complete" if self.summary else "running"

    def curve(self, stage: str, kind: str, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of a metric, without those that are no finite numbers."""
        return [
            (line["step"], line[name])
            for line in self.lines
            if line["stage"] == stage and line["kind"] == kind and _is_number(line.get(name))
        ]

    def metric_names(self, stage: str, kind: str) -> list[str]:
        """Return the names of all metrics of a stage, in the order of their first lines."""
        lines = (line for line in self.lines if line["stage"] == stage and line["kind"] == kind)
        return [name for name in dict.fromkeys(name for line in lines for name in line) if name not in _NO_METRICS]


_NO_METRICS = ("stage", "step", "kind")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value and abs(value) != float("inf")


def _object(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if it is missing or cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file; a run that goes on may be writing the last one."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their paths, as in `optimizer.lr`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found
