"""`WeightDirectory`: writes each version of a policy's weights or adapter to a directory that servers can read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rl_megatron import disk
from rl_megatron.checkpoint.hf_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SINGLE
from rl_megatron.checkpoint.safetensors_files import WeightReader, WeightWriter
from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused, fingerprint


class WeightSource(Protocol):
    """A source of whole tensors: a `WeightSender` or an exporter."""

    @property
    def plan(self) -> RefitPlan:
        """Return the plan of the tensors."""
        ...

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of every tensor. Collective."""
        ...


class FileNames(NamedTuple):
    """The names of the files of a directory."""

    config: str  # the JSON file with the plan's `hf_config`
    weights: str  # the file with the tensors, if one is enough


MODEL_FILES = FileNames("config.json", SINGLE)
ADAPTER_FILES = FileNames(ADAPTER_CONFIG, ADAPTER_WEIGHTS)


class WeightDirectory:
    """A new directory that servers can read. Each version has a subdirectory of safetensors files.

    Every rank of the policy calls every method. Rank 0 writes.
    """

    def __init__(self, parent: Path, ranks: Ranks, max_shard_bytes: int):
        """Prepare; nothing is written yet. Rank 0 and all servers reach `parent` by this path.

        `max_shard_bytes` limits the tensors in a file.
        """
        self._parent, self._ranks, self._max_shard_bytes = parent, ranks, max_shard_bytes
        self._directory: Path | None = None  # on rank 0

    def write(self, name: str, source: WeightSource, files: FileNames = MODEL_FILES) -> Path:
        """Write the tensors that a source has now, and return their directory. Collective.

        The files are written under a temporary name, read back, and compared with the fingerprints of the tensors. Then
        the directory is renamed to `name`, so `name` is always complete.

        Raises:
            WeightsRefused: On every rank, if the directory cannot be written or its files differ from the weights.
        """
        plan, failure, target = source.plan, None, Path()
        weights = source.stream()
        if self._ranks.leads:
            try:
                target = self._write(name, plan, weights, files)
            except (OSError, RuntimeError, ConfigError) as error:
                failure = f"the weights could not be written to {self._parent}: {disk.describe(error, self._parent)}"
        for _ in weights:  # all ranks take part in the collectives, even if rank 0 cannot write
            pass
        failure = self._ranks.share(lambda: failure)
        if failure is not None:
            raise WeightsRefused(failure)
        return self._ranks.share(lambda: target)

    def keep_only(self, directory: Path) -> None:
        """Delete all other directories."""
        if self._directory is not None:
            for other in self._directory.iterdir():
                if other != directory:
                    shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Delete all that was written."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _write(self, name: str, plan: RefitPlan, weights: Iterator[tuple[str, Tensor]], files: FileNames) -> Path:
        if self._directory is None:
            self._parent.mkdir(parents=True, exist_ok=True)
            prefix = disk.make_temporary_prefix("weights", self._parent)
            self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=self._parent)).absolute()
            self._directory.chmod(0o755)  # servers may run as another user
        partial, target = self._directory / f"{name}.partial", self._directory / name
        for directory in (partial, target):
            shutil.rmtree(directory, ignore_errors=True)
        partial.mkdir()
        specs = {spec.name: spec for bucket in plan.buckets for spec in bucket.tensors}
        shapes = {name: spec.shape for name, spec in specs.items()}
        writer = WeightWriter(partial, shapes, lambda name: specs[name].torch_dtype, self._max_shard_bytes)
        sent = {}
        try:
            for tensor, weight in weights:
                weight = weight.cpu()
                sent[tensor] = fingerprint(weight).item()
                writer.write(tensor, 0, 0, weight)
            writer.finish()
        finally:
            writer.close()
        with WeightReader(writer.locations) as reader:
            for tensor, spec in specs.items():
                written = torch.empty(spec.shape, dtype=spec.torch_dtype)
                reader.read_rows(tensor, 0, written)
                if fingerprint(written).item() != sent[tensor]:
                    raise RuntimeError(f"{tensor} differs from what was written")
        if (partial / SINGLE).exists():
            (partial / SINGLE).rename(partial / files.weights)
        (partial / files.config).write_text(json.dumps(plan.hf_config, indent=2) + "\n")
        for path in (partial, *partial.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        partial.rename(target)
        return target
