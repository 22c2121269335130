"""The optimizer step, and megatron-core's DDP, Adam and learning-rate schedule, built from our configuration."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import allocate_moments
from rl_megatron.config.schema import OptimizerConfig
from rl_megatron.execution import NonFiniteLoss
from rl_megatron.model.layers.router import move_biases, moving_routers
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.topology.topology import Topology


def wrap_for_gradients(
    model_chunks: list[torch.nn.Module], topology: Topology, optimizer: OptimizerConfig
) -> list[DistributedDataParallel]:
    """Return each model chunk wrapped in megatron-core's DDP.

    Main gradients are fp32. They are *summed* over data- and context-parallel ranks, because losses are already
    normalised over the global batch. The pipeline schedule calls `finalize_model_grads` at its end.
    """
    config = get_model_config(model_chunks[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.distributed,
        average_in_collective=False,
        overlap_grad_reduce=optimizer.overlap,
        overlap_param_gather=optimizer.overlap and optimizer.distributed,
        check_for_nan_in_grad=False,  # the runner checks the loss, and `take_step` checks the gradient norm
    )
    wrapped = [
        DistributedDataParallel(
            config, ddp_config, model_chunk, disable_bucketing=index > 0, pg_collection=topology.groups
        )
        for index, model_chunk in enumerate(model_chunks)
    ]
    config.no_sync_func = [model_chunk.no_sync for model_chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync

    def finalize(model, num_tokens=None, **kwargs):
        finalize_model_grads(model, None, **kwargs)  # None: the loss is already divided, see execution/runner.py

    config.finalize_model_grads_func = finalize
    return wrapped


@torch.no_grad()
def complete_gradients(model_chunks: list[DistributedDataParallel]) -> None:
    """Gather the summed gradients of all its parameters on every rank. Collective.

    Under the distributed optimizer, after a backward pass each rank has only the sums for the weights that it updates.
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
    model_chunks: list[DistributedDataParallel], config: OptimizerConfig, precision: str
) -> MegatronOptimizer:
    """Return Adam with decoupled weight decay for all model chunks. Under bf16, master weights and moments are fp32."""
    bf16 = precision == "bf16"
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
            use_distributed_optimizer=config.distributed,
            overlap_param_gather=config.overlap and config.distributed,
        ),
        [*model_chunks],
    )
    allocate_moments(optimizer)
    return optimizer


def build_scheduler(optimizer: MegatronOptimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Return a schedule with a linear warmup, followed by a decay of the style `decay_style`.

    The warmup starts at lr/(warmup_steps + 1) and takes `warmup_steps` steps. "linear" and "cosine" reach `min_lr` at
    `decay_steps`. "inverse-square-root" is lr·√(warmup_steps/step), and `min_lr` after `decay_steps`. "constant" does
    not decay. If `decay_steps` is not set, it is `total_steps`, or the warmup plus one step if that is longer.

    Raises:
        ConfigError: The warmup is longer than the decay, or `min_lr` exceeds `lr`.
    """
    config.check("optimizer")  # a script may have built the config without load_config
    decay_steps = config.decay_steps or max(total_steps, config.warmup_steps + 1)
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
        use_checkpoint_opt_param_scheduler=False,  # the settings are the run's; a checkpoint only has the step count
        override_opt_param_scheduler=True,
    )


def take_step(
    model: ShardedModel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, loss: float
) -> tuple[float, bool]:
    """Update the weights with the gradients in their main gradient buffers, and advance the schedule. Collective.

    Args:
        model: The model.
        optimizer: The model's optimizer.
        scheduler: The optimizer's learning-rate schedule.
        loss: The value of the loss, for the error message.

    Returns:
        The gradient norm before clipping, and whether the weights were updated.

    Raises:
        NonFiniteLoss: The gradient norm is NaN or infinite. Nothing is updated then.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):  # step() would clip with it, and every weight would become NaN
        raise NonFiniteLoss(f"the gradient norm is {grad_norm} at a finite loss of {loss:.4g}")
    updated, _, _ = optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]  # abstract, without a return type
    model.mark_updated(updated)
    if updated:
        move_biases(moving_routers(model.model_chunks), model.topology.groups.tp_dp_cp)
    scheduler.step(increment=1)
    return grad_norm, bool(updated)
