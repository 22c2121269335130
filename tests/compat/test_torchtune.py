"""`compat.torchtune.PPOLoss` reports what torchtune's own loss does."""

import pytest
import torch

from rl_megatron import losses
from rl_megatron.compat.torchtune import PPOLoss


def arguments(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    old, logprobs, advantages, old_values, values, returns = torch.randn(6, 3, 5, generator=generator, dtype=dtype)
    mask = torch.rand(3, 5, generator=generator) > 0.4
    return (old, logprobs.requires_grad_(), advantages, old_values, values.requires_grad_(), returns), mask


def of_torchtune(old, logprobs, advantages, old_values, values, returns, mask, epsilon, value_clip, coefficient):
    """torchtune 0.6, `torchtune/rlhf/loss/ppo.py`."""
    mean = (lambda x: (x * mask).sum() / mask.sum()) if mask is not None else torch.Tensor.mean
    ratios = torch.exp(logprobs - old)
    clipped = -advantages * torch.clamp(ratios, 1 - epsilon, 1 + epsilon)
    policy_loss = mean(torch.maximum(clipped, -advantages * ratios))
    share = mean((clipped > -advantages * ratios).to(logprobs))
    within = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    value_loss = 0.5 * mean(torch.maximum((values - returns) ** 2, (within - returns) ** 2))
    return policy_loss + coefficient * value_loss, policy_loss, value_loss, ratios.mean(), share


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_five_results_and_the_gradients_are_torchtunes(is_masked):
    tensors, mask = arguments()
    masks = (mask, mask) if is_masked else (None, None)
    wanted = of_torchtune(*tensors, masks[0], 0.1, 0.2, 0.1)
    leaves = tensors[1], tensors[4]
    gradients = torch.autograd.grad(wanted[0], leaves)
    found = PPOLoss()(*tensors, *masks)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found[0], leaves), gradients)


def test_only_the_mean_of_the_ratios_differs_from_the_loss_of_the_core():
    tensors, mask = arguments(torch.bfloat16)
    ours, theirs = losses.PPOLoss()(*tensors, mask, mask), PPOLoss()(*tensors, mask, mask)
    differ = [name for name, one, other in zip("lpvrc", ours, theirs, strict=True) if not torch.equal(one, other)]
    assert differ == ["r"] and theirs[3].dtype == ours[3].dtype and not theirs[3].requires_grad
