"""Loading a checkpoint into a model and its optimizer. The checkpoint may have been saved under any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer

from rl_megatron.checkpoint.adapters import (
    check_base,
    check_frozen_adapters,
    check_same_adapter,
    find_base,
    holds_adapter,
    identify_base,
    read_adapter_configs,
    read_adapters,
)
from rl_megatron.checkpoint.directory import check_head, name_random_state, read_manifest
from rl_megatron.checkpoint.metadata import check_metadata
from rl_megatron.checkpoint.rng_state import restore_random_state
from rl_megatron.checkpoint.training_state import TrainingState, load_model
from rl_megatron.checkpoint.verify import verify_checkpoint
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.model.families import family_of_model
from rl_megatron.model.lora.attach import find_dora_adapters
from rl_megatron.model.lora.originals import keep_originals
from rl_megatron.model.sharded_model import ShardedModel

_MESSAGE_LENGTH = 600  # characters shown of megatron-core's message, which lists every key of the model


def load_checkpoint(path: Path, into: TrainingState, weights_only: bool = False, verify: bool = True) -> dict[str, Any]:
    """Fill `into` from the checkpoint `path` and return its manifest. Collective.

    A model without adapters gets a checkpoint's adapters merged into their base. A model with an adapter can start from
    a whole model, which becomes its base, or from adapters. Saved adapters are then frozen, except one with the name of
    the model's adapter.

    Args:
        path: A complete checkpoint.
        into: The state to fill. Its weights must be gathered and its optimizer state on the device.
        weights_only: Load the weights only, and leave the optimizer and the schedule as they are. A score head may then
            start from a language model's checkpoint, with newly initialized weights.
        verify: Compare every file with its digest first. Pass False if this was already done.

    Raises:
        ConfigError: The checkpoint is damaged, or it does not fit the model.
    """
    manifest = read_manifest(path)
    if into.model.lora is None and not holds_adapter(manifest):
        return _load_whole(path, into, weights_only, verify)
    return _load_with_adapters(path, manifest, into, weights_only, verify)


def start_from_weights(model: ShardedModel, optimizer: MegatronOptimizer | None) -> None:
    """Let training start from a model's present weights.

    The optimizer's fp32 weights are set to these weights, and so are the frozen originals of modules that are trained
    whole (`keep_originals`). The norms of the weights' rows become DoRA's magnitudes. Collective.
    """
    keep_originals(model.model_chunks)
    for adapter in find_dora_adapters(model.model_chunks):
        adapter.start()
    if optimizer is not None:
        optimizer.reload_model_params()


def _load_whole(path: Path, into: TrainingState, weights_only: bool, verify: bool) -> dict[str, object]:
    manifest = read_manifest(path, into.model.config)
    new_head = check_head(path, manifest, into.model.head, weights_only)
    if verify:
        verify_checkpoint(path, into.model.topology.ranks)
    into.model.mark_changed()  # before loading, because a load that fails may have changed some weights
    _fill(path, manifest, into, weights_only, new_head)
    return manifest


def _load_with_adapters(
    path: Path, manifest: dict[str, Any], into: TrainingState, weights_only: bool, verify: bool
) -> dict[str, object]:
    """Fill `into` from a checkpoint if the checkpoint, the model or both have adapters."""
    model = into.model
    if not holds_adapter(manifest):
        if not weights_only:
            raise ConfigError(f"checkpoint {path} holds no adapter; weights_only=True loads it as a base")
        check_frozen_adapters(path, [], model)
        _load_whole(path, replace(into, optimizer=None, scheduler=None, selection="base"), True, verify)
        model.base = identify_base(path)
        start_from_weights(model, into.optimizer)
        return manifest
    if model.lora is None:
        rows = model.config.vocab_size or model.vocab_size
        check_head(path, manifest, model.head, weights_only)
        if verify:
            verify_checkpoint(path, into.model.topology.ranks)
        adapters = read_adapters(path, manifest, model.config, rows)
        _load_whole(find_base(path, manifest), replace(into, optimizer=None, scheduler=None), True, verify)
        adapters.merge_into(model, family_of_model(model.config, rows).table(model.config, rows))
        start_from_weights(model, into.optimizer)
        return manifest
    frozen, name = read_adapter_configs(path, manifest), model.lora.adapter_name
    trained = frozen.pop(name, None)
    if trained is not None:
        check_same_adapter(path, trained, model.lora)
    elif not weights_only:
        raise ConfigError(
            f"checkpoint {path} holds no adapter peft.adapter_name={name}{nearest(name, frozen)}; weights_only=True "
            "trains a new adapter of this name beside the saved ones"
        )
    check_frozen_adapters(path, [*frozen.values()], model)
    if model.base is None and manifest["base"]:
        base = find_base(path, manifest)
        _load_with_adapters(base, read_manifest(base), into, weights_only=True, verify=verify)
    check_base(path, manifest, model.base)
    if not model.frozen_adapters:
        model.add_frozen_adapters([*frozen.values()])
    if trained is None:
        others = replace(into, optimizer=None, scheduler=None, selection="frozen adapters")
        _load_whole(path, others, weights_only, verify)
        start_from_weights(model, into.optimizer)
        return manifest
    _load_whole(path, into, weights_only, verify)
    model.adapters_are_new = False
    return manifest


def _fill(path: Path, manifest: dict[str, Any], into: TrainingState, weights_only: bool, new_head: bool) -> None:
    check_metadata(path)
    state = into.build_request(weights_only, new_head)
    requested = [{*state[f"model{index}"]} for index, _ in enumerate(into.model_chunks)]
    partial = weights_only or into.optimizer is None
    strict = StrictHandling.RAISE_UNEXPECTED if partial else StrictHandling.RAISE_ALL
    try:
        # The result is a tuple only if `strict` asks for the differing keys.
        loaded: dict[str, Any] = dist_checkpointing.load(  # pyright: ignore[reportAssignmentType]
            state, str(path), strict=strict
        )
    except dist_checkpointing.core.CheckpointingException as error:
        remedy = "" if partial else "; weights_only=True starts a new training from its weights only"
        raise ConfigError(f"checkpoint {path} does not fit this run: {str(error)[:_MESSAGE_LENGTH]}{remedy}") from error
    for index, model_chunk in enumerate(into.model_chunks):
        filled = loaded[f"model{index}"]
        load_model(model_chunk, filled, without=model_chunk.state_dict().keys() - requested[index])
    if into.optimizer is None or into.scheduler is None:
        return
    if weights_only:
        into.optimizer.reload_model_params()
        return
    into.load_optimizer(loaded)
    random_state = name_random_state(into.model.topology.rank)
    if random_state in manifest["files"] and manifest["layout"] == into.model.topology.describe():
        restore_random_state((path / random_state).read_bytes())
