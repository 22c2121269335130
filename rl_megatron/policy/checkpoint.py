"""Checkpoints on megatron-core's `dist_checkpointing`: written whole or not at all, loadable under another layout.

A checkpoint is a directory `step-000123`. It is written as `step-000123.incomplete` and renamed when every rank has
written its part and `manifest.json` (step, model, file sizes) is there, so a run killed while saving leaves the
previous checkpoint as the newest complete one.
"""

from __future__ import annotations

import json
import queue
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families import NOT_OF_THE_WEIGHTS
from rl_megatron.model.shards import SHARDING_METADATA

MANIFEST = "manifest.json"
_MESSAGE_LENGTH = 600  # megatron-core lists every key of the model
_STEP = re.compile(r"step-(\d+)")


def save(directory: Path, step: int, sharded_state: dict[str, Any], model: ModelConfig, extra: dict[str, Any]) -> Path:
    """Writes `directory/step-<step>` from every rank's `sharded_state`; collective. `extra` is kept in the manifest."""
    final = directory / f"step-{step:06d}"
    partial = final.with_suffix(".incomplete")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of an interrupted save
        partial.mkdir(parents=True)
    dist.barrier()
    # Saving is synchronous, so a queue within the process takes its results. megatron-core's own is a server process on
    # every rank that imports torch once more (seconds, hundreds of MB) and outlives a killed run.
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(sharded_state, str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        publish(partial, final, {"step": step, "model": asdict(model), **extra})
    dist.barrier()
    return final


def publish(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Makes of the finished directory `partial` the checkpoint `final`: its manifest, then its name."""
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    (partial / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=1))
    replaced = final.with_suffix(".replaced")
    if final.exists():  # of a run that is being redone from earlier
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def tensors_of_model(model: torch.nn.Module) -> dict[str, Any]:
    """What `dist_checkpointing` saves, or is to fill, of a model chunk: its tensors and where they lie in the whole.

    Without the "extra states" that its modules declare: they are for FP8, empty here, and others in each backend.
    """
    entries = model.sharded_state_dict(metadata=dict(SHARDING_METADATA))
    return {key: entry for key, entry in entries.items() if isinstance(entry, ShardedTensor | ShardedTensorFactory)}


def load_model(model: torch.nn.Module, loaded: dict[str, Any], without: str | None = None) -> None:
    """Gives a model chunk all its tensors, those whose names begin with `without` excepted.

    Raises: RuntimeError naming tensors that `loaded` lacks, or that the model does not have.
    """
    absent, unknown = model.load_state_dict(loaded, strict=False)
    absent = [key for key in absent if not key.endswith("_extra_state") and not (without and key.startswith(without))]
    if absent or unknown:
        raise RuntimeError(f"the loaded state lacks {absent} and has {unknown}, which the model has not")


def load(checkpoint: Path, sharded_state: dict[str, Any], partial: bool = False) -> dict[str, Any]:
    """Fills `sharded_state`, laid out for *this* topology, from `checkpoint`; collective.

    Raises: ConfigError where `sharded_state` asks for what the checkpoint lacks, or, unless `partial`, the checkpoint
    holds what `sharded_state` does not ask for.
    """
    strict = StrictHandling.RAISE_UNEXPECTED if partial else StrictHandling.RAISE_ALL
    try:
        return dist_checkpointing.load(sharded_state, str(checkpoint), strict=strict)
    except dist_checkpointing.core.CheckpointingException as error:
        raise ConfigError(f"checkpoint {checkpoint} does not fit this run: {str(error)[:_MESSAGE_LENGTH]}") from error


def read_manifest(checkpoint: Path, model: ModelConfig | None = None) -> dict[str, Any]:
    """The manifest of a complete, untruncated checkpoint, of `model` where one is given.

    Raises: ConfigError naming the missing or truncated file, or the model keys that differ.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} does not exist; existing: {_names_in(checkpoint.parent)}")
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError(f"checkpoint {checkpoint} has no {MANIFEST}: it is incomplete, or not a checkpoint directory")
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"checkpoint {checkpoint}: {MANIFEST} is not valid JSON ({error}); use an older one"
        ) from error
    for name, size in manifest["files"].items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ConfigError(f"checkpoint {checkpoint} is damaged: {name} {state}; use an older one")
    if model is not None:
        saved, wanted = asdict(ModelConfig()) | manifest["model"], asdict(model)  # keys since added had their default
        differing = [k for k in wanted if k not in NOT_OF_THE_WEIGHTS and saved[k] != wanted[k]]
        if differing:
            listed = ", ".join(f"model.{k}: checkpoint {saved[k]}, run {wanted[k]}" for k in differing)
            raise ConfigError(f"checkpoint {checkpoint} is of another model ({listed}); set these keys alike")
    return manifest


def check_head(checkpoint: Path, manifest: dict[str, Any], head: str, weights_only: bool) -> bool:
    """Whether a model with `head` has to start it afresh: a score head on the weights of a language model.

    Raises: ConfigError where the checkpoint's head is another one and cannot be left behind.
    """
    saved = manifest.get("head", "lm")
    if saved == head:
        return False
    if (saved, head) == ("lm", "score") and weights_only:
        return True
    names = {"lm": "a language model", "score": "a reward model or critic (a score head)"}
    raise ConfigError(
        f"checkpoint {checkpoint} is of {names[saved]}, and {names[head]} is needed here; start from the checkpoint of "
        f"{names[head]}"
    )


def complete_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    found = [p for p in directory.glob("step-*") if _STEP.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: int(_STEP.fullmatch(p.name).group(1)))


def delete_older(directory: Path, keep: int, companions: Path | None = None) -> None:
    """Deletes all but the newest `keep` checkpoints, leftovers of interrupted saves, and in `companions` whatever has
    no namesake left; rank 0 only."""
    if dist.get_rank() == 0:
        kept = {path.name for path in complete_checkpoints(directory)[-keep:]}
        _delete_all_but(kept, directory)
        if companions is not None:  # last: a checkpoint never stands without its companion
            _delete_all_but(kept, companions)
    dist.barrier()


def _delete_all_but(names: set[str], directory: Path) -> None:
    for path in complete_checkpoints(directory) + list(directory.glob("step-*.incomplete")):
        if path.name not in names:
            shutil.rmtree(path)


def _names_in(directory: Path) -> str:
    return ", ".join(p.name for p in complete_checkpoints(directory)) or "none"
