"""The pairwise losses against their formulas in scalar Python: rewards per sequence and per token, DPO, IPO."""

import math
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.logprobs import Sharding
from rl_megatron.losses import (
    DPOLossFn,
    IPOLossFn,
    LossInputType,
    LossType,
    NLLLoss,
    PreferenceLoss,
    ScoreLoss,
)

REWARDS = torch.tensor([1.5, 0.25, -1.0, 2.0, 3.0, 3.0], dtype=torch.float64)
BATCH = {
    "input_ids": torch.arange(30).view(6, 5),
    "token_mask": torch.tensor(
        [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0]]
    ).double(),
    "sample_mask": torch.ones(6, dtype=torch.float64),
}


def minus_log_sigmoid(x):
    return math.log1p(math.exp(-x))


def run(loss_fn, output, batch=BATCH, num_seqs=6.0, num_toks=13.0):
    """(loss, metrics, gradient of the output)."""
    output = output.clone().requires_grad_()
    loss, metrics = loss_fn(output, batch, num_seqs, num_toks)
    return loss.item(), metrics, torch.autograd.grad(loss, output)[0]


class TestPreference:
    @pytest.mark.parametrize("beta", [1.0, 0.3])
    def test_value_metrics_and_gradient(self, beta):
        loss, metrics, gradient = run(PreferenceLoss({"beta": beta}), REWARDS)
        margins = [1.25, -3.0, 0.0]
        assert loss == pytest.approx(sum(minus_log_sigmoid(beta * m) for m in margins) / 3, rel=1e-12)
        assert metrics == pytest.approx({
            "loss": loss, "accuracy": 1 / 3, "rewards_chosen_mean": 3.5 / 3, "rewards_rejected_mean": 5.25 / 3,
            "num_valid_samples": 3.0,
        })  # fmt: skip
        slopes = torch.tensor([-beta / (1 + math.exp(beta * m)) / 3 for m in margins], dtype=torch.float64)
        torch.testing.assert_close(gradient, torch.stack([slopes, -slopes], dim=1).flatten())

    def test_it_is_what_the_interface_says(self):
        loss_fn = PreferenceLoss()
        assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL and loss_fn.input_type is LossInputType.LOGIT
        assert loss_fn.group_size == 2

    @pytest.mark.parametrize("shape", [(6,), (6, 1)])
    def test_one_reward_per_sequence(self, shape):
        want = run(PreferenceLoss(), REWARDS)
        loss, metrics, gradient = run(PreferenceLoss(), REWARDS.view(shape))
        assert (loss, metrics) == want[:2] and torch.equal(gradient.flatten(), want[2])
        assert PreferenceLoss()(BATCH, 6, 13, rewards=REWARDS.view(shape))[0] == loss

    @pytest.mark.parametrize("trailing", [False, True])
    def test_with_one_score_per_token_the_last_token_counts(self, trailing):
        scores = torch.full((6, 5), math.nan, dtype=torch.float64)
        last = [2, 4, 3, 1, 3, 2]
        scores[range(6), last] = REWARDS
        loss, metrics, gradient = run(PreferenceLoss(), scores[..., None] if trailing else scores)
        want_loss, want_metrics, want_gradient = run(PreferenceLoss(), REWARDS)
        assert (loss, metrics) == (want_loss, want_metrics)
        expected = torch.zeros_like(scores)
        expected[range(6), last] = want_gradient
        assert torch.equal(gradient.view(6, 5), expected)

    @pytest.mark.parametrize(
        ("hide", "row"),
        [("sample_mask", 2), ("sample_mask", 3), ("token_mask", 2), ("token_mask", 3)],
    )
    def test_a_pair_counts_only_if_both_sequences_do(self, hide, row):
        """The partner of sequence 3 keeps its mask. A NaN in either has no effect."""
        batch = BATCH | {hide: BATCH[hide].clone()}
        batch[hide][row] = 0
        scores = REWARDS[:, None].repeat(1, 5)
        scores[2:4] = math.nan
        loss, metrics, gradient = run(PreferenceLoss(), scores, batch, num_seqs=5.0)
        assert loss == pytest.approx((minus_log_sigmoid(1.25) + minus_log_sigmoid(0.0)) / 2.5)
        assert metrics["accuracy"] == 1 / 2.5 and (gradient[2:4] == 0).all() and torch.isfinite(gradient).all()
        assert metrics["num_valid_samples"] == (2.5 if hide == "sample_mask" else 3.0)

    def test_weights_of_samples(self):
        batch = BATCH | {"sample_mask": torch.tensor([0.5, 1.0, 1.0, 1.0, 1.0, 1.0])}
        loss, _, _ = run(PreferenceLoss(), REWARDS, batch, num_seqs=5.5)
        want = 0.5 * minus_log_sigmoid(1.25) + minus_log_sigmoid(-3.0) + minus_log_sigmoid(0.0)
        assert loss == pytest.approx(want / 2.75)

    def test_half_precision_and_far_margins(self):
        loss, metrics, gradient = run(PreferenceLoss(), torch.tensor([-3e4, 3e4] * 3).bfloat16())
        assert loss == pytest.approx(6e4, rel=1e-2) and torch.isfinite(gradient).all() and metrics["accuracy"] == 0

    def test_an_odd_number_of_sequences_is_refused(self):
        batch = {key: value[:5] for key, value in BATCH.items()}
        with pytest.raises(ValueError, match="PreferenceLoss: 5 sequences are not pairs"):
            PreferenceLoss()(REWARDS[:5], batch, 5, 13)

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            (REWARDS[:4], r"PreferenceLoss: rewards \(4,\) do not fit sample_mask \(6,\)"),
            (torch.zeros(6, 3), r"\(6, 3\) do not fit input_ids \(6, 5\)"),
            (torch.zeros(6, 5, 2), r"PreferenceLoss: rewards \(6, 5, 2\) must be one score per token"),
        ],
    )
    def test_shapes_that_do_not_fit_are_named(self, output, message):
        with pytest.raises(ValueError, match=message):
            PreferenceLoss()(output, BATCH, 6, 13)

    def test_rewards_per_sequence_cannot_be_cut_over_ranks(self):
        two_ranks = Sharding(cp_group=SimpleNamespace(size=lambda: 2))
        with pytest.raises(ValueError, match=r"rewards \(6,\) are one per sequence, but 2 context"):
            PreferenceLoss().read_output(REWARDS, BATCH, two_ranks)

    def test_what_users_override(self):
        class Hinge(PreferenceLoss):
            """Pairs in halves rather than interleaved, and a loss of their own."""

            def split_output_tensor(self, tensor):
                return tensor.chunk(2)

            def _preference_loss(self, rewards, sample_mask, global_valid_seqs, beta=1.0):
                loss, *rest = super()._preference_loss(rewards, sample_mask, global_valid_seqs, beta)
                return 2 * loss, *rest

        order = torch.tensor([0, 2, 4, 1, 3, 5])
        halves = {key: value[order] for key, value in BATCH.items()}
        assert run(Hinge(), REWARDS[order], halves)[0] == pytest.approx(2 * run(PreferenceLoss(), REWARDS)[0])

    def test_the_formula_itself(self):
        found = PreferenceLoss()._preference_loss(REWARDS[:2], torch.ones(2), torch.tensor(2))
        assert [float(value) for value in found] == pytest.approx([minus_log_sigmoid(1.25), 1.0, 1.5, 0.25])

    @pytest.mark.parametrize(
        ("cfg", "message"),
        [
            ({"beta": 0.0}, "beta=0.0 must be positive"),
            ({"beta": None}, "beta=None must be a number"),
            ({"bta": 1.0}, "no key 'bta'; did you mean 'beta'"),
        ],
    )
    def test_refusals(self, cfg, message):
        with pytest.raises((KeyError, TypeError, ValueError), match=message):
            PreferenceLoss(cfg)


GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 5, 30, generator=GENERATOR, dtype=torch.float64)
REFERENCE = torch.randn(6, 5, generator=GENERATOR, dtype=torch.float64) - 3.0  # aligned with input_ids
PAIRS = BATCH | {"reference_policy_logprobs": torch.roll(REFERENCE, -1, dims=-1)}


def of_rows(value, average):
    """Σ_t or mean_t over the tokens that count of value(b, t, log π), token by token."""
    log_p = LOGITS.log_softmax(-1)
    results = []
    for b in range(6):
        tokens = [t for t in range(1, 5) if BATCH["token_mask"][b, t]]
        terms = [value(b, t, log_p[b, t - 1, BATCH["input_ids"][b, t]].item()) for t in tokens]
        results.append(sum(terms) / (len(terms) if average else 1))
    return results


class TestDPO:
    @pytest.mark.parametrize("average", [False, True])
    @pytest.mark.parametrize("average_sft", [False, True])
    def test_token_by_token(self, average, average_sft):
        cfg = {
            "reference_policy_kl_penalty": 0.2, "preference_loss_weight": 0.7, "sft_loss_weight": 0.4,
            "preference_average_log_probs": average, "sft_average_log_probs": average_sft,
        }  # fmt: skip
        r = of_rows(lambda b, t, lp: lp - REFERENCE[b, t].item(), average)
        margins = [r[0] - r[1], r[2] - r[3], r[4] - r[5]]
        preference = sum(minus_log_sigmoid(0.2 * margin) for margin in margins) / 3
        sft = sum(of_rows(lambda b, t, lp: -lp, average_sft)[::2]) / 3
        loss, metrics, _ = run(DPOLossFn(cfg), LOGITS, PAIRS)
        assert metrics == pytest.approx({
            "loss": 0.7 * preference + 0.4 * sft, "preference_loss": preference, "sft_loss": sft,
            "accuracy": sum(margin > 0 for margin in margins) / 3, "rewards_chosen_mean": sum(r[::2]) / 3,
            "rewards_rejected_mean": sum(r[1::2]) / 3, "num_valid_samples": 3.0,
        }, rel=1e-12)  # fmt: skip
        assert loss == metrics["loss"] and 0 < metrics["accuracy"] < 1

    def test_the_gradient_pushes_pairs_apart(self):
        """∂L/∂log π(y_t) = ∓β·σ(−β·margin)/3 at every token of a chosen (rejected) sequence."""
        logprobs = torch.log(torch.rand(6, 4, generator=GENERATOR, dtype=torch.float64)).requires_grad_()
        loss, _ = DPOLossFn({"reference_policy_kl_penalty": 0.2})(PAIRS, 6, 13, next_token_logprobs=logprobs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        mask = BATCH["token_mask"][:, 1:]
        r = ((logprobs.detach() - REFERENCE[:, 1:]) * mask).sum(1)
        push = 0.2 * torch.sigmoid(-0.2 * (r[::2] - r[1::2])) / 3
        torch.testing.assert_close(gradient, torch.stack([-push, push], dim=1).flatten()[:, None] * mask)

    def test_at_the_reference_it_is_log_two(self):
        logprobs = REFERENCE[:, 1:]
        loss, metrics = DPOLossFn()(PAIRS, 6, 13, next_token_logprobs=logprobs)
        assert loss.item() == pytest.approx(math.log(2)) and metrics["rewards_chosen_mean"] == metrics["accuracy"] == 0

    def test_the_sft_loss_is_the_nll_of_chosen_sequences_and_skipped_at_weight_0(self):
        _, metrics, _ = run(DPOLossFn({"sft_loss_weight": 1.0}), LOGITS, PAIRS)
        per_row, _ = NLLLoss()(LOGITS, PAIRS, None, 13, dpo_loss=True)
        assert metrics["sft_loss"] == pytest.approx(per_row[::2].sum().item() / 3)
        assert run(DPOLossFn(), LOGITS, PAIRS)[1]["sft_loss"] == 0

    @pytest.mark.parametrize(("masked", "chosen_rows"), [(0, [2, 4]), (1, [0, 2, 4])])
    def test_the_sft_loss_reads_only_the_mask_of_the_chosen_sequence(self, masked, chosen_rows):
        batch = PAIRS | {"sample_mask": BATCH["sample_mask"].clone()}
        batch["sample_mask"][masked] = 0
        _, metrics, _ = run(DPOLossFn({"sft_loss_weight": 1.0}), LOGITS, batch, num_seqs=5.0)
        nll = of_rows(lambda b, t, lp: -lp, average=False)
        assert metrics["sft_loss"] == pytest.approx(sum(nll[row] for row in chosen_rows) / 2.5)
        assert metrics["accuracy"] <= 2 / 2.5

    def test_rewards_are_not_scaled_by_a_sample_s_weight(self):
        light = PAIRS | {"sample_mask": torch.full((6,), 0.5, dtype=torch.float64)}
        assert run(DPOLossFn(), LOGITS, light, num_seqs=3.0)[0] == pytest.approx(run(DPOLossFn(), LOGITS, PAIRS)[0])

    def test_the_weight_of_a_sample_weighs_its_sft_loss_once(self):
        light = PAIRS | {"sample_mask": torch.full((6,), 0.5, dtype=torch.float64)}
        for average in (False, True):
            loss_fn = DPOLossFn({"sft_loss_weight": 0.7, "sft_average_log_probs": average})
            assert run(loss_fn, LOGITS, light, num_seqs=3.0)[0] == pytest.approx(run(loss_fn, LOGITS, PAIRS)[0])

    def test_without_a_penalty_the_preference_teaches_nothing(self):
        loss_fn = DPOLossFn({"reference_policy_kl_penalty": 0.0, "sft_loss_weight": 1.0})
        loss, metrics = run(loss_fn, LOGITS, PAIRS)[:2]
        assert metrics["preference_loss"] == pytest.approx(math.log(2)) and loss > metrics["preference_loss"]

    def test_it_is_a_preference_loss_over_logprobs(self):
        loss_fn = DPOLossFn()
        assert isinstance(loss_fn, PreferenceLoss) and not isinstance(loss_fn, ScoreLoss)
        assert loss_fn.input_type is LossInputType.LOGPROB and loss_fn.group_size == 2
        assert loss_fn.output_name == "next_token_logits"

    def test_an_odd_number_of_sequences_is_refused(self):
        batch = {key: value[:3] for key, value in PAIRS.items()}
        with pytest.raises(ValueError, match="DPOLossFn: 3 sequences are not pairs"):
            DPOLossFn()(LOGITS[:3], batch, 3, 7)

    @pytest.mark.parametrize(
        ("cfg", "message"),
        [
            ({"reference_policy_kl_penalty": -1}, "reference_policy_kl_penalty=-1 must not be negative"),
            ({"preference_loss_weight": -1.0}, "preference_loss_weight=-1.0 must not be negative"),
            ({"preference_loss_weight": 0.0}, "preference_loss_weight=0.0 and sft_loss_weight=0.0 .* set one above 0"),
            ({"sft_average_log_probs": 1}, "sft_average_log_probs=1 must be true or false"),
            ({"sft_loss_wight": 1.0}, "did you mean 'sft_loss_weight'"),
        ],
    )
    def test_refusals(self, cfg, message):
        with pytest.raises((KeyError, TypeError, ValueError), match=message):
            DPOLossFn(cfg)


class TestIPO:
    @pytest.mark.parametrize("average", [False, True])
    def test_token_by_token(self, average):
        loss, metrics, _ = run(IPOLossFn({"tau": 0.25, "preference_average_log_probs": average}), LOGITS, PAIRS)
        r = of_rows(lambda b, t, lp: lp - REFERENCE[b, t].item(), average)
        margins = [r[0] - r[1], r[2] - r[3], r[4] - r[5]]
        assert loss == pytest.approx(sum((margin - 2.0) ** 2 for margin in margins) / 3, rel=1e-12)
        assert metrics["accuracy"] == sum(margin > 0 for margin in margins) / 3 and metrics["loss"] == loss

    def test_a_margin_at_its_goal_is_at_rest(self):
        """Two tokens chosen and one rejected (sequences 0 and 3); the margins are 1/(2τ) = 5."""
        rows = torch.tensor([0, 3])
        batch = {key: value[rows] for key, value in PAIRS.items()}
        logprobs = (REFERENCE[rows, 1:] + torch.tensor([[2.5], [0.0]])).requires_grad_()
        loss, _ = IPOLossFn()(batch, 2, 3, next_token_logprobs=logprobs)
        assert loss.item() == pytest.approx(0.0, abs=1e-24)
        assert torch.autograd.grad(loss, logprobs)[0].abs().max() < 1e-12

    def test_refusals(self):
        with pytest.raises(ValueError, match="tau=0.0 must be positive"):
            IPOLossFn({"tau": 0.0})
        with pytest.raises(KeyError, match="no key 'reference_policy_kl_penalty'"):
            IPOLossFn({"reference_policy_kl_penalty": 0.1})
