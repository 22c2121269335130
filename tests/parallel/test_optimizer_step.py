"""An optimizer step waits for the device once for its gradient norms, and the whole norm is megatron-core's."""

from __future__ import annotations

import re
from unittest.mock import patch

import megatron.core.optimizer as optimizers
import pytest
import torch
from megatron.core.optimizer import clip_grads
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.checkpoint.optimizer_state import list_parts
from rl_megatron.losses import NLLLoss
from rl_megatron.topology.torch_optimizers import use_torch_optimizers
from rl_megatron.training import optimizer as policy_optimizer
from rl_megatron.training.trainer import Trainer
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, EXPERTS, MODEL, build_policy, gradients
from tests.parallel.test_layouts import random_batch


class ReadNumbers(TorchDispatchMode):
    """Count the numbers that Python reads from tensors. On a GPU, each of them waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def step(parallel: dict, has_experts: bool) -> tuple[int, int, float, dict[str, float], dict[str, torch.Tensor]]:
    """Take a step.

    Returns:
        How many parameters the rank updates, how many numbers the step reads, megatron-core's norm, ours, and on rank 0
        the gradient of every parameter.
    """
    model = EXPERTS if has_experts else MODEL
    policy = build_policy(parallel, model=model, optimizer=DISTRIBUTED_OPTIMIZER)
    update, observed = Trainer.update, []

    def observe(trainer, loss):
        policy_optimizer.complete_gradients(policy.model.wrapped_model_chunks)
        whole = gradients(policy)
        trainer.optimizer.prepare_grads()
        megatrons = float(trainer.optimizer.get_grad_norm())
        with ReadNumbers() as reads:
            ours, updated = update(trainer, loss)
        assert updated
        observed.append((reads.count, megatrons, ours, whole))
        return ours, updated

    with patch.object(Trainer, "update", observe):
        policy.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)
    parameters = sum(len(list(part.get_parameters())) for part in list_parts(policy.optimizer))
    return parameters, *observed[0]


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
            use_torch_optimizers()
        policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER, precision="bf16")
        norms.append(policy.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)["grad_norm"])
    return norms[0], norms[1]


def _needs_a_gpu(*args: object, **kwargs: object) -> None:
    raise RuntimeError("this kernel needs a GPU")


def test_a_cpu_trains_although_optimizer_kernels_for_gpus_are_installed(ranks):
    before, after = ranks.run(1, train_with_kernels_that_need_a_gpu)[0]
    assert before == after > 0


GROUPS = {
    "grad_norm": r".",
    "grad_norm_embedding": r"^embedding\.",
    **{f"grad_norm_layers_{layer + 1}": rf"^decoder\.layers\.{layer}\." for layer in range(4)},
    "grad_norm_output": r"^(decoder\.final|output_layer)",
}


@pytest.mark.parametrize(
    ("world_size", "parallel", "has_experts"),
    [
        (1, {}, False),
        (2, {}, True),
        (4, {"tensor": 2, "sequence": True, "expert": 4}, True),
        (2, {"pipeline": 2}, False),
    ],
    ids=["dense", "experts", "expert parallel", "pipeline"],
)
def test_a_step_reads_its_norms_at_once_and_they_are_those_of_the_gradient(ranks, world_size, parallel, has_experts):
    taken = ranks.run(world_size, step, parallel, has_experts)
    whole = taken[0][-1]
    wanted = {
        group: torch.stack([each.norm() for name, each in whole.items() if re.match(pattern, name)]).norm().item()
        for group, pattern in GROUPS.items()
    }
    wanted["grad_norm_clipped"] = min(wanted["grad_norm"], DISTRIBUTED_OPTIMIZER.clip_grad)
    for parameters, reads, megatrons, norms, _ in taken:
        assert parameters > 5
        assert reads <= 1
        assert norms["grad_norm"] == pytest.approx(megatrons, rel=1e-6)
        assert norms == pytest.approx(wanted, rel=1e-6)
        assert min(norms.values()) > 0
