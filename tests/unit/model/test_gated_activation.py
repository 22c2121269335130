"""The gated activation keeps less memory on a GPU than on a CPU, and its gradients are the same."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.model.layers import gated_activation
from rl_megatron.model.layers.gated_activation import ACTIVATIONS, GatedActivation

CONFIG: Any = SimpleNamespace()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_same_if_backward_computes_the_activation_again(monkeypatch, activation, dtype):
    generator = torch.Generator().manual_seed(0)
    both, gradient = (torch.randn(5, 3, size, generator=generator).to(dtype) for size in (16, 8))
    results = []
    for again in (False, True):
        monkeypatch.setattr(gated_activation, "computes_again", lambda device, again=again: again)
        given = both.clone().requires_grad_()
        GatedActivation(CONFIG, activation)(given).backward(gradient)
        results.append(given.grad)
    assert torch.equal(results[0], results[1])
    given = both.double().requires_grad_()
    gate, up = given.chunk(2, dim=-1)
    (ACTIVATIONS[activation](gate) * up).backward(gradient.double())
    torch.testing.assert_close(
        results[1].double(), given.grad, atol=1e-6 if dtype == torch.float32 else 3e-2, rtol=1e-2
    )


@pytest.mark.parametrize(("device", "kept"), [("cpu", 3), ("meta", 2)])
def test_only_a_cpu_keeps_more_than_the_input(device, kept):
    sizes = []  # without a GPU, autograd runs on no "cuda" tensors; "meta" stands for every device but a CPU

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        GatedActivation(CONFIG, "silu")(torch.empty(4, 20, device=device, requires_grad=True))
    assert sum(sizes) == kept * 4 * 10
