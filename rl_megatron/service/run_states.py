"""The training runs of a service on this rank: those that were used lately are in memory, the others on the disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import OrderedDict
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_megatron import log
from rl_megatron.checkpoint.directory import digest_file
from rl_megatron.config.errors import ConfigError, describe_error
from rl_megatron.disk import sync_directory
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.adapter_runs import AdapterRun, AdapterSlot


class RunStates:
    """The training runs by name. All methods are collective, and every rank calls them in the same order.

    A run that is moved to the disk and back computes bitwise what it would compute if it had stayed in memory.
    """

    def __init__(self, ranks: Ranks, directory: Path, most_in_memory: int):
        """Begin without runs.

        Args:
            ranks: The ranks of the service.
            directory: The directory for runs that are not in memory. What an earlier server left in it is removed.
            most_in_memory: How many runs are in memory at most.
        """
        self._ranks, self._directory, self._most = ranks, directory, most_in_memory
        self._in_memory: OrderedDict[str, AdapterRun] = OrderedDict()  # the least recently used run is first
        self._on_disk: dict[str, tuple[AdapterSlot, Path]] = {}
        ranks.run_on_rank0(lambda: shutil.rmtree(directory, ignore_errors=True))

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory or name in self._on_disk

    def add(self, name: str, run: AdapterRun) -> None:
        """Add a run."""
        self._in_memory[name] = run
        self._limit_memory()

    def restore(self, name: str, slot: AdapterSlot, directory: Path) -> None:
        """Add a run with the state that `keep` has written to the directory of its name.

        Raises:
            ConfigError: On every rank, if the state was written with another model, precision or layout.
        """
        self._ranks.all_or_none(lambda: _require_file(self._find_file(directory), slot))
        self._on_disk[name] = slot, directory

    def get(self, name: str) -> AdapterRun:
        """Return a run, which is read from the disk if it is not in memory.

        Raises:
            ConfigError: On every rank, if its file cannot be read.
        """
        if name in self._on_disk:
            slot, directory = self._on_disk[name]
            self.add(name, self._ranks.all_or_none(lambda: _read_run(slot, self._find_file(directory))))
            del self._on_disk[name]
            self._remove_file(name)
        self._in_memory.move_to_end(name)
        return self._in_memory[name]

    def drop(self, name: str) -> None:
        """Forget a run."""
        self._in_memory.pop(name, None)
        self._on_disk.pop(name, None)
        self._remove_file(name)

    def keep(self, path: Path) -> str | None:
        """Write the states of all runs to directories in `path`; return what failed on the first rank that failed."""
        failure = None
        try:
            for name, run in self._in_memory.items():
                self._write_run(run, path / name)
            for name, (_, directory) in self._on_disk.items():
                _link(self._find_file(directory), self._find_file(path / name))
        except (OSError, SafetensorError) as error:
            failure = describe_error(error)
        failure = self._ranks.find_first_failure(failure)
        if failure is None:
            self._on_disk = {name: (slot, path / name) for name, (slot, _) in self._on_disk.items()}
            for name in self._on_disk:
                self._remove_file(name)
        return failure

    def _find_file(self, directory: Path) -> Path:
        return directory / f"rank-{self._ranks.rank}.safetensors"

    def _remove_file(self, name: str) -> None:
        """Remove the file of a run that was not in memory, if there is one."""
        self._find_file(self._directory / name).unlink(missing_ok=True)

    def _limit_memory(self) -> None:
        """Move the least recently used runs to the disk until few enough are in memory."""
        while len(self._in_memory) > self._most:
            name, run = next(iter(self._in_memory.items()))
            failure, directory = None, self._directory / name
            try:
                self._write_run(run, directory)
            except (OSError, SafetensorError) as error:
                failure = describe_error(error)
            failure = self._ranks.find_first_failure(failure)
            if failure is not None:
                log.once(
                    f"training runs stay in memory, because they cannot be written to {self._directory}: {failure}"
                )
                return
            del self._in_memory[name]
            self._on_disk[name] = run.slot, directory

    def _write_run(self, run: AdapterRun, directory: Path) -> None:
        """Write the state of a run on this rank, with its accumulated gradients, to be read in the same layout."""
        path = self._find_file(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"{name}.{index}": t for name, part in run.state().items() for index, t in enumerate(part)}
        metadata = {
            "steps": str(run.num_steps), "has_gradients": str(int(run.has_gradients)),
            "parts": _describe_parts(run.slot),
        }  # fmt: skip
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
        digest_file(path)  # it also syncs the file
        sync_directory(directory)


def _read_run(slot: AdapterSlot, path: Path) -> AdapterRun:
    run = AdapterRun(slot, seed=0)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            state = {
                name: [file.get_tensor(f"{name}.{index}").to(slot.topology.device) for index in range(len(part))]
                for name, part in run.state().items()
            }
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {describe_error(error)}") from error
    run.set_state(state, int(metadata["steps"]), metadata["has_gradients"] == "1")
    return run


def _require_file(path: Path, slot: AdapterSlot) -> None:
    same = "start the server with the model, the precision and the layout that it had"
    if not path.exists():
        raise ConfigError(f"{path} is not there; {same}")
    try:
        with safe_open(path, "pt") as file:
            parts = file.metadata()["parts"]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {describe_error(error)}") from error
    if parts != _describe_parts(slot):
        raise ConfigError(f"{path} has other parts of the adapter than this rank; {same}")


def _describe_parts(slot: AdapterSlot) -> str:
    """Return a text that tells the parts of an adapter on this rank from those of other models and layouts."""
    parts = [(entry.key, tuple(entry.global_offset), tuple(entry.local_shape)) for entry in slot.entries]
    text = f"{parts} {slot.dtypes} {slot.topology.world_size}"
    return hashlib.sha256(text.encode()).hexdigest()


def _link(file: Path, name: Path) -> None:
    """Give a file a further name or, where the file system has no hard links, copy it."""
    name.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, name)
    except OSError as error:
        log.once(f"{name.parent.parent}: files are copied, because they cannot be linked: {error.strerror}")
        shutil.copyfile(file, name)
        digest_file(name)  # it also syncs the file
    sync_directory(name.parent)
