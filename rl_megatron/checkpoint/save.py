"""Saving: a copy of the state is taken at once, written while training goes on, and becomes a checkpoint when all ranks
have written their part.

The format is megatron-core's `dist_checkpointing`, whose planning and file writing this uses. What megatron-core leaves
to the caller is here: a copy that training does not write into, a thread to write it (its own writers are forks of a
process with threads, or servers that import torch once more), the moment when ranks agree that it is complete, and what
becomes of a save that fails on one of them.
"""

from __future__ import annotations

import io
import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch import Tensor

from rl_megatron import __version__
from rl_megatron.checkpoint import directory as checkpoint
from rl_megatron.topology.collective_errors import agreed_failure, on_main_rank

_PAUSE = 0.005  # seconds between two questions whether all have written
COMMON = "common.pt"  # what is no tensor of the model or its moments; its name is megatron-core's


class SaveFailed(RuntimeError):
    """A checkpoint that could not be written, on any rank; the ones before it stand."""


@dataclass(frozen=True)
class _Part:
    """What one rank writes: `bucket` in megatron-core's terms, its tensors copied, and whole files beside it."""

    directory: Path
    bucket: Any | None  # (path, name, (objects, tensors)); None for a rank whose tensors others write
    transforms: list
    files: dict[str, bytes]

    def write(self) -> tuple[list, dict[str, Any]]:
        """Writes, and returns megatron-core's results and the manifest's entries of the files."""
        results, names = [], list(self.files)
        for name, content in self.files.items():
            (self.directory / name).write_bytes(content)
        if self.bucket is not None:
            # Its queues are for processes; its garbage collection stands still meanwhile, which training can bear.
            found, working = queue.Queue(), queue.Queue()
            working.put(0)
            FileSystemWriterAsync.write_preloaded_data(self.transforms, 0, self.bucket, found, working, True)
            _, results = found.get_nowait()
            if isinstance(results, Exception):
                raise results
            names.append(self.bucket[1])
        return results, {name: checkpoint.file_entry(self.directory / name) for name in names}


class Save:
    """A checkpoint on its way to the disk. Every rank calls every method."""

    def __init__(self, final: Path, part: _Part, complete: Callable[[list, dict[str, Any]], None]):
        """`complete`, on rank 0, makes the checkpoint of all ranks' results and entries."""
        self.path = final
        self._part, self._complete = part, complete
        self._written: tuple[list, dict[str, Any]] = ([], {})
        self._failure: str | None = "its writer ended early"  # until it says otherwise
        self._thread = threading.Thread(target=self._write, name=f"save {final.name}", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        try:
            self._written = self._part.write()
            self._failure = None
        except Exception as error:  # whatever it is: another thread, on every rank, has to hear of it
            self._failure = _failure(error, self.path)
        self._part = None  # and with it the copy

    def is_written(self) -> bool:
        """Whether `finish` would not have to wait, on any rank."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        writing = torch.tensor([int(self._thread.is_alive())], device=device)
        dist.all_reduce(writing)
        return not writing.item()

    def finish(self) -> Path:
        """Waits for every rank's part and makes the checkpoint of them.

        Raises: SaveFailed, on every rank, where any could not write; what has been written is removed.
        """
        self._wait()
        failure = agreed_failure(self._failure)
        if failure is None:
            everyones: list = [None] * dist.get_world_size()
            dist.gather_object(self._written, everyones if dist.get_rank() == 0 else None)
            failure = on_main_rank(lambda: self._publish(everyones), lambda error: _failure(error, self.path))
        if failure is not None:
            self.abandon()
            raise SaveFailed(f"checkpoint {self.path} could not be saved: {failure}")
        return self.path

    def abandon(self) -> None:
        """Waits for what is being written and removes it."""
        self._wait()
        on_main_rank(lambda: shutil.rmtree(_partial(self.path), ignore_errors=True))

    def _wait(self) -> None:
        while not self.is_written():  # each question is answered at once: no rank waits until its patience is over
            time.sleep(_PAUSE)

    def _publish(self, everyones: list) -> None:
        entries = {name: entry for _, entries in everyones for name, entry in entries.items()}
        self._complete([results for results, _ in everyones], entries)


def begin_save(
    directory: Path,
    step: int,
    state: dict[str, Any],
    manifest: dict[str, Any],
    files: dict[str, bytes],
) -> Save:
    """Starts to write `directory/step-<step>` from every rank's sharded `state`, which may change as soon as this
    returns. `manifest` describes it; `files` are this rank's own, by name.

    Raises: SaveFailed, on every rank, where the directory cannot be made.
    """
    final = directory / checkpoint.name_of(step)
    partial = _partial(final)
    failure = on_main_rank(lambda: _make_empty(partial), lambda error: _failure(error, final))
    if failure is not None:
        raise SaveFailed(f"checkpoint {final} could not be saved: {failure}")
    tensors, common = save_preprocess(state)
    writer, metadata = _plan(tensors, partial)
    if dist.get_rank() == 0:
        files = {**files, COMMON: _serialised(common)}
    kept = [entry.data for entry in nested_values(tensors) if isinstance(entry, ShardedTensor)]
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    part = _Part(partial, _copied(writer.write_buckets, kept), transforms, files)

    def complete(results: list, entries: dict[str, Any]) -> None:
        writer.finish(metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(partial))
        checkpoint.publish(partial, final, {"step": step, **manifest, "versions": versions()}, entries)

    return Save(final, part, complete)


def versions() -> dict[str, str]:
    """Of what wrote the checkpoint."""
    found = {"rl_megatron": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("megatron-core", "transformer-engine"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _partial(final: Path) -> Path:
    return final.with_suffix(".incomplete")


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted save
    partial.mkdir(parents=True)


def _plan(tensors: dict[str, Any], partial: Path) -> tuple[FileSystemWriterAsync, Any]:
    """megatron-core's writer, who knows what this rank writes, and on rank 0 the metadata of the whole; collective."""
    # A place for results, which here go another way. megatron-core's own is a server process on every rank.
    filesystem_async._results_queue = queue.SimpleQueue()
    shards: dict[str, list[ShardedTensor]] = {}
    for entry in nested_values(tensors):
        if is_main_replica(entry.replica_id):
            shards.setdefault(entry.key, []).append(entry)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    writer = FileSystemWriterAsync(str(partial), thread_count=1)  # one file a rank
    planned, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(shards), writer, planner=planner)
    return writer, planned[1]


def _copied(buckets: list, kept: list[Tensor]) -> Any | None:
    """The bucket of this rank, its tensors on the CPU and its own: none shares memory with one of `kept`."""
    if not buckets:
        return None
    ((path, name, (objects, tensors)),) = buckets
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept}

    def own(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in storages:
            return tensor.detach().clone()  # .cpu() of a CPU tensor is that tensor
        return tensor.detach().cpu()

    return path, name, (objects, [(item, own(tensor)) for item, tensor in tensors])


def _serialised(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _failure(error: BaseException, final: Path) -> str:
    """The error, or the operating system's behind it, with the room that is left where it happened."""
    told = checkpoint.system_error(error) or error
    try:
        disk = shutil.disk_usage(next(parent for parent in final.parents if parent.exists()))
        free = f"{disk.free:,} bytes free of {disk.total:,} on its file system"
    except OSError:  # of the same file system: it may be gone
        free = "its file system does not answer"
    return f"{type(told).__name__}: {told}; {free}"
