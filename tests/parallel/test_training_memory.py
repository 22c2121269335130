"""Gradient buffers and optimizer state are moved only if they have to be, and training goes on with moved state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.losses import NLLLoss
from rl_megatron.training.training_memory import TrainingMemory, move_states, offloadable_states
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, OPTIMIZER, build_policy, weights
from tests.parallel.test_layouts import random_batch


def test_buffers_that_were_not_freed_are_not_allocated_again():
    """megatron-core's methods would wait for the device in every training step."""
    calls = []
    model_chunk = SimpleNamespace(
        offload_grad_buffers=lambda synchronize, empty_cache: calls.append("free"),
        restore_grad_buffers=lambda synchronize: calls.append(f"allocate, synchronize={synchronize}"),
    )
    model: Any = SimpleNamespace(topology=SimpleNamespace(is_cuda=True), wrapped_model_chunks=[model_chunk])
    memory = TrainingMemory(model, None)
    memory.allocate_gradients()
    assert calls == []
    memory.free_gradients()
    memory.free_gradients()
    for _ in range(2):
        memory.allocate_gradients()
    assert calls == ["free", "allocate, synchronize=False"]


def train_with_moved_state(distributed: bool, precision: str, is_moved: bool) -> tuple[int, list[float], dict]:
    """Return how many tensors were moved to other memory and back, and the norms and weights of three steps."""
    optimizer = DISTRIBUTED_OPTIMIZER if distributed else OPTIMIZER
    policy = build_policy({}, optimizer=optimizer, precision=precision)
    moved, norms = 0, []
    for seed in range(3):
        norms.append(policy.train(random_batch(8, 16, seed), NLLLoss(), gbs=8)["grad_norm"])
        if is_moved:
            for _ in range(2):
                assert policy.optimizer is not None
                states = list(offloadable_states(policy.optimizer, policy.model.model_chunks))
                old, targets = [state.tensor for state in states], [torch.empty_like(state.tensor) for state in states]
                move_states(states, targets)
                for tensor in old:
                    tensor.fill_(torch.nan)
                states = list(offloadable_states(policy.optimizer, policy.model.model_chunks))
                assert [state.tensor.data_ptr() for state in states] == [target.data_ptr() for target in targets]
            moved = len(states)
    return moved, norms, weights(policy)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_training_goes_on_bitwise_with_moved_optimizer_state(ranks, distributed, precision):
    _, norms, kept = ranks.run(2, train_with_moved_state, distributed, precision, False)[0]
    moved, found_norms, found = ranks.run(2, train_with_moved_state, distributed, precision, True)[0]
    assert moved > 10
    assert found_norms == norms
    assert all(torch.equal(found[name], whole) for name, whole in kept.items())
