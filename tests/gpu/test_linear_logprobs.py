"""The fused head on a GPU: its gradients against fp64, also when dW is added to an fp32 `main_grad`; its memory."""

import pytest
import torch

from rl_megatron.logprobs import linear_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROWS, HIDDEN, VOCAB = 3000, 128, 5003


def case(dtype, rows=ROWS, vocab=VOCAB):
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(rows, HIDDEN, generator=generator, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(vocab, HIDDEN, generator=generator, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator, device="cuda")
    targets[::3] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("in_main_grad", [False, True])
def test_logprobs_and_gradients_are_close_to_fp64(dtype, backend, in_main_grad):
    if backend == "triton":
        pytest.importorskip("triton")
    hidden, weight, targets = case(dtype)
    if in_main_grad:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    stats = linear_logprobs(hidden, weight, targets, entropy=True, backend=backend, block_tokens=512)
    (stats.logprobs.sum() + stats.entropy.sum()).backward()

    logits = (hidden @ weight.T).detach().double().requires_grad_()  # rounded like those of each token block
    log_p = logits.log_softmax(-1)
    counts = targets != -100
    logprobs = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0][counts]
    entropy = -(log_p.exp() * log_p).sum(-1)[counts]
    (dz,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # TF32 is off; 16 bits round dz
    torch.testing.assert_close(stats.logprobs[counts].double(), logprobs, rtol=tolerance, atol=tolerance)
    found = weight.main_grad if in_main_grad else weight.grad
    for got, want in ((hidden.grad, dz @ weight.double()), (found, dz.T @ hidden.double())):
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


def test_memory_does_not_grow_with_the_tokens():
    peaks = []
    for rows in (4608, 18432):  # a third is ignored, and the others are whole token blocks
        hidden, weight, targets = case(torch.bfloat16, rows, vocab=32768)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_logprobs(hidden, weight, targets, block_tokens=1024).logprobs.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before - hidden.numel() * 2)
    assert peaks[1] - peaks[0] <= 200 * (18432 - 4608)
