"""Turn the parallel degrees into process groups."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from rl_megatron.config.addresses import is_loopback
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology.degrees import sequence_multiple, validate
from rl_megatron.topology.device import join
from rl_megatron.topology.job_store import TIMEOUT_MINUTES, is_on_one_node
from rl_megatron.topology.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Topology:
    """This run's parallel degrees, this rank's position in them, and the process groups, to be passed as arguments.

    world_size = tensor · pipeline · context · data. Each pipeline stage has `virtual_pipeline` model chunks. `expert` ·
    `expert_tensor` divides the number of ranks of a pipeline stage. `store` is the store in which the ranks met, or
    None if this package did not create it. `megatron_state` is megatron-core's own record of the groups; see
    `use_in_megatron`.
    """

    device: torch.device
    world_size: int
    rank: int
    tensor: int
    sequence: bool
    pipeline: int
    virtual_pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    first_stage_layers: int | None
    last_stage_layers: int | None
    groups: ProcessGroupCollection = field(repr=False)
    store: Store | None = field(default=None, repr=False, compare=False)
    megatron_state: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.world_size, self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def tensor_rank(self) -> int:
        return self.groups.tp.rank()

    @property
    def pipeline_rank(self) -> int:
        return self.groups.pp.rank()

    @property
    def context_rank(self) -> int:
        return self.groups.cp.rank()

    @property
    def data_rank(self) -> int:
        return self.groups.dp.rank()

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last pipeline stage, which computes logits, losses and metrics."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def last_stage_rank(self) -> int:
        """Return the global rank of this pipeline's last stage."""
        return dist.get_global_rank(self.groups.pp, self.pipeline - 1)

    @property
    def sequence_multiple(self) -> int:
        return sequence_multiple(self)

    def describe(self) -> str:
        """Return the degrees in one line, for the log."""
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "data": self.data}
        shape = " × ".join(f"{name} {degree}" for name, degree in degrees.items())
        extras = [f"virtual pipeline {self.virtual_pipeline}"] if self.virtual_pipeline > 1 else []
        extras += ["sequence parallel"] if self.sequence else []
        extras += [f"expert {self.expert}"] if self.expert > 1 else []
        extras += [f"expert tensor {self.expert_tensor}"] if self.expert_tensor > 1 else []
        return f"{self.world_size} rank(s): {shape}" + (f" ({', '.join(extras)})" if extras else "")


def start_topology(
    parallel: ParallelConfig | None = None,
    *,
    device: str = "auto",
    seed: int = 0,
    timeout_minutes: float = TIMEOUT_MINUTES,
) -> Topology:
    """Choose the device, join the process group, and build the topology: all that a script needs before a policy.

    Args:
        parallel: The degrees; by default all ranks are data parallel.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        seed: The seed of megatron-core's random number generators.
        timeout_minutes: How long a collective may wait for its peers.

    Raises:
        ConfigError: The degrees do not fit the world size, or there is no such device.
    """
    parallel = parallel or ParallelConfig()
    keep_launch_order(parallel)
    chosen_device, store = join(device, timeout_minutes)
    return build(parallel, chosen_device, seed, timeout_minutes, store)


def keep_launch_order(parallel: ParallelConfig) -> None:
    """Make GPUs start kernels in launch order, unless the user has set CUDA_DEVICE_MAX_CONNECTIONS.

    megatron-core launches a collective of tensor- or context-parallel ranks before the matrix product that it overlaps
    with. With several hardware queues, the product might start first and delay the collective. CUDA reads the variable
    when it starts.
    """
    if parallel.tensor > 1 or parallel.context > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def keep_nccl_on_loopback(others: Iterable[str]) -> None:
    """Make NCCL listen on the loopback interface only, unless the user has set NCCL_SOCKET_IFNAME.

    NCCL reads the variable once for all groups. So it stays unset unless all ranks, and the hosts `others` to which
    they send weights, are on this machine.
    """
    if is_on_one_node() and all(is_loopback(host) for host in others):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def leave() -> None:
    """Leave the process group, so that this process can build another topology later."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(
    parallel: ParallelConfig,
    device: torch.device,
    seed: int,
    timeout_minutes: float = TIMEOUT_MINUTES,
    store: Store | None = None,
) -> Topology:
    """Check the degrees, initialise megatron-core's process groups, seed its generators, and return the topology.

    Args:
        parallel: The degrees.
        device: This rank's device.
        seed: The seed of megatron-core's random number generators.
        timeout_minutes: How long a collective of any of the groups may wait for its peers.
        store: The store in which the ranks met.

    Raises:
        ConfigError: The degrees do not fit the world size.
    """
    world_size = dist.get_world_size()
    data = validate(parallel, world_size)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=timeout_minutes,  # pyright: ignore[reportArgumentType]  # any number works
        create_gloo_process_groups=False,  # only megatron-core's own optimizer checkpoints need them
    )
    model_parallel_cuda_manual_seed(seed)
    return Topology(
        device=device,
        world_size=world_size,
        rank=dist.get_rank(),
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        data=data,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        store=store,
        megatron_state=_read_megatron_state(),
    )


def build_beside(parallel: ParallelConfig, topology: Topology, timeout_minutes: float = TIMEOUT_MINUTES) -> Topology:
    """Return a second topology of the same ranks with other degrees. Collective.

    megatron-core's own process groups and random number generators stay those of `topology`. Code that uses the second
    topology gets its groups as arguments, or runs within `use_in_megatron`.
    """
    state = _read_megatron_state()
    with keep_generators(topology.device):
        try:
            return build(parallel, topology.device, 0, timeout_minutes, topology.store)
        finally:
            _set_megatron_state(state)


@contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Restore the state of this rank's random number generators, torch's and megatron-core's, after the block."""
    tracker = get_cuda_rng_tracker()
    assert tracker is not None  # `build` has created it
    generators, state = tracker.get_states(), torch.get_rng_state()
    gpu_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        tracker.set_states(generators)
        torch.set_rng_state(state)
        if gpu_state is not None:
            torch.cuda.set_rng_state(gpu_state, device)


@contextmanager
def use_in_megatron(topology: Topology) -> Iterator[None]:
    """Make megatron-core use the process groups of `topology` as its own within the block.

    Parts of megatron-core, such as the metadata of weights in a checkpoint, do not take groups as arguments.
    """
    state = _read_megatron_state()
    _set_megatron_state(topology.megatron_state)
    try:
        yield
    finally:
        _set_megatron_state(state)


def _read_megatron_state() -> dict[str, object]:
    """Return the variables of megatron-core's `parallel_state`, by name."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def _set_megatron_state(state: Mapping[str, object]) -> None:
    for name, value in state.items():
        setattr(parallel_state, name, value)
