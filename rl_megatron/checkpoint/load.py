"""Loading: what a model and its optimizer ask of a checkpoint, and how they take it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer

from rl_megatron.checkpoint import directory as checkpoint
from rl_megatron.checkpoint.optimizer_state import load_optimizer_state, sharded_optimizer_state
from rl_megatron.checkpoint.rng_state import random_state_file, restore_random_state
from rl_megatron.config.errors import ConfigError
from rl_megatron.model.shards import SHARDING_METADATA
from rl_megatron.topology.collective_errors import agreed_failure

_HEAD = "output_layer."  # what the last stage's head is called in a model's state
_MESSAGE_LENGTH = 600  # megatron-core lists every key of the model


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


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds of a policy on this rank: model chunks and, where there are, optimizer and schedule."""

    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    scheduler: Any | None
    layout: str

    def sharded(self, loading: bool, weights_only: bool = False, new_head: bool = False) -> dict[str, Any]:
        """What `dist_checkpointing` saves, or is to fill: with `weights_only` of the model alone, with `new_head`
        without its head. Collective."""
        models = [tensors_of_model(chunk) for chunk in self.chunks]
        state: dict[str, Any] = {}
        for index, model in enumerate(models):
            kept = {key: entry for key, entry in model.items() if not (new_head and key.startswith(_HEAD))}
            state[f"model{index}"] = kept
        if self.optimizer is not None and not weights_only:
            state["optimizer"] = sharded_optimizer_state(self.optimizer, models, SHARDING_METADATA, loading)
            state["scheduler"] = self.scheduler.state_dict()
        return state


def load(path: Path, manifest: dict[str, Any], into: TrainingState, weights_only: bool, new_head: bool) -> None:
    """Fills `into` from the checkpoint `path`, saved under any layout; collective.

    Raises: ConfigError where the checkpoint lacks what is asked for, or, where all is asked for, holds more.
    """
    state = into.sharded(loading=True, weights_only=weights_only, new_head=new_head)
    partial = weights_only or into.optimizer is None
    older = "format" not in manifest  # held empty states of a backend's modules
    strict = StrictHandling.RAISE_UNEXPECTED if partial or older else StrictHandling.RAISE_ALL
    try:
        loaded = dist_checkpointing.load(state, str(path), strict=strict)
    except dist_checkpointing.core.CheckpointingException as error:
        raise ConfigError(f"checkpoint {path} does not fit this run: {str(error)[:_MESSAGE_LENGTH]}") from error
    for index, chunk in enumerate(into.chunks):
        load_model(chunk, loaded[f"model{index}"], without=_HEAD if new_head else None)
    if into.optimizer is None:
        return
    if weights_only:
        into.optimizer.reload_model_params()
        return
    load_optimizer_state(into.optimizer, loaded["optimizer"])
    into.scheduler.num_steps = 0  # loading adds the checkpoint's steps
    into.scheduler.load_state_dict(loaded["scheduler"])
    mine = random_state_file(dist.get_rank())
    if mine in manifest["files"] and manifest["layout"] == into.layout:
        restore_random_state((path / mine).read_bytes())


def verify(path: Path) -> None:
    """Holds every file of a checkpoint against its digest, each rank its share; collective.

    Raises: Damaged, on every rank, naming the file that one of them found.
    """
    failure = None
    try:
        manifest = checkpoint.read_manifest(path)
        checkpoint.check_digests(path, manifest, dist.get_rank(), dist.get_world_size())
    except ConfigError as error:
        failure = str(error)
    failure = agreed_failure(failure)
    if failure is not None:
        raise checkpoint.Damaged(failure)
