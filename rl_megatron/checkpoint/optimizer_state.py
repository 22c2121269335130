"""The optimizer's part of a checkpoint. It loads under any layout, and into any implementation of Adam.

It holds the number of steps, and each parameter's fp32 weight and Adam moments in the parameter's own shape.
megatron-core's distributed optimizer keeps these states flat, in buckets, and split over data-parallel ranks.
megatron-core can save them independently of the layout, but it stores the buckets without padding and reads them at
offsets computed with padding. This corrupts every bucket after one whose size is not a multiple of 128 (tied embeddings
under pipeline parallelism have such a bucket). This module therefore assembles the states parameter by parameter. Only
one of the data-parallel ranks, the parameter's owner, holds the parameter's whole states, on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

_STATES = ("param", "exp_avg", "exp_avg_sq")

_Entry = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True)
class _ParameterState:
    """This rank's part of a parameter's optimizer states, and the place of the whole states in a checkpoint."""

    number: str  # the key in the state dict
    entry: _Entry  # the parameter's place in the unsharded model
    parameter: Tensor
    states: dict[str, Tensor] | None  # writable views of the range `local`, or None if it is empty
    local: slice  # the range of the flattened parameter that this rank updates
    group: dist.ProcessGroup | None  # the ranks over which the states are split, or None if this rank holds them whole
    owner: int  # the rank of `group` that reads and writes the whole states

    @property
    def is_owner(self) -> bool:
        return self.group is None or self.group.rank() == self.owner

    @property
    def is_replica(self) -> bool:
        """Return whether an earlier tensor- or pipeline-parallel rank holds the same parameter."""
        return any(_replica_id(self.entry)[:-1])

    def place_state(self, name: str, data: Tensor) -> _Entry:
        """Return the whole state `name` as an entry with the parameter's place in the unsharded model."""
        data = data.view(self.parameter.shape)
        changes: dict[str, object] = {"key": f"optimizer.{name}.{self.entry.key}", "data": data}
        if isinstance(self.entry, ShardedTensor):
            changes["dtype"] = data.dtype
        if self.group is not None:
            changes["replica_id"] = (*_replica_id(self.entry)[:-1], 0)  # only the owner has it, so the owner writes it
        return replace(self.entry, **changes)


def collect_optimizer_state(optimizer: MegatronOptimizer, models: list[dict[str, _Entry]]) -> dict[str, object]:
    """Return the sharded state of `optimizer` to save. Collective over data-parallel ranks.

    States that are split over ranks are copied to the owner's host; others are the optimizer's own tensors. `models`
    are the sharded state dicts of the model chunks, which state each parameter's place in the unsharded model.
    """
    tensors = {}
    for held in _list_states(optimizer, models):
        if held.group is None:
            assert held.states is not None  # an optimizer that is not split updates every parameter
            whole: dict[str, Tensor] | None = {name: held.states[name] for name in _STATES}
        elif held.is_replica:
            whole = None
        else:
            whole = _reduce_to_owner(held, held.group)
        if whole is not None:
            tensors[held.number] = {name: held.place_state(name, tensor) for name, tensor in whole.items()}
    return {"step": get_step_count(optimizer), "tensors": tensors}


def request_optimizer_state(optimizer: MegatronOptimizer, models: list[dict[str, _Entry]]) -> dict[str, object]:
    """Return the sharded tensors to fill: the optimizer's own or, if states are split, new ones on the owner's host."""
    tensors = {}
    for held in _list_states(optimizer, models):
        if not held.is_owner:
            continue
        if held.group is None and held.states is not None:
            whole = held.states
        else:
            whole = {name: torch.empty(held.parameter.shape, dtype=torch.float32, device="cpu") for name in _STATES}
        tensors[held.number] = {name: held.place_state(name, whole[name]) for name in _STATES}
    return {"tensors": tensors}


@torch.no_grad()
def load_optimizer_state(optimizer: MegatronOptimizer, models: list[dict[str, _Entry]], loaded: dict[str, Any]) -> None:
    """Load moments, fp32 weights and step count into `optimizer`. The model's weights must have been loaded before.

    `loaded` is the filled result of `request_optimizer_state`, with the checkpoint's values that are not tensors.
    Learning rate, weight decay and betas stay as the run configured them. Collective over data-parallel ranks.
    """
    for held in _list_states(optimizer, models):
        whole: dict[str, Tensor] = loaded["tensors"][held.number] if held.is_owner else {}
        if held.group is not None:
            whole = _broadcast_from_owner(held, held.group, whole)
        if held.states is not None:
            for name in _STATES:
                held.states[name].copy_(whole[name].flatten()[held.local].view_as(held.states[name]))
    set_step_count(optimizer, loaded["step"])


def allocate_moments(optimizer: MegatronOptimizer) -> None:
    """Allocate Adam's moments before the first step, because saving and loading need them."""
    for part in list_parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    set_step_count(optimizer, 0)


def get_step_count(optimizer: MegatronOptimizer) -> int:
    """Return how many steps Adam has taken, which is the same for all parameters."""
    counts = [0]  # for a rank that updates no parameter
    for part in list_parts(optimizer):
        if _counts_per_parameter(part):
            counts += [int(state["step"]) for state in list(part.optimizer.state.values())[:1]]
        else:
            counts += [int(group.get("step", 0)) for group in part.optimizer.param_groups]
    return max(counts)


def set_step_count(optimizer: MegatronOptimizer, step: int) -> None:
    """Set how many steps Adam has taken, in the form that Adam's implementation needs."""
    for part in list_parts(optimizer):
        for group in part.optimizer.param_groups:
            if not _counts_per_parameter(part):
                group["step"] = step  # the kernels of Transformer Engine and Apex take an int, not a float
                continue
            for parameter in group["params"]:
                # Each parameter has its own count, which is incremented in place; fused Adam reads it on the device.
                fused = parameter.new_full((), float(step), dtype=torch.float32)
                part.optimizer.state[parameter]["step"] = fused if group["fused"] else torch.tensor(float(step))


def _counts_per_parameter(part: MegatronOptimizer) -> bool:
    """Return whether a part counts steps per parameter, as torch's Adam does.

    Transformer Engine and Apex count per group. Without both, megatron-core uses torch's Adam or its subclass AdamW.
    """
    return isinstance(part.optimizer, torch.optim.Adam)


def list_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that `optimizer` consists of, for example one for dense parameters and one for experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _list_states(optimizer: MegatronOptimizer, models: list[dict[str, _Entry]]) -> Iterator[_ParameterState]:
    """Yield what this rank holds of every parameter's states, in the same order on all data-parallel ranks."""
    entries = {id(e.data): e for model in models for e in model.values() if isinstance(e, _Entry)}
    for index, part in enumerate(list_parts(optimizer)):
        group, size = None, 1
        if isinstance(part, DistributedOptimizer):
            size = part.data_parallel_group.size()
            group = part.data_parallel_group if size > 1 else None
        for number, (parameter, states, local) in enumerate(_list_part_states(part)):
            entry, owner = entries[id(parameter)], number % size
            yield _ParameterState(f"{index}.{number}", entry, parameter, states, local, group, owner)


def _list_part_states(part: MegatronOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor] | None, slice]]:
    """Yield (parameter, the states of the elements that this rank updates, their range) of every parameter."""
    if isinstance(part, DistributedOptimizer):
        ranges = dict(_list_local_ranges(part))
        for buffer in part.buffers:
            for parameter in buffer.param_index_map:
                local = ranges.get(parameter)
                states = None if local is None else part._get_main_param_and_optimizer_states(parameter)
                yield parameter, states, local or slice(0, 0)
        return
    for parameter, main in list_main_parameters(part):
        states = part.optimizer.state[main] | {"param": main.data}
        yield parameter, states, slice(0, main.numel())


def list_main_parameters(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, tensor that the optimizer updates for it on this rank) for each of a part's parameters.

    The second tensor is the parameter itself, its fp32 copy, or the part of one of these that the distributed optimizer
    assigns to this rank; the tensor's `grad` is the gradient of the step.
    """
    if isinstance(part, DistributedOptimizer):
        for parameter, _ in _list_local_ranges(part):
            group, index = part.model_param_group_index_map[parameter]
            yield parameter, part.optimizer.param_groups[group]["params"][index]
        return
    weights = zip(getattr(part, "fp32_from_float16_groups", ()), getattr(part, "float16_groups", ()), strict=True)
    by_main = {id(m): p for mains, parameters in weights for m, p in zip(mains, parameters, strict=True)}
    for main in part.get_parameters():
        yield by_main.get(id(main), main), main


def _list_local_ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, slice]]:
    """Yield (parameter, the slice of the flattened parameter whose state this rank keeps)."""
    for buffer_ranges in part.gbuf_ranges:
        for buckets in buffer_ranges.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, slice(ranges["param"].start, ranges["param"].end)


@torch.no_grad()
def _reduce_to_owner(held: _ParameterState, group: dist.ProcessGroup) -> dict[str, Tensor] | None:
    """Return the whole states on the owner's host, and None on other ranks. Collective over `group`.

    Only one parameter's states are on the device at a time.
    """
    whole = torch.zeros(len(_STATES), held.parameter.numel(), device=held.parameter.device)
    if held.states is not None:
        whole[:, held.local] = torch.stack([held.states[name].float() for name in _STATES])
    dist.reduce(whole, dist.get_global_rank(group, held.owner), group=group)
    return dict(zip(_STATES, whole.cpu(), strict=True)) if held.is_owner else None


def _broadcast_from_owner(
    held: _ParameterState, group: dist.ProcessGroup, loaded: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Broadcast `loaded`, the owner's whole states, to the device of every rank. Collective over `group`."""
    device, size = held.parameter.device, held.parameter.numel()
    if held.is_owner:
        whole = torch.stack([loaded[name].flatten() for name in _STATES]).to(device)
    else:
        whole = torch.empty(len(_STATES), size, device=device)
    dist.broadcast(whole, dist.get_global_rank(group, held.owner), group=group)
    return dict(zip(_STATES, whole, strict=True))


def _replica_id(entry: _Entry) -> tuple[int, ...]:
    """Return this replica's indices among the pipeline-, tensor- and data-parallel ranks that hold the same tensor."""
    if not isinstance(entry.replica_id, tuple):
        raise RuntimeError(f"{entry.key} has the replica id {entry.replica_id}; it must be three numbers")
    return entry.replica_id
