"""Our preference losses against TRL's own code.

They are equal in value and gradient wherever the definitions coincide. Where they do not, they differ by exactly what
the docstrings say.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

from rl_megatron.losses import build_loss
from tests.contract.trl_trainers import EXACT, assert_equal, make_rollouts, mask_of, one_process

pytestmark = pytest.mark.change


class AnsweringModel:
    """A model that gives the same answer to everything."""

    training = True

    def __init__(self, **outputs):
        self._outputs = SimpleNamespace(**outputs)

    def __call__(self, **_):
        return self._outputs


@pytest.fixture
def pairs():
    """(batch, logprobs): six rows, chosen and rejected by turns; every row of another length."""
    batch, logprobs, _ = make_rollouts()
    return batch, logprobs


def chosen_first(rows):
    """Chosen and rejected by turns → all chosen, then all rejected, as TRL has them."""
    return torch.cat([rows[::2], rows[1::2]])


def our_preference_loss(name, cfg, pairs):
    batch, logprobs = pairs
    leaf = logprobs.clone().requires_grad_()
    rolled = batch | {"reference_policy_logprobs": batch["reference_policy_logprobs"].roll(-1, dims=1)}
    value, metrics = build_loss(name, cfg).evaluate(rolled, len(leaf), None, next_token_logprobs=leaf)
    return value.detach(), torch.autograd.grad(value, leaf), metrics


def trl_dpo(pairs, loss_types, beta, loss_weights=None):
    batch, logprobs = pairs
    leaf = logprobs.clone().requires_grad_()
    mask = mask_of(batch)
    reference = (batch["reference_policy_logprobs"][:, 1:] * mask).sum(1)
    model = AnsweringModel(
        log_probs=chosen_first(leaf * mask),
        entropy=torch.zeros_like(mask),
        mean_logits=torch.zeros_like(mask),
        is_top1=torch.zeros_like(mask, dtype=torch.bool),
    )
    self = one_process(
        model, beta=beta, loss_types=loss_types, loss_weights=loss_weights or [1.0] * len(loss_types), ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False,
    )  # fmt: skip
    inputs = {
        "input_ids": chosen_first(batch["input_ids"]),
        "attention_mask": torch.ones_like(batch["input_ids"]),
        "completion_mask": chosen_first(batch["token_mask"]),
        "ref_chosen_logps": reference[::2],
        "ref_rejected_logps": reference[1::2],
    }
    value = DPOTrainer._compute_loss(self, model, inputs, return_outputs=False)
    metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
    return value.detach(), torch.autograd.grad(value, leaf), metrics


@pytest.mark.parametrize(
    ("name", "cfg", "loss_type"),
    [
        pytest.param("dpo", {"reference_policy_kl_penalty": 0.3}, "sigmoid", id="dpo"),
        pytest.param(
            "dpo",
            {"reference_policy_kl_penalty": 0.3, "preference_average_log_probs": True},
            "sigmoid_norm",
            id="dpo on average logprobs",
        ),
        pytest.param("ipo", {"tau": 0.3, "preference_average_log_probs": True}, "ipo", id="ipo"),
    ],
)
def test_preference_losses_coincide(pairs, name, cfg, loss_type):
    mine, theirs = our_preference_loss(name, cfg, pairs), trl_dpo(pairs, [loss_type], beta=0.3)
    assert_equal(mine, theirs)
    assert mine[1][0].abs().max() > 1e-3
    assert mine[2]["accuracy"].item() == pytest.approx(theirs[2]["rewards/accuracies"])


def trl_reference_free(pairs, method, averages, **settings):
    """(value, gradients, losses of pairs) of a preference loss of TRL without its NLL.

    TRL's ORPO computes in fp32.
    """
    batch, logprobs = pairs
    leaf, mask = logprobs.clone().requires_grad_(), mask_of(batch)
    answers = (leaf * mask).sum(1) / (mask.sum(1) if averages else 1)
    losses, *_ = method(one_process(label_smoothing=0.0, alpha=0.0, **settings), answers[::2], answers[1::2])
    value = losses.mean()
    return value.detach(), torch.autograd.grad(value, leaf)


@pytest.mark.parametrize(
    ("name", "cfg", "settings"),
    [
        pytest.param("cpo", {"beta": 0.3}, {"loss_type": "sigmoid", "beta": 0.3}, id="cpo"),
        pytest.param(
            "simpo",
            {"beta": 1.5, "gamma": 0.6},
            {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.6},
            id="simpo",
        ),
    ],
)
def test_preference_losses_without_a_reference_coincide(pairs, name, cfg, settings):
    mine = our_preference_loss(name, cfg | {"sft_loss_weight": 0.0}, pairs)
    assert_equal(mine, trl_reference_free(pairs, CPOTrainer.cpo_loss, averages=name == "simpo", **settings))
    assert mine[1][0].abs().max() > 1e-3


def test_the_odds_ratio_loss_coincides(pairs):
    """Ours minus its SFT loss, whose mean is over pairs; TRL's is over all tokens of chosen sequences."""
    batch, logprobs = pairs
    leaf, mask = logprobs.clone().requires_grad_(), mask_of(batch)
    value, metrics = build_loss("orpo", {"beta": 0.7}).evaluate(batch, len(leaf), None, next_token_logprobs=leaf)
    sft = (-(leaf * mask).sum(1) / mask.sum(1))[::2].mean()
    torch.testing.assert_close(metrics["sft_loss"], sft.detach(), **EXACT)
    theirs = trl_reference_free(pairs, ORPOTrainer.odds_ratio_loss, averages=True, beta=0.7)
    in_fp32 = {"rtol": 1e-5, "atol": 1e-7, "check_dtype": False}
    torch.testing.assert_close((value - sft).detach(), -theirs[0], **in_fp32)
    (mine,) = torch.autograd.grad(value - sft, leaf)
    torch.testing.assert_close(mine, -theirs[1][0], **in_fp32)
    assert mine.abs().max() > 1e-2


def test_rewards_are_reported_without_beta_and_trls_with_it(pairs):
    mine = our_preference_loss("dpo", {"reference_policy_kl_penalty": 0.3}, pairs)[2]
    theirs = trl_dpo(pairs, ["sigmoid"], beta=0.3)[2]
    for ours, other in {"rewards_chosen_mean": "rewards/chosen", "rewards_rejected_mean": "rewards/rejected"}.items():
        assert 0.3 * mine[ours].item() == pytest.approx(theirs[other], rel=1e-12)


def test_the_sft_loss_is_a_mean_over_pairs_and_trls_over_chosen_tokens(pairs):
    cfg = {"reference_policy_kl_penalty": 0.3, "preference_loss_weight": 0.5, "sft_loss_weight": 0.7}
    mine = our_preference_loss("dpo", cfg, pairs)[2]
    theirs = trl_dpo(pairs, ["sigmoid", "sft"], beta=0.3, loss_weights=[0.5, 0.7])[0]
    tokens_per_pair = mask_of(pairs[0])[::2].sum() / 3
    expected = 0.5 * mine["preference_loss"] + 0.7 * mine["sft_loss"] / tokens_per_pair
    torch.testing.assert_close(expected, theirs, **EXACT)


class ModelOfCompletions:
    """A model that knows the logprobs of the answers, and of the mismatched answers of KTO."""

    training = True

    def __init__(self, answers, others):
        self._of_ids = answers, others

    def __call__(self, input_ids, **_):
        answers, others = self._of_ids
        found = others if (input_ids == 0).all() else answers
        return SimpleNamespace(
            log_probs=found, entropy=torch.zeros_like(found), mean_logits=torch.zeros_like(found), aux_loss=None
        )


@pytest.mark.parametrize("shift", [0.0, -5.0])  # of the mismatched answers: the reference point is positive, or 0
def test_the_kto_loss_coincides(pairs, shift):
    batch, logprobs = pairs
    labels = torch.tensor([True, False, True, True, False, True])
    weights = {"desirable_weight": 0.7, "undesirable_weight": 1.6}
    generator, mask = torch.Generator().manual_seed(3), mask_of(batch)
    others, reference_of_others = torch.rand(2, *mask.shape, generator=generator, dtype=torch.float64)
    others = others + 0.2 + shift

    leaf = logprobs.clone().requires_grad_()
    reference = batch["reference_policy_logprobs"][:, 1:]
    self = one_process(
        ModelOfCompletions(leaf * mask, others), beta=0.3, loss_type="kto", calculate_KL=True,
        precompute_ref_logps=True, **weights,
    )  # fmt: skip
    self._compute_kl_logps = lambda *arguments: KTOTrainer._compute_kl_logps(self, *arguments)
    inputs = {
        "input_ids": batch["input_ids"] + 1, "attention_mask": torch.ones_like(batch["input_ids"]),
        "completion_mask": batch["token_mask"].long(), "label": labels,
        "KL_input_ids": torch.zeros_like(batch["input_ids"]), "KL_completion_mask": batch["token_mask"].long(),
        "KL_attention_mask": torch.ones_like(batch["input_ids"]),
        "ref_logps": (reference * mask).sum(1), "ref_KL_logps": reference_of_others.sum(1),
    }  # fmt: skip
    theirs = KTOTrainer._compute_loss(self, self.model, inputs, return_outputs=False)
    their_metrics = {name: values[-1] for name, values in self._metrics["train"].items()}
    (their_gradient,) = torch.autograd.grad(theirs, leaf)

    point = (others - reference_of_others).sum(1).mean().clamp(min=0)
    assert (point > 0) == (shift == 0) and point.item() == pytest.approx(their_metrics["kl"], rel=1e-12)
    one = torch.ones(6, dtype=torch.float64)
    keys = {"desirable": labels.double(), "reference_point": point * one, "num_desirable": labels.sum() * one}
    mine, metrics = build_loss("kto", {"beta": 0.3, **weights}).evaluate(
        batch | keys, 6, None, next_token_logprobs=leaf
    )
    assert_equal((mine.detach(), torch.autograd.grad(mine, leaf)), (theirs.detach(), [their_gradient]))
    assert their_gradient.abs().max() > 1e-3
    for ours, other in {"desirable": "chosen", "undesirable": "rejected"}.items():
        assert 0.3 * metrics[f"rewards_{ours}_mean"].item() == pytest.approx(their_metrics[f"rewards/{other}"])


def test_the_reward_model_loss_coincides(pairs):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    mine, _ = build_loss("preference").evaluate(pairs[0], 6, None, rewards=scores)
    model = AnsweringModel(logits=chosen_first(scores)[:, None])
    self = one_process(model, args=SimpleNamespace(center_rewards_coefficient=None))
    theirs = RewardTrainer.compute_loss(self, model, {"attention_mask": torch.ones_like(pairs[0]["input_ids"])})
    torch.testing.assert_close(mine, theirs, **EXACT)
    torch.testing.assert_close(*(torch.autograd.grad(value, scores)[0] for value in (mine, theirs)), **EXACT)
