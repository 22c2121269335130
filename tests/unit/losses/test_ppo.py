"""PPOLoss against torchtune's definition written out, on the tokens that count."""

import math

import pytest
import torch

from rl_megatron.losses import PPOLoss


def make_inputs(dtype=torch.float64):
    """Six tensors [3, 4], ratios and values moving far enough for both clips to bite."""
    generator = torch.Generator().manual_seed(0)
    names = ("pi_old_logprobs", "pi_logprobs", "advantages", "phi_old_values", "phi_values", "returns")
    noise = torch.randn(6, 3, 4, generator=generator, dtype=dtype)
    inputs = dict(zip(names, noise, strict=True))
    inputs["pi_logprobs"] = inputs["pi_old_logprobs"] + 0.2 * inputs["pi_logprobs"]
    inputs["phi_values"] = inputs["phi_old_values"] + 0.4 * inputs["phi_values"]
    return inputs


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
VALUE_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0]]).bool()


def torchtune(inputs, epsilon, value_clip, coefficient, mask, value_mask):
    """The definition on the tokens that count, gathered; not on the rest of the batch."""
    old, new, advantages = (inputs[name][mask] for name in ("pi_old_logprobs", "pi_logprobs", "advantages"))
    old_v, v, returns = (inputs[name][value_mask] for name in ("phi_old_values", "phi_values", "returns"))
    ratio = (new - old).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - epsilon, 1 + epsilon)
    near = torch.min(torch.max(v, old_v - value_clip), old_v + value_clip)
    policy_loss = torch.max(unclipped, clipped).mean()
    value_loss = 0.5 * torch.max((v - returns) ** 2, (near - returns) ** 2).mean()
    return (
        policy_loss + coefficient * value_loss,
        policy_loss,
        value_loss,
        ratio.mean(),
        (clipped > unclipped).double().mean(),
    )


@pytest.mark.parametrize("settings", [(0.1, 0.2, 0.1), (0.05, 0.05, 2.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_five_results_and_gradients(settings, masked):
    masks = (MASK, VALUE_MASK) if masked else (None, None)
    everything = torch.ones_like(MASK)
    inputs, plain = make_inputs(), make_inputs()
    for given in (inputs, plain):
        given["pi_logprobs"].requires_grad_(), given["phi_values"].requires_grad_()
    found = PPOLoss(*settings)(**inputs, padding_masks=masks[0], value_padding_masks=masks[1])
    want = torchtune(plain, *settings, *(masks if masked else (everything, everything)))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    assert 0 < found[4] < 1 and not any(result.requires_grad for result in found[1:])
    moving = ("pi_logprobs", "phi_values")
    gradients = torch.autograd.grad(found[0], [inputs[name] for name in moving])
    expected = torch.autograd.grad(want[0], [plain[name] for name in moving])
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_masked_has_no_effect(poison):
    results = []
    for hide in (False, True):
        inputs = make_inputs()
        for name in inputs if hide else ():
            keep = VALUE_MASK if "values" in name or name == "returns" else MASK
            inputs[name] = inputs[name].masked_fill(~keep, poison)
        moving = [inputs[name].requires_grad_() for name in ("pi_logprobs", "phi_values")]
        found = PPOLoss()(**inputs, padding_masks=MASK, value_padding_masks=VALUE_MASK)
        results.append((*found, *torch.autograd.grad(found[0], moving)))
    for clean, bad in zip(*results, strict=True):
        assert torch.equal(clean, bad)


def test_nothing_left_is_a_finite_zero():
    inputs = make_inputs()
    moving = [inputs[name].requires_grad_() for name in ("pi_logprobs", "phi_values")]
    nothing = torch.zeros_like(MASK)
    found = PPOLoss()(**inputs, padding_masks=nothing, value_padding_masks=nothing)
    assert [result.item() for result in found] == [0.0] * 5
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(found[0], moving))


def test_far_ratios_stay_finite_and_half_precision_is_widened():
    inputs = make_inputs(torch.bfloat16)
    inputs["pi_logprobs"] = (inputs["pi_logprobs"] + 1000).requires_grad_()
    found = PPOLoss()(**inputs)
    assert all(torch.isfinite(result) and result.dtype == torch.float32 for result in found)
    assert torch.isfinite(torch.autograd.grad(found[0], inputs["pi_logprobs"])[0]).all()


def test_it_is_a_module_with_torchtune_s_defaults():
    loss_fn, seen = PPOLoss(), []
    assert (loss_fn.epsilon, loss_fn.value_clip_range, loss_fn.value_coeff) == (0.1, 0.2, 0.1)
    assert isinstance(loss_fn, torch.nn.Module) and not list(loss_fn.parameters())
    loss_fn.register_forward_hook(lambda module, args, results: seen.append(results))
    assert loss_fn(*make_inputs().values()) is seen[0]


def test_shapes_and_settings_that_do_not_fit_are_named():
    inputs = make_inputs()
    with pytest.raises(ValueError, match=r"pi_logprobs \(3, 4\), advantages \(3,\) differ in shape"):
        PPOLoss()(**inputs | {"advantages": inputs["advantages"][:, 0]})
    with pytest.raises(ValueError, match=r"returns \(3, 4\), their mask \(3, 3\) differ in shape"):
        PPOLoss()(**inputs, value_padding_masks=MASK[:, 1:])
    with pytest.raises(ValueError, match="PPOLoss: epsilon=-0.1 must be finite and not negative"):
        PPOLoss(epsilon=-0.1)
    for bad in ("a", None, True):
        with pytest.raises(TypeError, match=f"PPOLoss: value_coeff={bad!r} must be a number"):
            PPOLoss(value_coeff=bad)
