"""megatron-core's DDP, (distributed) Adam and learning-rate schedule from our config."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from rl_megatron.checkpoint.optimizer_state import allocate_moments
from rl_megatron.config.schema import OptimizerConfig
from rl_megatron.topology.topology import Topology


def wrap_for_gradients(
    chunks: list[torch.nn.Module], topology: Topology, optimizer: OptimizerConfig
) -> list[DistributedDataParallel]:
    """Each chunk in megatron-core's DDP: fp32 main gradients, *summed* over data- and context-parallel ranks (losses
    are globally normalised already), finished by the schedule through `finalize_model_grads`."""
    config = get_model_config(chunks[0])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.distributed,
        average_in_collective=False,
        overlap_grad_reduce=optimizer.overlap,
        overlap_param_gather=optimizer.overlap and optimizer.distributed,
        check_for_nan_in_grad=False,  # the schedule checks the loss, the optimizer the gradient norm
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0, pg_collection=topology.groups)
        for index, chunk in enumerate(chunks)
    ]
    config.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync

    def finalize(model, num_tokens=None, **kwargs):
        finalize_model_grads(model, None, **kwargs)  # no division by tokens: see execution/runner.py

    config.finalize_model_grads_func = finalize
    return wrapped


@torch.no_grad()
def complete_gradients(chunks: list[DistributedDataParallel]) -> None:
    """Gives every rank all of its parameters' summed gradients; collective. Under the distributed optimizer a step
    leaves each rank with the part whose weights it updates, and other ranks' sums unfinished."""
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def complete_parameters(chunks: list[DistributedDataParallel]) -> None:
    """Gathers, now, the weights that each rank has updated since the last step; collective. With `optimizer.overlap`
    a forward after the next backward does so by itself, module by module."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, precision: str
) -> MegatronOptimizer:
    """Adam with decoupled weight decay over all chunks; fp32 master weights and moments under bf16."""
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
        chunks,
    )
    allocate_moments(optimizer)
    return optimizer


def build_scheduler(optimizer: MegatronOptimizer, config: OptimizerConfig, total_steps: int) -> OptimizerParamScheduler:
    """Linear warmup from lr/(warmup_steps + 1) over `warmup_steps`, then `decay_style` to `min_lr` at `decay_steps`."""
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
        use_checkpoint_opt_param_scheduler=False,  # the run's config governs; a checkpoint brings the step count
        override_opt_param_scheduler=True,
    )
