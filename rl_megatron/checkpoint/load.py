"""Loading a checkpoint into a model and its optimizer. The checkpoint may have been saved under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from rl_megatron.checkpoint.directory import check_head, read_manifest
from rl_megatron.checkpoint.metadata import check_metadata
from rl_megatron.checkpoint.rng_state import random_state_file, restore_random_state
from rl_megatron.checkpoint.training_state import HEAD_PREFIX, TrainingState, load_model
from rl_megatron.checkpoint.verify import verify_checkpoint
from rl_megatron.config.errors import ConfigError

_MESSAGE_LENGTH = 600  # megatron-core lists every key of the model


def load_checkpoint(path: Path, into: TrainingState, weights_only: bool = False, verify: bool = True) -> dict[str, Any]:
    """Fill `into` from the checkpoint `path` and return its manifest. Collective.

    Args:
        path: A complete checkpoint.
        into: The state to fill. Its weights must be gathered and its optimizer state on the device.
        weights_only: Load the weights only, and leave the optimizer and the schedule as they are. A score head then
            may start from a language model's checkpoint, with newly initialized weights.
        verify: Compare every file with its digest first. Pass False if this was already done.

    Raises:
        ConfigError: The checkpoint is damaged, holds another model, or has another head than is needed.
    """
    manifest = read_manifest(path, into.model.config)
    new_head = check_head(path, manifest, into.model.head, weights_only)
    if verify:
        verify_checkpoint(path)
    into.model.version += 1  # even if loading fails: some weights may have changed by then
    _fill(path, manifest, into, weights_only, new_head)
    return manifest


def _fill(path: Path, manifest: dict[str, Any], into: TrainingState, weights_only: bool, new_head: bool) -> None:
    check_metadata(path)
    stored = frozenset(dist_checkpointing.load_tensors_metadata(str(path)))
    state = into.requested(stored, weights_only, new_head)
    partial = weights_only or into.optimizer is None
    older = "format" not in manifest  # older checkpoints contain the empty "extra states" of a backend's modules
    strict = StrictHandling.RAISE_UNEXPECTED if partial or older else StrictHandling.RAISE_ALL
    try:
        # The result is a tuple only if `strict` asks for the differing keys.
        loaded: dict[str, Any] = dist_checkpointing.load(  # pyright: ignore[reportAssignmentType]
            state, str(path), strict=strict
        )
    except dist_checkpointing.core.CheckpointingException as error:
        remedy = "" if partial else "; weights_only=True starts a new training from its weights only"
        raise ConfigError(f"checkpoint {path} does not fit this run: {str(error)[:_MESSAGE_LENGTH]}{remedy}") from error
    for index, model_chunk in enumerate(into.model_chunks):
        load_model(model_chunk, loaded[f"model{index}"], without=HEAD_PREFIX if new_head else None)
    if into.optimizer is None or into.scheduler is None:
        return
    if weights_only:
        into.optimizer.reload_model_params()
        return
    into.load_optimizer(stored, loaded)
    own_file = random_state_file(dist.get_rank())
    if own_file in manifest["files"] and manifest["layout"] == into.model.topology.describe():
        restore_random_state((path / own_file).read_bytes())
