"""torch's Adam as the optimizer uses it without Transformer Engine and Apex."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.checkpoint.optimizer_state import allocate_moments, step_count
from rl_megatron.policy import optimizer as policy_optimizer


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_adam_is_fused_and_counts_steps_where_its_kernel_reads_them(device):
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, device=device))])
    part: Any = SimpleNamespace(optimizer=adam)
    policy_optimizer.fuse(part)
    allocate_moments(part)
    (state,) = adam.state.values()
    assert adam.param_groups[0]["fused"] is True
    assert state["step"].device.type == state["exp_avg"].device.type == device


def test_steps_are_counted_from_zero():
    part: Any = SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))]))
    policy_optimizer.fuse(part)
    allocate_moments(part)
    for expected in range(3):
        assert step_count(part) == expected
        part.optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        part.optimizer.step()
