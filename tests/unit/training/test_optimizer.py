"""torch's Adam as the optimizer uses it without Transformer Engine and Apex."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.checkpoint.optimizer_state import allocate_moments, get_step_count
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.training import optimizer as policy_optimizer


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
        assert get_step_count(part) == expected
        part.optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        part.optimizer.step()


def rates(total_steps: int | None, **settings: Any) -> list[float]:
    """Return the learning rates of the first five steps of a peak of 8."""
    group: dict[str, Any] = {}
    config = OptimizerConfig(lr=8.0, weight_decay=0.25, **settings)
    optimizer: Any = SimpleNamespace(param_groups=[group])
    scheduler, found = policy_optimizer.build_scheduler(optimizer, config, total_steps), []
    for _ in range(5):
        found.append(group["lr"])
        assert group["weight_decay"] == 0.25
        scheduler.step(increment=1)
    return found


@pytest.mark.parametrize(
    ("total_steps", "settings", "expected"),
    [
        (4, {"decay_style": "linear"}, [8, 6, 4, 2, 0]),
        (4, {"decay_style": "linear", "min_lr": 4.0}, [8, 7, 6, 5, 4]),
        (9, {"decay_style": "linear", "min_lr": 4.0, "decay_steps": 2}, [8, 6, 4, 4, 4]),
        (4, {"decay_style": "linear", "warmup_steps": 3}, [2, 4, 6, 8, 0]),
        (1, {"decay_style": "linear", "warmup_steps": 3}, [2, 4, 6, 8, 0]),
        (4, {"decay_style": "cosine"}, [8, 4 + 8**0.5, 4, 4 - 8**0.5, 0]),
        (4, {"decay_style": "constant"}, [8] * 5),
        (None, {}, [8] * 5),
        (None, {"warmup_steps": 3}, [2, 4, 6, 8, 8]),
        (None, {"decay_style": "linear", "decay_steps": 4}, [8, 6, 4, 2, 0]),
    ],
)
def test_the_learning_rate_follows_the_warmup_and_the_decay(total_steps, settings, expected):
    assert rates(total_steps, **settings) == pytest.approx(expected)


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="decay_style=cosine needs .* total_steps, or set optimizer.decay_steps"):
        rates(None, decay_style="cosine")
