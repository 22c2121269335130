"""Saving of checkpoints while training continues.

The state is copied first. A thread writes the copy, and the checkpoint gets its name when all ranks have finished.

The format is megatron-core's `dist_checkpointing`, whose planning and file writing are used here. This module adds what
megatron-core leaves to the caller. It copies the state. It writes the copy in a thread, because megatron-core would
fork a process that has threads, or start server processes that import torch again. It checks that every rank's part is
complete, and deletes all parts if one rank failed.
"""

from __future__ import annotations

import io
import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch import Tensor

from rl_megatron import __version__, disk
from rl_megatron.checkpoint.directory import (
    CONFIG,
    digest_file,
    name_checkpoint,
    name_random_state,
    publish,
)
from rl_megatron.checkpoint.rng_state import serialise_random_state
from rl_megatron.checkpoint.training_state import TrainingState
from rl_megatron.config.errors import RunFailed
from rl_megatron.topology.ranks import Ranks

_PAUSE_SECONDS = 0.005  # the time between two checks whether all ranks have finished writing
COMMON = "common.pt"  # megatron-core's file for state that is not a tensor
_Bucket = tuple[Path, str, tuple[list, list]]  # path, name, (objects, tensors)


class SaveFailed(RunFailed):
    """Raised on every rank if one rank could not write its part of a checkpoint. Earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class _Part:
    """The part of a checkpoint that one rank writes: copied tensors (megatron-core's "bucket") and complete files."""

    directory: Path
    bucket: _Bucket | None  # None if other ranks write all of this rank's tensors
    transforms: list
    files: dict[str, bytes]

    def write(self) -> tuple[list, dict[str, object]]:
        """Write everything, and return megatron-core's results and the manifest's entries of the files."""
        results, names = [], list(self.files)
        for name, content in self.files.items():
            (self.directory / name).write_bytes(content)
        if self.bucket is not None:
            # megatron-core uses queues between processes. Within one process, `queue.Queue` is enough. megatron-core
            # also turns the garbage collector off while it writes, which is harmless here.
            done, working = queue.Queue(), queue.Queue()
            working.put(0)
            FileSystemWriterAsync.write_preloaded_data(
                self.transforms, 0, self.bucket, done, working, True  # pyright: ignore[reportArgumentType]
            )  # fmt: skip
            _, results = done.get_nowait()
            if isinstance(results, Exception):
                raise results
            names.append(self.bucket[1])
        return results, {name: digest_file(self.directory / name) for name in names}


class Save:
    """A checkpoint that is being written. It owns the writing thread. Every rank calls every method."""

    def __init__(self, final: Path, part: _Part, complete: Callable[[list, dict[str, Any]], None], ranks: Ranks):
        """Start to write this rank's part.

        `finish` then calls `complete` on rank 0, with all ranks' results and manifest entries.
        """
        self.path, self._ranks = final, ranks
        self._part: _Part | None = part
        self._complete = complete
        self._written: tuple[list, dict[str, object]] = ([], {})
        self._failure: str | None = "its writer ended early"  # None once the writer has succeeded
        self._thread = threading.Thread(target=self._write, name=f"save {final.name}", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        assert self._part is not None  # this runs once
        try:
            self._written = self._part.write()
            self._failure = None
        except Exception as error:  # any error must reach the main thread of every rank
            self._failure = disk.describe(error, self.path)
        self._part = None  # frees the copied tensors

    def is_written(self) -> bool:
        """Return whether all ranks have finished writing, so that `finish` would not wait. Collective."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        writing = torch.tensor([int(self._thread.is_alive())], device=device)
        dist.all_reduce(writing)
        return not writing.item()

    def finish(self) -> Path:
        """Wait until every rank has written its part, complete the checkpoint and return its path. Collective.

        Raises:
            SaveFailed: A rank could not write. It is raised on every rank, and the written files are deleted.
        """
        self._wait()
        ranks = self._ranks
        failure = ranks.find_first_failure(self._failure)
        if failure is None:
            gathered: list = [None] * ranks.size
            dist.gather_object(self._written, gathered if ranks.leads else None)
            failure = ranks.try_on_rank0(lambda: self._publish(gathered), lambda error: disk.describe(error, self.path))
        if failure is not None:
            self.abandon()
            raise SaveFailed(f"checkpoint {self.path} could not be saved: {failure}")
        return self.path

    def abandon(self) -> None:
        """Wait until all ranks have stopped writing, and delete the written files. Collective."""
        self._wait()
        self._ranks.try_on_rank0(lambda: shutil.rmtree(_name_partial(self.path), ignore_errors=True))

    def _wait(self) -> None:
        while not self.is_written():  # waiting for the writers in one collective could time out
            time.sleep(_PAUSE_SECONDS)

    def _publish(self, gathered: list) -> None:
        entries = {name: entry for _, entries in gathered for name, entry in entries.items()}
        self._complete([results for results, _ in gathered], entries)


def begin_checkpoint(
    directory: Path, step: int, state: TrainingState, *, config: str | None = None, **extra: object
) -> Save:
    """Start to write the checkpoint `directory/step-<step>` of `state`. Collective.

    Args:
        directory: The directory of the checkpoints.
        step: The training step of the state.
        state: The state to save. Its weights must be gathered. It may change as soon as this function returns.
        config: The run's configuration as YAML, which is stored in the checkpoint.
        **extra: Further entries of the manifest.

    Raises:
        SaveFailed: The directory could not be created. It is raised on every rank.
    """
    model, ranks = state.model, state.model.topology.ranks
    manifest: dict[str, object] = {"head": model.head, "vocab_size": model.vocab_size, "precision": model.precision}
    manifest |= {"model": asdict(model.config), "layout": model.topology.describe(), **extra}
    files = {name_random_state(ranks.rank): serialise_random_state()}
    if config is not None and ranks.leads:
        files[CONFIG] = config.encode()
    return _begin_save(directory, step, state.build_sharded(), [*state.list_trained_tensors()], manifest, files, ranks)


def _begin_save(
    directory: Path,
    step: int,
    state: dict[str, Any],
    trained: Sequence[Tensor],
    manifest: dict[str, Any],
    files: dict[str, bytes],
    ranks: Ranks,
) -> Save:
    """Start to write every rank's sharded `state` and this rank's `files` (name → content).

    The tensors of `state` that share memory with those in `trained` are copied first.
    """
    final = directory / name_checkpoint(step)
    partial = _name_partial(final)
    failure = ranks.try_on_rank0(lambda: _make_empty(partial), lambda error: disk.describe(error, final))
    if failure is not None:
        raise SaveFailed(f"checkpoint {final} could not be saved: {failure}")
    tensors, common = save_preprocess(state)
    writer, metadata = _plan(tensors, partial)
    if ranks.leads:
        files = {**files, COMMON: _serialise(common)}
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    part = _Part(partial, _copy_bucket(writer.write_buckets, trained), transforms, files)

    def complete(results: list, entries: Mapping[str, object]) -> None:
        writer.finish(metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(partial))
        publish(partial, final, {"step": step, **manifest, "versions": collect_versions()}, entries)

    return Save(final, part, complete, ranks)


def collect_versions() -> dict[str, str]:
    """Return the versions of the packages that write a checkpoint."""
    versions = {"rl_megatron": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformer-engine"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _name_partial(final: Path) -> Path:
    return final.with_suffix(".incomplete")


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # an interrupted save may have left the directory
    partial.mkdir(parents=True)


def _plan(tensors: dict | list, partial: Path) -> tuple[FileSystemWriterAsync, Any]:
    """Return megatron-core's writer with this rank's plan, and on rank 0 the metadata of all ranks. Collective."""
    # megatron-core would start a server process per rank to collect results. `Save.finish` gathers them instead.
    filesystem_async._results_queue = queue.SimpleQueue()
    shards: dict[str, list[ShardedBase]] = {}
    for entry in nested_values(tensors):
        if is_main_replica(entry.replica_id):
            shards.setdefault(entry.key, []).append(entry)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    writer = FileSystemWriterAsync(str(partial), thread_count=1)  # one file per rank
    planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(shards), writer, planner=planner)
    return writer, planned[1]


def _copy_bucket(buckets: list | None, trained: Sequence[Tensor]) -> _Bucket | None:
    """Return this rank's bucket on the CPU, without memory shared with `trained`, or None if it has no tensors."""
    if not buckets:
        return None
    ((path, name, (objects, tensors)),) = buckets
    storages = {tensor.untyped_storage().data_ptr() for tensor in trained}

    def copy(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in storages:
            return tensor.detach().clone()  # .cpu() of a CPU tensor does not copy
        return tensor.detach().cpu()

    return path, name, (objects, [(item, copy(tensor)) for item, tensor in tensors])


def _serialise(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
