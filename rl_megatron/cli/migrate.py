"""Translate a file of NeMo RL, verl or TRL into an experiment, for `rl-megatron migrate`."""

from __future__ import annotations

from pathlib import Path

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.migration.experiment import translate, write_experiment
from rl_megatron.config.migration.read import read_source


def migrate(file: Path, library: str | None, output: Path | None) -> int:
    """Print the experiment, or write it to `output`, which must not exist; return the exit status."""
    if output is not None and output.exists():
        raise ConfigError(f"--output {output} exists, and is not overwritten; name another file")
    source = read_source(file, library)
    text = write_experiment(source)
    if output is None:
        print(text, end="")
        return 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {disk.describe(error, output)}") from error
    result = translate(source)
    counts = {
        "not quite the same": len(result.different), "without a counterpart": len(result.missing),
        "not recognised": len(result.unknown),
    }  # fmt: skip
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    print(f"Written to {output}{f'; its end lists settings: {listed}' if listed else ''}")
    return 0
