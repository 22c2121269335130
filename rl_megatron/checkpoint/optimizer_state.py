"""The optimizer's part of a checkpoint. It loads under any tensor, pipeline and data parallel layout.

It holds each parameter's fp32 weight and Adam moments in the parameter's own shape. megatron-core's distributed
optimizer keeps these states flat, in buckets, and split over data-parallel ranks. megatron-core can save them
independently of the layout, but it stores the buckets without padding and reads them at offsets computed with padding.
This corrupts every bucket that follows a bucket whose size is not a multiple of 128 (tied embeddings under pipeline
parallelism have such a bucket). This module therefore assembles the states parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_STATES = ("param", "exp_avg", "exp_avg_sq")


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, models: list[dict[str, Any]], metadata: dict[str, Any], loading: bool
) -> dict[str, Any]:
    """Return the sharded state of `optimizer`, to save or to fill. Collective over data-parallel ranks.

    Args:
        optimizer: The optimizer.
        models: The sharded state dicts of the model chunks, which state each parameter's place in the unsharded model.
        metadata: The metadata with which `models` was made. It decides how megatron-core names tensors.
        loading: True to return empty tensors that will be filled, False to return the state that will be saved.
    """
    entries = {
        id(e.data): e for model in models for e in model.values() if isinstance(e, ShardedTensor | ShardedTensorFactory)
    }
    state = {}
    for index, part in enumerate(parts(optimizer)):
        if isinstance(part, DistributedOptimizer):
            tensors = {
                f"{number}": _sharded(entries[id(parameter)], whole)
                for number, (parameter, whole) in enumerate(_whole_states(part, loading))
            }
            state[f"part{index}"] = {"groups": part.state_dict(), "tensors": tensors}
        else:
            merged = {f"{i}.{key}": entry for i, model in enumerate(models) for key, entry in model.items()}
            state[f"part{index}"] = part.sharded_state_dict(merged, is_loading=loading, metadata=dict(metadata))
    return state


@torch.no_grad()
def load_optimizer_state(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    """Load the filled state of `sharded_optimizer_state` into `optimizer`: moments, fp32 weights and step counts.

    Learning rate, weight decay and betas stay as the run configured them.
    """
    for index, part in enumerate(parts(optimizer)):
        state = loaded[f"part{index}"]
        configured = [
            {key: value for key, value in group.items() if key not in ("params", "step")}
            for group in part.optimizer.param_groups
        ]
        # megatron-core matches groups by their settings, learning rates included, so the saved groups get the run's.
        if isinstance(part, DistributedOptimizer):
            groups = state["groups"]["optimizer"]
            step = {key: value for key, value in groups["param_groups"][0].items() if key == "step"}
            groups["param_groups"] = [values | step for values in configured]
            part.load_state_dict(state["groups"])
            local = dict(_local_ranges(part))
            for number, parameter in enumerate(_parameters(part)):  # a loaded dict may be in another order
                if parameter in local:
                    own_states = part._get_main_param_and_optimizer_states(parameter)
                    for name in _STATES:
                        whole = state["tensors"][f"{number}"][name]
                        own_states[name].copy_(whole.flatten()[local[parameter]])
        else:
            for group, values in zip(state.get("optimizer", state)["param_groups"], configured, strict=True):
                group.update(values)
            moments = state.get("optimizer", state)["state"]
            if isinstance(part.optimizer, torch.optim.Adam) and "common_step" not in moments:
                for adam_state in moments.values():  # megatron-core omits a step count of 0
                    adam_state["step"] = torch.zeros(())
            part.load_state_dict(state)
        for group, values in zip(part.optimizer.param_groups, configured, strict=True):
            group.update(values)
        for adam_state in part.optimizer.state.values():
            if "step" in adam_state:  # loading gives all parameters the same tensor, and each would increment it
                adam_state["step"] = adam_state["step"].clone()


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Allocate Adam's moments before the first step, because saving and loading need them.

    Torch's Adam, which megatron-core uses without Transformer Engine and Apex, counts steps per parameter. The fused
    implementations count them per group.
    """
    for part in parts(optimizer):
        counts_per_parameter = isinstance(part.optimizer, torch.optim.Adam)  # AdamW is a subclass
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                part.optimizer.state[parameter] = ({"step": torch.zeros(())} if counts_per_parameter else {}) | moments


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that `optimizer` consists of, for example one for dense parameters and one for experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _parameters(part: DistributedOptimizer) -> Iterator[Tensor]:
    for buffer in part.buffers:
        yield from buffer.param_index_map


def _local_ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, slice]]:
    """Yield (parameter, the slice of the flattened parameter whose state this rank keeps)."""
    for ranges_of_buffer in part.gbuf_ranges:
        for buckets in ranges_of_buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, slice(ranges["param"].start, ranges["param"].end)


@torch.no_grad()
def _whole_states(part: DistributedOptimizer, loading: bool) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter with its whole states on the CPU: assembled from all ranks, or empty if `loading`.

    Only one parameter's state is on the device at a time. Collective over data-parallel ranks unless `loading`.
    """
    local = dict(_local_ranges(part))
    for parameter in _parameters(part):
        if loading:
            whole = torch.empty(len(_STATES), parameter.numel(), device="cpu")
        else:
            whole = torch.zeros(len(_STATES), parameter.numel(), device=parameter.device)
            if parameter in local:
                own_states = part._get_main_param_and_optimizer_states(parameter)
                whole[:, local[parameter]] = torch.stack([own_states[name].float() for name in _STATES])
            if part.data_parallel_group.size() > 1:
                dist.all_reduce(whole, group=part.data_parallel_group)
            whole = whole.cpu()
        yield parameter, {name: whole[i].view(parameter.shape) for i, name in enumerate(_STATES)}


def _sharded(entry: ShardedTensor | ShardedTensorFactory, whole: dict[str, Tensor]) -> dict[str, Any]:
    """Return the states as sharded tensors that are placed like their parameter, under their own keys."""
    placed = {}
    for name, tensor in whole.items():
        changes: dict[str, Any] = {"key": f"optimizer.{name}.{entry.key}", "data": tensor}
        if isinstance(entry, ShardedTensor):
            changes["dtype"] = tensor.dtype
        placed[name] = replace(entry, **changes)
    return placed
