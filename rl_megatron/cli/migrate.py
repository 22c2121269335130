"""Translate a file of NeMo RL, verl or TRL into an experiment, for `rl-megatron migrate`."""

from __future__ import annotations

from pathlib import Path

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.migration.experiment import write_experiment
from rl_megatron.config.migration.read import read_source


def migrate(file: Path, library: str | None, output: Path | None) -> int:
    """Print the experiment, or write it to `output`, which must not exist; return the exit status."""
    if output is not None and output.exists():
        raise ConfigError(f"--output {output} exists, and is not overwritten; name another file")
    text = write_experiment(read_source(file, library))
    if output is None:
        print(text, end="")
        return 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {disk.describe(error, output)}") from error
    print(f"Written to {output}")
    return 0
