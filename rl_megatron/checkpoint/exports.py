"""Exports of a stage's checkpoints in Hugging Face's format. Rank 0 writes them while training continues.

The export of `RUN/checkpoints/STAGE/step-N` is the directory `RUN/exported/STAGE/step-N`. It gets this name once it is
complete.
"""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import torch

from rl_megatron import disk, log
from rl_megatron.checkpoint.adapters import holds_adapter
from rl_megatron.checkpoint.directory import (
    LEFTOVERS,
    REPLACING,
    find_checkpoints,
    name_checkpoint,
    read_manifest_alone,
)
from rl_megatron.checkpoint.hf_convert import describe_for_hugging_face, export_peft, export_weights
from rl_megatron.checkpoint.hf_directory import refuse_adapter_with_head
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.checkpoint_metadata import find_hugging_face_files
from rl_megatron.config.commands import format_command
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.train import TrainConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.topology.ranks import Ranks

_GB = 1e9
_KEY = "train.export_hf=true"
_PAUSE_SECONDS = 0.05  # the time between two checks whether an export has ended


def locate_exports(checkpoints: Path) -> Path:
    """Return the directory of the exports of a stage's checkpoints."""
    return checkpoints.parent.parent / "exported" / checkpoints.name


def locate_export(checkpoint: Path) -> Path:
    return locate_exports(checkpoint.parent) / checkpoint.name


class Exporter:
    """The exports of a stage, one at a time, each written by a thread of rank 0. Every rank calls every method."""

    def __init__(self, checkpoints: Path, ranks: Ranks, is_wanted: bool = True):
        """Begin with no running export. If `is_wanted` is false, the methods do nothing."""
        self._checkpoints, self._ranks = checkpoints, ranks
        self._is_wanted, self._writes = is_wanted, is_wanted and ranks.leads
        self._thread: threading.Thread | None = None  # on rank 0 only, like the attributes below
        self._is_cancelled = False
        self._failure: str | None = None

    def begin(self, checkpoint: Path) -> None:
        """Start to export a complete checkpoint, which must exist until the export ends. No export may be running."""
        if self._writes:
            self._is_cancelled, self._failure = False, None
            self._thread = threading.Thread(
                target=self._export, args=(checkpoint,), name=f"export {checkpoint.name}", daemon=True
            )
            self._thread.start()

    def begin_missing(self) -> None:
        """Start to export the newest checkpoint if it has no export, for example because the run was killed."""
        saved = find_checkpoints(self._checkpoints) if self._writes else []
        if saved and not locate_export(saved[-1]).exists():
            self.begin(saved[-1])

    def wait(self, must_succeed: bool = True) -> None:
        """Wait until no export is being written. Collective if exports are wanted.

        Raises:
            SaveFailed: The export could not be written, and `must_succeed` is true. It is raised on every rank.
        """
        if not self._is_wanted:
            return
        while self._ranks.share(lambda: self._thread is not None and self._thread.is_alive()):
            time.sleep(_PAUSE_SECONDS)  # waiting for the export in one collective could time out
        failure = self._ranks.share(lambda: self._failure)
        self._thread = self._failure = None
        if failure is not None and must_succeed:
            raise SaveFailed(failure)
        if failure is not None and self._writes:
            log.LOGGER.warning("%s; training continues", failure)

    def discard(self, step: int) -> None:
        """Delete the export of a step that is about to be saved again, after a roll-back. No export may be running."""
        if self._writes:
            try:
                _delete(locate_export(self._checkpoints / name_checkpoint(step)))
            except OSError as error:  # the new export replaces it in any case, or fails for the same reason
                log.LOGGER.warning("the export of step %d could not be deleted: %s", step, error)

    def close(self) -> None:
        """Stop the export that is being written, and delete its files."""
        self._is_cancelled = True
        if self._thread is not None:
            self._thread.join()

    def _export(self, checkpoint: Path) -> None:
        began, target = time.monotonic(), locate_export(checkpoint)
        try:
            self._write(checkpoint, target)
            _delete_without_checkpoint(self._checkpoints)
        except CancelledError:
            return
        except Exception as error:  # `wait` reports any error, together with the remedy
            by_hand = format_command("convert", "export", str(checkpoint), str(target))
            reason = f"{error}; {disk.describe_space(target)}"
            self._failure = (
                f"{checkpoint} could not be exported to {target}: {reason}; the checkpoint is complete, and {by_hand} "
                "exports it"
            )
            return
        log.LOGGER.info("%s: exported for Hugging Face in %.1f s", target, time.monotonic() - began)

    def _write(self, checkpoint: Path, target: Path) -> None:
        new = target.with_name(f"{target.name}{REPLACING}")
        _delete(new)
        if holds_adapter(read_manifest_alone(checkpoint)):
            export_peft(checkpoint, new, verify=False)
        else:
            export_weights(checkpoint, new, progress=self._raise_if_cancelled, verify=False)
        _delete(target)
        new.rename(target)

    def _raise_if_cancelled(self, done: int, total: int) -> None:
        if self._is_cancelled:
            raise CancelledError


def check_exports(
    train: TrainConfig,
    model: ModelConfig,
    *,
    head: str,
    precision: str,
    is_adapter: bool,
    tokenizer: Tokenizer,
    output_dir: Path,
    init_from: Path | None,
) -> None:
    """Check before the first step that a family can express a stage's model, and that exports fit onto the disk.

    Adapters are small, so their size is not checked. `train` states how many checkpoints are kept.
    """
    if not train.export_hf:
        return
    remedy = "set train.export_hf=false"
    try:
        if is_adapter:
            refuse_adapter_with_head(output_dir, {"peft": {}, "head": head})
        carried = None if init_from is None else find_hugging_face_files(init_from)
        *_, table = describe_for_hugging_face(model, head, carried, tokenizer, tokenizer.vocab_size, "the run")
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {error}; {remedy}") from error
    if is_adapter:
        return
    size = sum(torch.Size(shape).numel() for shape in table.hf_shapes.values()) * (4 if precision == "fp32" else 2)
    kept = train.keep_checkpoints + (train.keep_best is not None)
    number = min(train.most_saves, kept + 1)  # and the one being written
    home = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(home).free
    if number * size > free:
        raise ConfigError(
            f"{_KEY} needs {number * size / _GB:,.2f} GB for {number} exports of {size / _GB:,.2f} GB, and {home} has "
            f"{free / _GB:,.2f} GB free; free space, set another output_dir, lower train.keep_checkpoints, or {remedy}"
        )


def _delete_without_checkpoint(checkpoints: Path) -> None:
    """Delete the exports of deleted checkpoints, and incomplete exports of killed runs."""
    kept = {path.name for path in find_checkpoints(checkpoints)}
    for path in locate_exports(checkpoints).glob("step-*"):
        if path.suffix in LEFTOVERS or path.name not in kept:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a directory if it exists. It is renamed first, so that a killed run leaves nothing that looks complete."""
    if path.exists():
        deleted = path if path.suffix == LEFTOVERS[-1] else path.with_name(f"{path.name}{LEFTOVERS[-1]}")
        if deleted != path:
            shutil.rmtree(deleted, ignore_errors=True)
            path.rename(deleted)
        shutil.rmtree(deleted)
