"""Check the parallel degrees, and turn them into process groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig, ParallelConfig
from rl_megatron.topology.context_parallel import zigzag_slices
from rl_megatron.topology.device import start_device


class ParallelDegrees(Protocol):
    """The degrees that a model and its sequences have to fit: of a configuration, or of a running topology."""

    @property
    def tensor(self) -> int:
        """Return the tensor-parallel degree."""
        ...

    @property
    def sequence(self) -> bool:
        """Return whether activations are sharded over the tensor-parallel ranks."""
        ...

    @property
    def pipeline(self) -> int:
        """Return the number of pipeline stages."""
        ...

    @property
    def virtual_pipeline(self) -> int:
        """Return the number of model chunks per pipeline stage."""
        ...

    @property
    def context(self) -> int:
        """Return the context-parallel degree."""
        ...

    @property
    def expert(self) -> int:
        """Return the expert-parallel degree."""
        ...

    @property
    def first_stage_layers(self) -> int | None:
        """Return the layers of the first pipeline stage, or None."""
        ...

    @property
    def last_stage_layers(self) -> int | None:
        """Return the layers of the last pipeline stage, or None."""
        ...


@dataclass(frozen=True)
class Topology:
    """This run's parallel degrees, this rank's place in them, and the process groups, to be passed on as arguments.

    world_size = tensor · pipeline · context · data. `virtual_pipeline` splits each pipeline stage into that many model
    chunks. `expert` divides the ranks that hold one pipeline stage.
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
    data: int
    first_stage_layers: int | None
    last_stage_layers: int | None
    groups: ProcessGroupCollection = field(repr=False)

    @property
    def is_cuda(self) -> bool:
        """Return whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def tensor_rank(self) -> int:
        """Return this rank's place among its tensor-parallel ranks."""
        return self.groups.tp.rank()

    @property
    def pipeline_rank(self) -> int:
        """Return this rank's pipeline stage."""
        return self.groups.pp.rank()

    @property
    def context_rank(self) -> int:
        """Return this rank's place among its context-parallel ranks."""
        return self.groups.cp.rank()

    @property
    def data_rank(self) -> int:
        """Return this rank's place among its data-parallel ranks."""
        return self.groups.dp.rank()

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last pipeline stage, which has losses, logits and metrics."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def last_stage_rank(self) -> int:
        """Return the global rank of this pipeline's last stage."""
        return dist.get_global_rank(self.groups.pp, self.pipeline - 1)

    @property
    def sequence_multiple(self) -> int:
        """Return the number that padded lengths are a multiple of."""
        return sequence_multiple(self)

    def describe(self) -> str:
        """Return the degrees in one line, for the log."""
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "data": self.data}
        shape = " × ".join(f"{name} {degree}" for name, degree in degrees.items())
        extras = [f"virtual pipeline {self.virtual_pipeline}"] if self.virtual_pipeline > 1 else []
        extras += ["sequence parallel"] if self.sequence else []
        extras += [f"expert {self.expert}"] if self.expert > 1 else []
        return f"{self.world_size} rank(s): {shape}" + (f" ({', '.join(extras)})" if extras else "")


def sequence_multiple(parallel: ParallelDegrees) -> int:
    """Return the number that padded lengths are a multiple of.

    Context parallelism cuts a sequence into zigzag slices of equal length, and sequence parallelism into shards.
    """
    return zigzag_slices(parallel.context) * (parallel.tensor if parallel.sequence else 1)


def validate(parallel: ParallelConfig, world_size: int) -> int:
    """Return the data-parallel degree that `world_size` leaves.

    Raises:
        ConfigError: the degrees do not divide the world size, or one contradicts another. The message says which values
            would fit.
    """
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert"):
        if getattr(parallel, name) < 1:
            raise ConfigError(f"parallel.{name}={getattr(parallel, name)}: must be at least 1")
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model_ranks:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} × parallel.pipeline={parallel.pipeline} × "
            f"parallel.context={parallel.context} = {model_ranks} does not divide the world size {world_size}; "
            + _world_sizes_that_fit(parallel, world_size)
        )
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("parallel.sequence=true shards over parallel.tensor, which is 1; set parallel.sequence=false")
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} interleaves pipeline stages, and "
            "parallel.pipeline is 1; set parallel.virtual_pipeline=1 or raise parallel.pipeline"
        )
    stage_ranks = world_size // parallel.pipeline
    if stage_ranks % parallel.expert:
        fits = [d for d in range(1, stage_ranks + 1) if stage_ranks % d == 0]
        raise ConfigError(
            f"parallel.expert={parallel.expert} must divide the {stage_ranks} ranks of a pipeline stage; fits: {fits}"
        )
    return world_size // model_ranks


def _world_sizes_that_fit(parallel: ParallelConfig, world_size: int) -> str:
    fits = []
    for name in ("tensor", "pipeline", "context"):
        others = parallel.tensor * parallel.pipeline * parallel.context // getattr(parallel, name)
        if world_size % others == 0:
            values = [d for d in range(1, world_size // others + 1) if (world_size // others) % d == 0]
            fits.append(f"parallel.{name} in {values}")
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    start_with = f"or start a multiple of {model_ranks} ranks (torchrun --nproc-per-node {model_ranks} …)"
    return (f"with the other degrees as they are, {' or '.join(fits)} would fit, " if fits else "") + start_with


def validate_model(model: ModelConfig, parallel: ParallelDegrees) -> None:
    """Check the degrees against the model's shape, before anything is built.

    Raises:
        ConfigError: a degree does not divide what it splits. The message says which degrees would fit.
    """

    def divides(degree_key: str, degree: int, size_key: str, size: int) -> None:
        if size % degree:
            fits = [d for d in range(1, size + 1) if size % d == 0 and d <= 2 * degree]
            raise ConfigError(f"{degree_key}={degree} must divide {size_key}={size}; degrees that fit: {fits}")

    divides("parallel.tensor", parallel.tensor, "model.num_attention_heads", model.num_attention_heads)
    divides("parallel.tensor", parallel.tensor, "model.num_query_groups", model.num_query_groups)
    if model.num_experts is None or model.first_dense_layers:  # experts are not split by tensor parallelism
        divides("parallel.tensor", parallel.tensor, "model.ffn_hidden_size", model.ffn_hidden_size)
    _check_pipeline(model, parallel)
    if model.num_experts is None:
        if parallel.expert > 1:
            raise ConfigError(f"parallel.expert={parallel.expert}: this model is dense; set parallel.expert=1")
        return
    divides("parallel.expert", parallel.expert, "model.num_experts", model.num_experts)
    if model.shared_expert_ffn_hidden_size is not None:
        divides(
            "parallel.tensor",
            parallel.tensor,
            "model.shared_expert_ffn_hidden_size",
            model.shared_expert_ffn_hidden_size,
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} with model.num_experts={model.num_experts}: every tensor-parallel rank "
            "would send the same tokens to the experts; set parallel.sequence=true"
        )


def _check_pipeline(model: ModelConfig, parallel: ParallelDegrees) -> None:
    """Check that every layer belongs to exactly one model chunk, and every model chunk has at least one layer."""
    stages, per_stage = parallel.pipeline, parallel.virtual_pipeline
    ends = {"first": parallel.first_stage_layers, "last": parallel.last_stage_layers}
    uneven = {f"parallel.{name}_stage_layers": layers for name, layers in ends.items() if layers is not None}
    if not uneven:
        if model.num_layers % (stages * per_stage):
            few = model.num_layers < stages * per_stage
            raise ConfigError(
                f"parallel.pipeline={stages} × parallel.virtual_pipeline={per_stage} must divide model.num_layers="
                f"{model.num_layers}"
                + (f", which leaves some of the {stages * per_stage} model chunks without a layer" if few else "")
                + f"; set {_pipelines_that_fit(model.num_layers, stages, per_stage)}"
            )
        return
    told = ", ".join(f"{key}={layers}" for key, layers in uneven.items())
    if stages == 1:
        raise ConfigError(f"{told}: there is one pipeline stage, with all layers; set it to null")
    between, middle = model.num_layers - sum(uneven.values()), stages - len(uneven)
    for key, layers in uneven.items():
        if layers % per_stage:
            raise ConfigError(f"{key}={layers} must be a multiple of parallel.virtual_pipeline={per_stage}")
    if (between != 0) if middle == 0 else (between < middle * per_stage or between % (middle * per_stage)):
        fits = f"a positive multiple of {middle * per_stage}" if middle else "0"
        raise ConfigError(
            f"{told} leave {between} of model.num_layers={model.num_layers} layers for {middle} pipeline stage(s) of "
            f"{per_stage} model chunk(s); that must be {fits}"
        )


def _pipelines_that_fit(num_layers: int, stages: int, per_stage: int) -> str:
    """Return settings that fit, each with the other degrees unchanged, or those of one model chunk per stage."""

    def divisors(of: int) -> list[int]:
        return [d for d in range(1, of + 1) if of % d == 0]

    fits = []
    # Every model chunk of a stage has the same number of layers.
    layer_groups, incomplete_groups = divmod(num_layers, per_stage)
    if not incomplete_groups:
        # Only several stages can be interleaved.
        pipelines = [d for d in divisors(layer_groups) if d > 1 or per_stage == 1]
        fits += [f"parallel.pipeline in {pipelines}"] if pipelines else []
    if num_layers % stages == 0:
        fits.append(f"parallel.virtual_pipeline in {divisors(num_layers // stages)}")
    if not incomplete_groups and layer_groups >= stages:
        last = (layer_groups - (stages - 1) * (layer_groups // stages)) * per_stage
        fits.append(f"parallel.last_stage_layers={last}")
    return " or ".join(fits) or f"parallel.virtual_pipeline=1 and parallel.pipeline in {divisors(num_layers)}"


def start_topology(parallel: ParallelConfig | None = None, *, device: str = "auto", seed: int = 0) -> Topology:
    """Choose the device, join the process group, and build the topology: all that a script needs before a policy.

    Args:
        parallel: The degrees; by default all ranks are data parallel.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        seed: The seed of megatron-core's random number generators.

    Raises:
        ConfigError: the degrees do not fit the world size, or there is no such device.
    """
    return build(parallel or ParallelConfig(), start_device(device), seed)


def build(parallel: ParallelConfig, device: torch.device, seed: int) -> Topology:
    """Check the degrees, initialise megatron-core's process groups, seed its generators, and return the topology."""
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
        expert_tensor_parallel_size=1,  # experts are small, and their tokens are sent between ranks anyway
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
        data=data,
        first_stage_layers=parallel.first_stage_layers,
        last_stage_layers=parallel.last_stage_layers,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
    )


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = 64) -> int:
    """Return the smallest multiple of lcm(`multiple`, `tensor`) that is at least `vocab_size`.

    It is the same for every tensor-parallel degree that divides `multiple`.
    """
    divisor = math.lcm(multiple, tensor)
    return -(-vocab_size // divisor) * divisor
