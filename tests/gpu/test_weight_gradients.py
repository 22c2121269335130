"""Weight gradients of bf16 products are summed in fp32 by a GPU's matrix product."""

import pytest
import torch

from rl_megatron.logprobs.linear import add_weight_gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("tokens", [0, 1, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_product_is_added_to_the_sum_without_rounding_to_16_bits(dtype, tokens):
    generator = torch.Generator(device="cuda").manual_seed(0)
    inputs, gradient = (torch.randn(tokens, size, generator=generator, device="cuda").to(dtype) for size in (96, 160))
    total = torch.randn(160, 96, generator=generator, device="cuda")
    expected = total.double()
    for _ in range(3):
        expected += gradient.double().t() @ inputs.double()
        add_weight_gradient(total, gradient, inputs)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), expected, atol=1e-3, rtol=1e-4)
