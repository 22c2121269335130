"""`RunInfo`: what sinks record about a run besides its metrics."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_megatron import disk
from rl_megatron.checkpoint.save import collect_versions
from rl_megatron.config.loading.load import to_yaml
from rl_megatron.config.schema import RunConfig
from rl_megatron.observability.run_files import RUN_INFO

_GIT_SECONDS = 10.0


@dataclass(frozen=True)
class RunInfo:
    """The configuration and the environment of a run.

    Attributes:
        config: The effective configuration, without secrets.
        git_revision: The commit of the current directory, with `-dirty` if tracked files differ from it. It is None
            outside a git repository.
        versions: Versions of packages by name.
        layout: The parallel layout in words.
        device: "cpu" or "cuda".
    """

    config: dict[str, Any]
    git_revision: str | None
    versions: dict[str, str]
    layout: str
    device: str

    @classmethod
    def from_config(cls, config: RunConfig, layout: str, device: str) -> RunInfo:
        """Return the information about the run of `config` in this process."""
        return cls(yaml.safe_load(to_yaml(config)), _find_git_revision(Path.cwd()), collect_versions(), layout, device)

    def write(self, output_dir: Path) -> None:
        """Write run_info.json. Users' own sinks, which get only `output_dir`, can read this file."""
        disk.replace_file(output_dir / RUN_INFO, json.dumps(asdict(self), indent=2) + "\n")


def _find_git_revision(directory: Path) -> str | None:
    """Return the commit that is checked out in `directory`, or None if git or a repository is missing."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
