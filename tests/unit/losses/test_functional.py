"""Properties of the formulas that the losses' own tests do not reach."""

import math

import pytest
import torch

from rl_megatron.losses import functional as F


def test_masked_mean_divides_exactly():
    values = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert F.masked_mean(values, mask) == 2.0
    assert F.masked_mean(values, mask, global_normalization_factor=12) == 0.5
    assert F.masked_mean(values, mask, global_normalization_factor=torch.tensor(12)) == 0.5
    assert F.masked_mean(values, mask, dim=-1).tolist() == [1.5, 3.0]
    assert F.masked_mean(torch.ones(3), torch.ones(3), global_normalization_factor=3.0) == 1.0  # an epsilon would show


@pytest.mark.parametrize("dim", [None, -1])
@pytest.mark.parametrize("factor", [None, 0, 0.0, torch.tensor(0)])
def test_masked_mean_of_nothing_is_zero_with_zero_gradient(dim, factor):
    values = torch.tensor([[1.0, math.nan], [math.inf, 2.0]], requires_grad=True)
    mean = F.masked_mean(values, torch.zeros(2, 2), dim=dim, global_normalization_factor=factor)
    assert (mean == 0).all()
    assert (torch.autograd.grad(mean.sum(), values)[0] == 0).all()


def test_weights_in_the_mask_are_weights():
    assert F.masked_mean(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 0.5])) == pytest.approx(4.0 / 1.5)


def test_masked_extremes_of_nothing_are_the_identities():
    values, nothing = torch.tensor([[1.0, -7.0]]), torch.zeros(1, 2)
    assert F.masked_min(values, nothing) == math.inf and F.masked_max(values, nothing) == -math.inf
    assert F.masked_min(values[:, :0], nothing[:, :0]) == math.inf
    assert F.masked_min(values, 1 - nothing) == -7 and F.masked_max(values, 1 - nothing) == 1


def test_k3_keeps_its_precision_near_zero():
    """eˣ − 1 − x ≈ x²/2 vanishes in fp32 if the 1 is subtracted from eˣ."""
    x = torch.tensor([1e-3])
    kl = F.kl_penalty(torch.zeros(1), x, "k3")
    assert kl.item() == pytest.approx(5e-7, rel=1e-3)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_have_the_right_mean_or_order(kind):
    log_p, log_q = (torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double() * 0.1).log_softmax(-1)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    estimate = (log_p.exp() * F.kl_penalty(log_p, log_q, kind, None, None)).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-12 if kind != "k2" else 0.2)


def test_the_score_function_weight_makes_the_kl_gradient_right():
    """E_p[w·k1] differentiated through w and k1 is the gradient of the KL; through k1 alone it is zero."""
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0)).double()
    p, q = logits[0].requires_grad_(), logits[1].log_softmax(-1)
    log_p = p.log_softmax(-1)
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - q)).sum(), p, retain_graph=True)
    sampled = log_p.detach().exp()  # the expectation over tokens already drawn
    weighted = F.kl_penalty(log_p, q, "k1", None, None, F.score_function_weight(log_p))
    (got,) = torch.autograd.grad((sampled * weighted).sum(), p, retain_graph=True)
    torch.testing.assert_close(got, want)
    (naive,) = torch.autograd.grad((sampled * F.kl_penalty(log_p, q, "k1", None, None)).sum(), p)
    assert naive.abs().max() < 1e-12 < want.abs().max()


def test_kl_kind_is_checked():
    with pytest.raises(ValueError, match="'k4'"):
        F.kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize("x", [math.nan, math.inf, -math.inf, 1000.0, 89.0])
def test_importance_weight_of_the_unrepresentable_is_zero_with_zero_gradient(x):
    log_ratio = torch.tensor([x, 0.5], requires_grad=True)
    weight = F.importance_weight(log_ratio)
    (gradient,) = torch.autograd.grad(weight.sum(), log_ratio)
    assert weight[0] == 0 and gradient[0] == 0
    assert gradient[1].item() == weight[1].item() == pytest.approx(math.exp(0.5))


def test_js_divergence_is_symmetric_and_zero_for_equals():
    a, b = torch.tensor([-1.0, -2.0, -30.0]), torch.tensor([-1.5, -0.2, -0.1])
    torch.testing.assert_close(F.js_divergence(a, b), F.js_divergence(b, a))
    assert (F.js_divergence(a, a).abs() < 1e-6).all() and (F.js_divergence(a, b) > 0).all()


@pytest.mark.parametrize("clamps", [(None, 10.0), (100.0, 10.0), (None, None)])
def test_k3_stays_finite_without_its_clamps(clamps):
    logprobs = torch.tensor([-200.0, -89.0, -1.0], requires_grad=True)
    kl = F.kl_penalty(logprobs, torch.zeros(3), "k3", *clamps)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.isfinite().all() and gradient.isfinite().all()
