"""Find the weights that a run starts from: a checkpoint, or a Hugging Face directory, which is converted to one."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.hub import explain_download
from rl_megatron.log import LOGGER
from rl_megatron.model.families import read_model

# An imported checkpoint is next to the output directory, not in it, because resume=false moves the output directory of
# an earlier run aside.
_SUFFIX = ".imported"
_CHECKPOINT = "checkpoint"
_SOURCE = "source.json"  # lists the files that the checkpoint was imported from


@dataclass(frozen=True)
class StartingModel:
    """The weights that a run starts from: a checkpoint, or a Hugging Face directory.

    Attributes:
        checkpoint: The checkpoint with these weights; None if a Hugging Face directory has not been imported yet.
        settings: The configuration sections `model` and `tokenizer` to use until the checkpoint exists.
    """

    source: Path
    checkpoint: Path | None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, model: str | os.PathLike[str], output_dir: Path) -> Self:
        """Return the checkpoint or the Hugging Face directory at `model`.

        Raises ConfigError if neither is there, the architecture is unknown, or files changed since the import.
        """
        source = Path(model)
        if (source / MANIFEST).is_file():
            return cls(source, source)
        if not (source / "config.json").is_file():
            what = "has neither" if source.exists() else "does not exist; it should be a directory with"
            raise ConfigError(
                f"model={os.fspath(model)!r} {what} {MANIFEST} (a checkpoint) {'nor' if source.exists() else 'or'} "
                f"config.json (a Hugging Face directory); nothing is downloaded{explain_download(source)}"
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

        `device` is the configuration's `device`, for which the process group is started.
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
    """Raise ConfigError if the checkpoint was imported from another directory, or if this one has changed since."""
    record = imported.with_name(_SOURCE)
    if not record.is_file() or json.loads(record.read_text("utf-8")) != _list_files(source):
        raise ConfigError(
            f"model={source}: {imported} was made from other files; choose another output_dir, or set "
            f"model={imported} to use that checkpoint"
        )


def _list_files(source: Path) -> dict[str, object]:
    """Return the sizes and modification times of a directory's files, to detect changes without reading weights."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    return {
        "directory": str(source.resolve()),
        "files": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files},
    }
