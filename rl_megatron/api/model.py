"""Find the weights that a run starts from: a checkpoint, or a Hugging Face directory, which becomes one."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.log import LOGGER
from rl_megatron.model.families import read_model

# The checkpoint that is made of a Hugging Face directory is next to the output directory, so that resume=false, which
# moves an earlier run aside, does not move it.
_SUFFIX = ".imported"
_CHECKPOINT = "checkpoint"
_SOURCE = "source.json"  # which files it was made from


@dataclass(frozen=True)
class StartingModel:
    """The weights that a run starts from: a checkpoint, or a Hugging Face directory.

    Attributes:
        checkpoint: The checkpoint with these weights; None if a Hugging Face directory has not been imported yet.
        settings: The sections of the configuration that stand for the checkpoint until there is one.
    """

    source: Path
    checkpoint: Path | None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, model: str | os.PathLike[str], output_dir: Path) -> Self:
        """Return the checkpoint or the Hugging Face directory at `model`.

        A directory whose architecture is unknown, or that changed since it was imported, is a ConfigError.
        """
        source = Path(model)
        if (source / MANIFEST).is_file():
            return cls(source, source)
        if not (source / "config.json").is_file():
            what = "has neither" if source.exists() else "does not exist; it should be a directory with"
            raise ConfigError(
                f"model={os.fspath(model)!r} {what} {MANIFEST} (a checkpoint) {'nor' if source.exists() else 'or'} "
                "config.json (a Hugging Face directory); nothing is downloaded"
            )
        imported = _choose_import_path(output_dir)
        if imported.is_dir():
            _refuse_another(source, imported)
            return cls(source, imported)
        config_file = source / "config.json"
        _, section = read_model(json.loads(config_file.read_text("utf-8")), str(config_file))
        return cls(source, None, {"model": asdict(section), "tokenizer": {"path": str(source)}})

    def import_into(self, output_dir: Path, device: str) -> Path:
        """Import the Hugging Face directory, and return the checkpoint. Collective under torchrun; rank 0 imports.

        `device` is the key of the configuration, for the process group.
        """
        imported = _choose_import_path(output_dir)
        if "RANK" not in os.environ:
            _import(self.source, imported)
            return imported
        from rl_megatron.topology.device import start_device
        from rl_megatron.topology.ranks import Ranks

        start_device(device)
        failure = Ranks.detect().try_on_rank0(lambda: _import(self.source, imported), str)
        if failure is not None:
            raise ConfigError(failure)
        return imported


def _choose_import_path(output_dir: Path) -> Path:
    return output_dir.with_name(output_dir.name + _SUFFIX) / _CHECKPOINT


def _import(source: Path, imported: Path) -> None:
    from rl_megatron.checkpoint.hf_convert import import_weights
    from rl_megatron.checkpoint.unused_rows import find_unused_rows
    from rl_megatron.cli.convert import show_progress

    imported.parent.mkdir(parents=True, exist_ok=True)
    imported.with_name(_SOURCE).write_text(json.dumps(_list_files(source), indent=1) + "\n", "utf-8")
    with show_progress(f"import {source}") as report:
        import_weights(source, imported, report)
    unused = find_unused_rows(source, runs_model=False)
    if unused is not None:
        LOGGER.info("%s: %s", source, unused)


def _refuse_another(source: Path, imported: Path) -> None:
    """Refuse a directory if the checkpoint was made from another one, or if it changed since."""
    record = imported.with_name(_SOURCE)
    if not record.is_file() or json.loads(record.read_text("utf-8")) != _list_files(source):
        raise ConfigError(
            f"model={source}: {imported} was made from other files; choose another output_dir, or set "
            f"model={imported} to continue with them"
        )


def _list_files(source: Path) -> dict[str, object]:
    """Return the sizes and times of a directory's files, which change with them; no weights are read."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    return {
        "directory": str(source.resolve()),
        "files": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files},
    }
