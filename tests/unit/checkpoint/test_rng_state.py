"""The states of generators are restored, and those of a GPU are not given to a CPU's."""

from __future__ import annotations

import io

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from rl_megatron.checkpoint.rng_state import restore_random_state, serialise_random_state


@pytest.fixture
def generators():
    """Yield megatron-core's generators, and put all states back."""
    tracker, ours = get_cuda_rng_tracker(), torch.get_rng_state()
    before = dict(tracker.get_states())
    yield tracker
    tracker.set_states(before)
    torch.set_rng_state(ours)


def test_all_generators_are_restored(generators):
    generators.set_states({"model": torch.tensor([1, 2])})
    saved, drawn = serialise_random_state(), torch.rand(3)
    generators.set_states({})
    restore_random_state(saved)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(generators.get_states()["model"], torch.tensor([1, 2]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for a machine without a GPU")
def test_the_states_of_a_gpu_are_not_given_to_generators_of_a_cpu(generators):
    of_gpu = {"cpu": torch.get_rng_state(), "megatron": {"model": torch.zeros(16)}, "cuda": torch.zeros(16)}
    saved, drawn = io.BytesIO(), torch.rand(3)
    torch.save(of_gpu, saved)
    generators.set_states({"model": torch.tensor([1, 2])})
    restore_random_state(saved.getvalue())
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(generators.get_states()["model"], torch.tensor([1, 2]))
