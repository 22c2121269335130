"""Check the parallel degrees against the world size and the model. This module does not need torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Self

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig


class ParallelDegrees(Protocol):
    """The parallel degrees of a configuration or a running topology, which a model and its sequences must fit."""

    @property
    def tensor(self) -> int: ...

    @property
    def sequence(self) -> bool: ...  # whether activations are sharded over the tensor-parallel ranks

    @property
    def pipeline(self) -> int: ...

    @property
    def virtual_pipeline(self) -> int: ...  # model chunks per pipeline stage

    @property
    def context(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def expert_tensor(self) -> int: ...

    @property
    def first_stage_layers(self) -> int | None: ...

    @property
    def last_stage_layers(self) -> int | None: ...


class SequenceLayout(Protocol):
    """The part of a layout on which the plan of microbatches depends."""

    @property
    def data(self) -> int: ...  # data-parallel ranks, which share the batch

    @property
    def context(self) -> int: ...

    @property
    def sequence_multiple(self) -> int: ...  # sequences are padded to a multiple of it


@dataclass(frozen=True)
class ConfiguredLayout:
    """The `SequenceLayout` of a configuration. It needs no process group."""

    data: int
    context: int
    sequence_multiple: int

    @classmethod
    def from_config(cls, parallel: ParallelConfig, world_size: int) -> Self:
        """Check the degrees by `validate`, and return the layout of `world_size` ranks."""
        return cls(validate(parallel, world_size), parallel.context, sequence_multiple(parallel))


def zigzag_slices(cp_size: int) -> int:
    """Return the number of equal slices into which context parallelism cuts a sequence."""
    return 1 if cp_size == 1 else 2 * cp_size


def sequence_multiple(parallel: ParallelDegrees) -> int:
    """Return the number that must divide the padded length of every sequence.

    Context parallelism cuts a sequence into equal zigzag slices, and sequence parallelism cuts it into equal shards.
    """
    return zigzag_slices(parallel.context) * (parallel.tensor if parallel.sequence else 1)


def validate(parallel: ParallelConfig, world_size: int) -> int:
    """Check the degrees against the world size, and return the data-parallel degree.

    Raises:
        ConfigError: The degrees do not divide the world size, or contradict each other. The message names the values
            that would fit.
    """
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"):
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
        raise ConfigError("parallel.sequence=true needs parallel.tensor above 1; set parallel.sequence=false")
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} interleaves pipeline stages, but "
            "parallel.pipeline is 1; set parallel.virtual_pipeline=1 or raise parallel.pipeline"
        )
    _check_expert_ranks(parallel, world_size // parallel.pipeline)
    return world_size // model_ranks


def _check_expert_ranks(parallel: ParallelConfig, stage_ranks: int) -> None:
    """Check that expert · expert_tensor divides the number of ranks of a pipeline stage."""
    split = parallel.expert_tensor
    if stage_ranks % split:
        raise ConfigError(
            f"parallel.expert_tensor={split} must divide the {stage_ranks} ranks of a pipeline stage; "
            f"degrees that fit: {_divisors(stage_ranks)}"
        )
    groups = stage_ranks // split
    if groups % parallel.expert and split == 1:
        raise ConfigError(
            f"parallel.expert={parallel.expert} must divide the {stage_ranks} ranks of a pipeline stage; "
            f"degrees that fit: {_divisors(stage_ranks)}"
        )
    if groups % parallel.expert:
        raise ConfigError(
            f"parallel.expert={parallel.expert} must divide the {groups} groups of parallel.expert_tensor={split} "
            f"ranks in a pipeline stage of {stage_ranks} ranks; degrees that fit: {_divisors(groups)}"
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _world_sizes_that_fit(parallel: ParallelConfig, world_size: int) -> str:
    fits = []
    for name in ("tensor", "pipeline", "context"):
        others = parallel.tensor * parallel.pipeline * parallel.context // getattr(parallel, name)
        if world_size % others == 0:
            fits.append(f"parallel.{name} in {_divisors(world_size // others)}")
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    start_with = f"start a multiple of {model_ranks} ranks (torchrun --nproc-per-node {model_ranks} …)"
    return (f"with the other degrees as they are, {' or '.join(fits)} would fit, or " if fits else "") + start_with


def validate_model(model: ModelConfig, parallel: ParallelDegrees) -> None:
    """Check the degrees against the model's shape, before anything is built.

    Raises:
        ConfigError: A degree does not divide the size that it splits. The message names the degrees that would fit.
    """

    def require_divisor(degree_key: str, degree: int, size_key: str, size: int) -> None:
        if size % degree:
            fits = [divisor for divisor in _divisors(size) if divisor <= 2 * degree]
            raise ConfigError(f"{degree_key}={degree} must divide {size_key}={size}; degrees that fit: {fits}")

    require_divisor("parallel.tensor", parallel.tensor, "model.num_attention_heads", model.num_attention_heads)
    require_divisor("parallel.tensor", parallel.tensor, "model.num_query_groups", model.num_query_groups)
    if model.linear_num_key_heads is not None:  # context-parallel ranks split them further
        both = "parallel.tensor · parallel.context"
        require_divisor(
            both, parallel.tensor * parallel.context, "model.linear_num_key_heads", model.linear_num_key_heads
        )
    if model.num_experts is None or model.first_dense_layers:  # experts are not split by tensor parallelism
        require_divisor("parallel.tensor", parallel.tensor, "model.ffn_hidden_size", model.ffn_hidden_size)
    _check_pipeline(model, parallel)
    if model.num_experts is None:
        for key, degree in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
            if degree > 1:
                raise ConfigError(f"parallel.{key}={degree}: a dense model has no experts; set parallel.{key}=1")
        return
    require_divisor("parallel.expert", parallel.expert, "model.num_experts", model.num_experts)
    width = "ffn_hidden_size" if model.expert_ffn_hidden_size is None else "expert_ffn_hidden_size"
    require_divisor("parallel.expert_tensor", parallel.expert_tensor, f"model.{width}", getattr(model, width))
    if parallel.expert_tensor > 1 and model.linear_bias:
        raise ConfigError(
            f"parallel.expert_tensor={parallel.expert_tensor} is not supported with model.linear_bias=true: every rank "
            "would add the bias of an expert's output; set parallel.expert_tensor=1"
        )
    if model.shared_expert_ffn_hidden_size is not None:
        require_divisor(
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
    keys = ", ".join(f"{key}={layers}" for key, layers in uneven.items())
    if stages == 1:
        raise ConfigError(f"{keys} must be null, because there is only one pipeline stage, which has all layers")
    between, middle = model.num_layers - sum(uneven.values()), stages - len(uneven)
    for key, layers in uneven.items():
        if layers % per_stage:
            raise ConfigError(f"{key}={layers} must be a multiple of parallel.virtual_pipeline={per_stage}")
    if (between != 0) if middle == 0 else (between < middle * per_stage or between % (middle * per_stage)):
        fits = f"a positive multiple of {middle * per_stage}" if middle else "0"
        raise ConfigError(
            f"{keys} leave {between} of model.num_layers={model.num_layers} layers for {middle} pipeline stage(s) of "
            f"{per_stage} model chunk(s); that must be {fits}"
        )


def _pipelines_that_fit(num_layers: int, stages: int, per_stage: int) -> str:
    """Return settings that each fit with the others unchanged or, if none does, pipelines of one chunk per stage."""
    fits = []
    # Every model chunk of a stage has the same number of layers.
    layer_groups, incomplete_groups = divmod(num_layers, per_stage)
    if not incomplete_groups:
        # Only several stages can be interleaved.
        pipelines = [divisor for divisor in _divisors(layer_groups) if divisor > 1 or per_stage == 1]
        fits += [f"parallel.pipeline in {pipelines}"] if pipelines else []
    if num_layers % stages == 0:
        fits.append(f"parallel.virtual_pipeline in {_divisors(num_layers // stages)}")
    if not incomplete_groups and layer_groups >= stages:
        last = (layer_groups - (stages - 1) * (layer_groups // stages)) * per_stage
        fits.append(f"parallel.last_stage_layers={last}")
    return " or ".join(fits) or f"parallel.virtual_pipeline=1 and parallel.pipeline in {_divisors(num_layers)}"


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = 64) -> int:
    """Return the smallest multiple of lcm(`multiple`, `tensor`) that is at least `vocab_size`.

    It is the same for every tensor-parallel degree that divides `multiple`.
    """
    divisor = math.lcm(multiple, tensor)
    return -(-vocab_size // divisor) * divisor
