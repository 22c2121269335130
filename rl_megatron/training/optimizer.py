"""megatron-core's DDP, Adam and learning-rate schedule, built from our configuration."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import allocate_moments, list_parts
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.timing import MEGATRON_TIMERS
from rl_megatron.topology.topology import Topology


def wrap_for_gradients(
    model_chunks: list[torch.nn.Module], topology: Topology, optimizer: OptimizerConfig
) -> list[DistributedDataParallel]:
    """Return each model chunk wrapped in megatron-core's DDP.

    Main gradients are fp32. They are *summed* over data- and context-parallel ranks, because losses are already
    normalised over the global batch. The pipeline schedule calls `finalize_model_grads` at its end.
    """
    config = get_model_config(model_chunks[0])
    is_split = optimizer.distributed and has_replicas(config, topology)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_split,
        average_in_collective=False,
        overlap_grad_reduce=optimizer.overlap,
        overlap_param_gather=optimizer.overlap and is_split,
        check_for_nan_in_grad=False,  # the runner checks the loss, and the trainer checks the gradient norm
    )
    wrapped = [
        DistributedDataParallel(
            config, ddp_config, model_chunk, disable_bucketing=index > 0, pg_collection=topology.groups
        )
        for index, model_chunk in enumerate(model_chunks)
    ]
    config.no_sync_func = [model_chunk.no_sync for model_chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync

    def finalize(model, num_tokens=None, **kwargs):
        finalize_model_grads(model, None, **kwargs)  # None: the loss is already divided, see training/runner.py

    config.finalize_model_grads_func = finalize
    return wrapped


def has_replicas(config: TransformerConfig, topology: Topology) -> bool:
    """Return whether several ranks hold the same weights, so that the distributed optimizer has something to split.

    Without replicas, it would copy all weights onto themselves in every step.
    """
    groups = [topology.groups.dp_cp] + ([] if config.num_moe_experts is None else [topology.groups.expt_dp])
    return max(group.size() for group in groups) > 1


@torch.no_grad()
def complete_gradients(model_chunks: list[DistributedDataParallel]) -> None:
    """Gather the summed gradients of all parameters on every rank. Collective.

    With the distributed optimizer, a rank has after a backward pass only the sums for the weights that it updates.
    """
    for model_chunk in model_chunks:
        if not model_chunk.ddp_config.use_distributed_optimizer:
            continue
        buffers: list = model_chunk.buffers  # pyright: ignore[reportAssignmentType]  # DDP hides the method of modules
        for buffer in buffers + model_chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def main_gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, a view of the buffer of megatron-core's DDP."""
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]  # DDP sets it


def build_optimizer(
    model_chunks: list[DistributedDataParallel], config: OptimizerConfig, precision: str, topology: Topology
) -> MegatronOptimizer:
    """Return Adam with decoupled weight decay for all model chunks. Under bf16, master weights and moments are fp32."""
    bf16, ddp_config = precision == "bf16", model_chunks[0].ddp_config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.epsilon,
            clip_grad=config.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            overlap_param_gather=ddp_config.overlap_param_gather,
            timers=MEGATRON_TIMERS,
        ),
        [*model_chunks],
        use_gloo_process_groups=False,  # the topology has none
    )
    _count_once(optimizer, topology)
    fuse(optimizer)
    allocate_moments(optimizer)
    return optimizer


def _count_once(optimizer: MegatronOptimizer, topology: Topology) -> None:
    """Make the gradient norm count an expert's weight only once, even if several ranks hold the whole weight.

    megatron-core counts such weights only on the first rank of the tensor-parallel group, but experts are split over
    the expert-tensor-parallel group.
    """
    for part in list_parts(optimizer):
        if any(group["is_expert_parallel"] for group in part.optimizer.param_groups):
            setattr(part, "tp_group", topology.groups.expt_tp)  # noqa: B010  # megatron-core sets it in this way, too


def fuse(optimizer: MegatronOptimizer) -> None:
    """Make torch's AdamW update each parameter in one kernel. Other libraries' Adam always does so.

    By default, torch runs many operations for each parameter on a CPU. On a GPU, it handles all parameters at once, but
    allocates as much memory as the parameters take.
    """
    for part in list_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def build_scheduler(
    optimizer: MegatronOptimizer, config: OptimizerConfig, total_steps: int | None
) -> OptimizerParamScheduler:
    """Return a schedule with a linear warmup, followed by a decay of the style `decay_style`.

    The warmup starts at lr/(warmup_steps + 1) and takes `warmup_steps` steps. "linear" and "cosine" reach `min_lr` at
    `decay_steps`. "inverse-square-root" is lr·√(warmup_steps/step), and `min_lr` after `decay_steps`. "constant" does
    not decay. If `decay_steps` is not set, it is `total_steps`, or the warmup plus one step if that is longer.

    Raises:
        ConfigError: The warmup is longer than the decay, `min_lr` exceeds `lr`, or the decay's last step is unknown.
    """
    config.check("optimizer")  # a script may have built the config without load_config
    if config.decay_style != "constant" and not config.decay_steps and not total_steps:
        raise ConfigError(
            f"optimizer.decay_style={config.decay_style} needs the step at which the decay ends: give the policy "
            "total_steps, or set optimizer.decay_steps; decay_style=constant does not decay"
        )
    decay_steps = config.decay_steps or max(total_steps or 0, config.warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (config.warmup_steps + 1),
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,  # a checkpoint restores only the step count
        override_opt_param_scheduler=True,
    )
