"""The zero-centred norm equals Gemma's own bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from rl_megatron.model.layers.norms import PortableRMSNorm
from rl_megatron.topology.device import start_device


@pytest.fixture(autouse=True)
def process():
    start_device("cpu")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_zero_centred_norm_equals_gemmas(dtype):
    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=dtype, layernorm_zero_centered_gamma=True, sequence_parallel=False)
    ours, theirs = PortableRMSNorm(config, 48, eps=1e-6), Gemma3RMSNorm(48, eps=1e-6).to(dtype)
    weight, x = 0.3 * torch.randn(48), 3.0 * torch.randn(11, 48)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    found, wanted = ours(x.to(dtype)), theirs(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype is torch.float32 else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_norm_on_a_cpu_has_the_bits_of_torchs_and_its_gradient(dtype):
    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=dtype, layernorm_zero_centered_gamma=False, sequence_parallel=False)
    norm, upstream = PortableRMSNorm(config, 48, eps=1e-6), torch.randn(5, 11, 48, dtype=dtype)
    norm.weight.data.normal_()
    x = (3.0 * torch.randn(5, 11, 48)).to(dtype).requires_grad_()
    wanted = torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), wanted, rtol=0, atol=0)
    gradients = (torch.autograd.grad(y, [x, norm.weight], upstream) for y in (norm(x), wanted))
    for found, other in zip(*gradients, strict=True):
        torch.testing.assert_close(found, other)
