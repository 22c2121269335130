"""RoPE and SwiGLU in Triton have the rounding of torch's operators on a GPU."""

import pytest
import torch

from rl_megatron.model.layers import gated_activation, rope
from rl_megatron.model.layers.gated_activation import GatedActivation
from rl_megatron.model.layers.rope import compute_turns, rotate, split_and_rotate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def results(monkeypatch, function, *inputs):
    """Return what a function and its gradients are with Triton, and with torch's operators."""
    both = []
    for use_triton in (True, False):
        with monkeypatch.context() as patched:
            if not use_triton:
                for module in (rope, gated_activation):
                    patched.setattr(module, "find_layer_kernels", lambda device: None)
            outputs = function(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            generator = torch.Generator(device="cuda").manual_seed(1)
            weights = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in outputs]
            both.append([*outputs, *torch.autograd.grad(outputs, inputs, weights)])
    return zip(*both, strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("groups", "per_group", "dim", "rotated"), [(2, 7, 64, 64), (8, 4, 128, 128), (1, 3, 80, 40)])
def test_rotation_has_the_same_bits(monkeypatch, dtype, interleaved, groups, per_group, dim, rotated):
    generator = torch.Generator(device="cuda").manual_seed(0)
    turns = compute_turns(3 * torch.randn(33, 1, 1, rotated // 2, generator=generator, device="cuda"))
    mixed = torch.randn(33, 2, groups, (per_group + 2) * dim, generator=generator, device="cuda").to(dtype)
    heads = torch.randn(33, 2, groups * per_group, dim, generator=generator, device="cuda").to(dtype)
    for function, x in (
        (lambda x: split_and_rotate(x, turns, dim, interleaved=interleaved), mixed.requires_grad_()),
        (lambda x: rotate(x, turns, 1.5, interleaved=interleaved), heads.requires_grad_()),
    ):
        for found, wanted in results(monkeypatch, function, x):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [4864, 1000, 3])
def test_swiglu_is_the_same_up_to_the_last_bit(monkeypatch, dtype, width):
    generator = torch.Generator(device="cuda").manual_seed(0)
    both = (3 * torch.randn(257, 2 * width, generator=generator, device="cuda")).to(dtype).requires_grad_()
    limit = 1e-6 if dtype is torch.float32 else 2**-7
    for found, wanted in results(monkeypatch, GatedActivation(None, "silu"), both):
        torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)
