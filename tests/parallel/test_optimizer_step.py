"""An optimizer step waits for the device once per gradient norm, and its norm is megatron-core's."""

from __future__ import annotations

import megatron.core.optimizer as optimizers
import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.checkpoint.optimizer_state import parts
from rl_megatron.losses import NLLLoss
from rl_megatron.policy import optimizer as policy_optimizer
from rl_megatron.topology import cuda_on_cpu
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, EXPERTS, MODEL, build_policy
from tests.parallel.test_layouts import random_batch


class ReadNumbers(TorchDispatchMode):
    """Count the numbers that Python reads from tensors. On a GPU, each of them waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def step(parallel: dict, has_experts: bool) -> tuple[int, int, list[float]]:
    """Return how many parameters a step updates, how many numbers it reads, and its norm in both implementations."""
    model = EXPERTS if has_experts else MODEL
    policy = build_policy(parallel, model=model, optimizer=DISTRIBUTED_OPTIMIZER)
    policy.accumulate_gradients(random_batch(8, 16, 0), NLLLoss())
    optimizer, scheduler = policy.optimizer, policy.scheduler
    assert optimizer is not None and scheduler is not None
    optimizer.prepare_grads()
    ours, norms = clip_grads.l2_norm_impl, []
    for clip_grads.l2_norm_impl in (local_multi_tensor_l2_norm, ours):
        norms.append(float(optimizer.get_grad_norm()))
    with ReadNumbers() as reads:
        grad_norm, updated = policy_optimizer.take_step(policy.model, optimizer, scheduler, 1.0)
    assert updated
    parameters = sum(len(list(part.get_parameters())) for part in parts(optimizer))
    return parameters, reads.count, [*norms, grad_norm]


def train_with_kernels_that_need_a_gpu() -> tuple[float, float]:
    """Return the gradient norms of a step before and after megatron-core has found kernels that need a GPU."""
    norms = []
    for is_installed in (False, True):
        if is_installed:
            optimizers.USING_PYTORCH_OPTIMIZER = False
            optimizers.Adam = optimizers.distrib_optimizer.Adam = _needs_a_gpu
            for module in (clip_grads, optimizers.optimizer):
                module.multi_tensor_applier = module.multi_tensor_scale_impl = _needs_a_gpu
            clip_grads.l2_norm_impl = _needs_a_gpu
            cuda_on_cpu._use_torch_optimizers()
        policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER, precision="bf16")
        norms.append(policy.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)["grad_norm"])
    return norms[0], norms[1]


def _needs_a_gpu(*args: object, **kwargs: object) -> None:
    raise RuntimeError("this kernel needs a GPU")


def test_a_cpu_trains_although_optimizer_kernels_for_gpus_are_installed(ranks):
    before, after = ranks.run(1, train_with_kernels_that_need_a_gpu)[0]
    assert before == after > 0


@pytest.mark.parametrize(
    ("world_size", "parallel", "has_experts"),
    [(1, {}, False), (2, {}, True), (4, {"tensor": 2, "sequence": True, "expert": 4}, True)],
    ids=["dense", "experts", "expert parallel"],
)
def test_a_step_reads_one_number_per_norm_and_the_norm_is_megatron_cores(ranks, world_size, parallel, has_experts):
    for parameters, reads, norms in ranks.run(world_size, step, parallel, has_experts):
        assert parameters > 10
        assert reads <= (
            2 if has_experts else 1
        )  # norms of dense parameters and of experts are summed over other ranks
        assert norms[0] == norms[1] == norms[2] > 0
