"""The clipped policy gradient loss against a second derivation: scalar Python, token by token, from the papers."""

import math

import pytest
import torch

from rl_megatron.losses import ClippedPGLossConfig, ClippedPGLossFn
from rl_megatron.losses.foreign import as_loss
from rl_megatron.losses.functional import any_token_below
from tests.contract.loss_cases import CASES, policy_batch
from tests.unit.losses.token_by_token import TokenByToken

CLIPPED_PG_CASES = [case for case in CASES if case.name == "clipped_pg"]


def make(seed=1):
    generator = torch.Generator().manual_seed(seed)
    batch = policy_batch(generator)
    shape = batch["input_ids"][:, 1:].shape
    logprobs = batch["prev_logprobs"][:, 1:] + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    entropy = torch.rand(shape, generator=generator, dtype=torch.float64)
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return batch, logprobs.requires_grad_(), entropy, batch["sample_mask"].sum(), mask.sum()


def run(cfg, batch, logprobs, num_seqs, num_toks, entropy=None):
    """(loss, metrics, gradient)."""
    loss, metrics = ClippedPGLossFn(cfg)(
        data=batch, global_valid_seqs=num_seqs, global_valid_toks=num_toks, next_token_logprobs=logprobs,
        next_token_entropy=entropy,
    )  # fmt: skip
    return loss.item(), metrics, torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("case", CLIPPED_PG_CASES, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_loss_and_every_metric_token_by_token(case, seed):
    batch, logprobs, entropy, num_seqs, num_toks = make(seed)
    loss, metrics, _ = run(case.cfg, batch, logprobs, num_seqs, num_toks, entropy)
    expected = TokenByToken(ClippedPGLossConfig(**case.cfg), batch, logprobs.detach(), entropy).results()
    assert loss == metrics["loss"]
    assert metrics == pytest.approx(expected, rel=1e-10, abs=1e-13)
    assert metrics.keys() == ClippedPGLossFn(case.cfg).metric_reductions.keys()


def test_the_cases_reach_every_branch():
    """A truncation or clip that never happens would pass any comparison."""
    batch, logprobs, entropy, num_seqs, num_toks = make()
    for case in CLIPPED_PG_CASES:
        _, metrics, _ = run(case.cfg, batch, logprobs, num_seqs, num_toks, entropy)
        assert 0 < metrics.get("is_oob_ratio", 0.5) < 1, case
        if not case.cfg.get("disable_ppo_ratio") and not case.cfg.get("force_on_policy_ratio"):
            assert 0 < metrics["clip_fraction"] < 1, case


class TestGradientsThatAreNotDerivatives:
    """With a stop-gradient in the formula, the gradient has its own closed form. Means: token level, N valid tokens."""

    def gradients(self, **cfg):
        batch, logprobs, _, num_seqs, num_toks = make()
        mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        cfg = {"reference_policy_kl_penalty": 0.0} | cfg
        _, _, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
        streams = {key: value[:, 1:] for key, value in batch.items() if value.dim() == 2}
        return gradient, streams, logprobs.detach(), mask / num_toks

    def test_cispo_weights_the_score_by_the_clipped_ratio(self):
        gradient, s, lp, weight = self.gradients(use_cispo=True)
        ratio = (lp - s["prev_logprobs"]).exp().clamp(0.8, 1.2)
        torch.testing.assert_close(gradient, -weight * s["advantages"] * ratio)

    def test_forced_on_policy_is_plain_policy_gradient(self):
        gradient, s, _, weight = self.gradients(force_on_policy_ratio=True)
        torch.testing.assert_close(gradient, -weight * s["advantages"])

    @pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
    def test_kl_has_the_score_function_term(self, kind):
        """d/dlp [w·k] = k + dk/dlp with w = e^{lp − sg(lp)}."""
        beta = 0.3
        with_kl, s, lp, weight = self.gradients(reference_policy_kl_penalty=beta, reference_policy_kl_type=kind)
        without, *_ = self.gradients()
        x = s["reference_policy_logprobs"] - lp
        k = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[kind]
        slope = {"k1": torch.ones_like(x), "k2": -x, "k3": 1 - x.exp()}[kind]
        torch.testing.assert_close(with_kl - without, beta * weight * (k + slope))

    @pytest.mark.parametrize(("bound", "ceiling"), [(0.4, None), (None, 0.05), (0.4, 0.05)])
    def test_kl_clamps_silence_a_token(self, bound, ceiling):
        beta = 0.3
        clamps = {"kl_input_clamp_value": bound, "kl_output_clamp_value": ceiling}
        bound, ceiling = bound or math.inf, ceiling or math.inf
        with_kl, s, lp, weight = self.gradients(reference_policy_kl_penalty=beta, **clamps)
        without, *_ = self.gradients()
        x = s["reference_policy_logprobs"] - lp
        k = x.clamp(-bound, bound).exp() - 1 - x.clamp(-bound, bound)
        silent = (x.abs() > bound) | (k > ceiling)
        assert 0 < silent[weight > 0].double().mean() < 1
        torch.testing.assert_close(with_kl - without, torch.where(silent, 0.0, beta * weight * (k - x.exp() + 1)))


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    batch, logprobs, _, num_seqs, num_toks = make()
    batch["prev_logprobs"] = torch.nn.functional.pad(logprobs.detach(), (1, 0))
    _, metrics, gradient = run({"reference_policy_kl_penalty": 0.0}, batch, logprobs, num_seqs, num_toks)
    assert metrics["probs_ratio"] == metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    torch.testing.assert_close(gradient, -batch["advantages"][:, 1:] * mask / num_toks)


@pytest.mark.parametrize(
    "cfg",
    [
        {},
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis",
         "truncated_importance_sampling_ratio": 1.1},
        {"sequence_level_importance_ratios": True, "token_level_loss": False},
        {"use_cispo": True},
        {"ratio_clip_c": 3.0},
        {"disable_ppo_ratio": True},
    ],
)  # fmt: skip
def test_without_prev_logprobs_the_policy_of_this_forward_pass_is_the_previous_one(cfg):
    batch, logprobs, _, num_seqs, num_toks = make()
    batch["prev_logprobs"] = torch.nn.functional.pad(logprobs.detach(), (1, 0))
    wanted_loss, wanted, wanted_gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    del batch["prev_logprobs"]
    loss, metrics, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    assert loss == wanted_loss and metrics == wanted and torch.equal(gradient, wanted_gradient)
    assert metrics["mismatch_max"] > metrics["mismatch_mean"] > 0


class ReadsPrev(ClippedPGLossFn):
    def evaluate(self, data, *args, **keywords):
        return super().evaluate(data | {"prev_logprobs": data["prev_logprobs"] - 1}, *args, **keywords)


class OwnCall(ClippedPGLossFn):
    def __call__(self, *args, **keywords):
        return super().__call__(*args, **keywords)


def test_a_subclass_that_may_read_prev_logprobs_does_not_promise_to_do_without():
    assert ClippedPGLossFn().on_policy_keys == {"prev_logprobs"}
    assert ReadsPrev().on_policy_keys == OwnCall().on_policy_keys == frozenset()


def test_one_advantage_per_sequence():
    batch, logprobs, _, num_seqs, num_toks = make()
    per_sequence = batch["advantages"][:, 3].clone()
    batch["advantages"] = per_sequence
    short = run({}, batch, logprobs, num_seqs, num_toks)
    batch["advantages"] = per_sequence[:, None].expand(-1, logprobs.shape[1] + 1)
    full = run({}, batch, logprobs, num_seqs, num_toks)
    assert short[0] == full[0] and torch.equal(short[2], full[2])


def test_vapo_mean_over_positive_tokens_when_the_batch_brings_the_global_count():
    batch, logprobs, _, num_seqs, num_toks = make()
    cfg = {"positive_example_nll_weight": 1.0, "reference_policy_kl_penalty": 0.0}
    positive = batch["token_mask"][:, 1:] * (batch["sample_mask"] * (batch["rewards"] > 0))[:, None]
    batch["global_positive_toks"] = positive.sum().expand(len(logprobs))
    _, metrics, _ = run(cfg, batch, logprobs, num_seqs, num_toks)
    assert metrics["positive_nll_loss"] == pytest.approx(-logprobs.detach()[positive > 0].mean().item())
    batch["global_positive_toks"] = torch.zeros(len(logprobs))
    batch["rewards"] = -batch["rewards"].abs()
    _, metrics, _ = run(cfg, batch, logprobs, num_seqs, num_toks)
    assert metrics["positive_nll_loss"] == 0


def test_kl_of_unfiltered_logprobs_where_the_batch_has_them():
    batch, logprobs, _, num_seqs, num_toks = make()
    _, plain, _ = run({}, batch, logprobs, num_seqs, num_toks)
    batch["curr_logprobs_unfiltered"] = logprobs.detach() - 0.5
    _, unfiltered, _ = run({}, batch, logprobs, num_seqs, num_toks)
    _, shifted, _ = run({}, batch, (logprobs - 0.5).detach().requires_grad_(), num_seqs, num_toks)
    assert unfiltered["kl_penalty"] == shifted["kl_penalty"] != plain["kl_penalty"]
    assert unfiltered["probs_ratio"] == plain["probs_ratio"]


def test_streams_that_the_settings_do_not_need_may_be_missing():
    batch, logprobs, _, num_seqs, num_toks = make()
    for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "rewards"):
        del batch[key]
    cfg = {"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.0}
    loss, metrics, _ = run(cfg, batch, logprobs, num_seqs, num_toks)
    assert math.isfinite(loss)
    assert not metrics.keys() & {"gen_kl_error", "token_mult_prob_error", "approx_entropy", "sampling_importance_ratio"}


def test_reinforce_needs_no_logprobs_but_the_policy_s_own():
    batch, logprobs, _, num_seqs, num_toks = make()
    cfg = {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0}
    want, _, want_gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    del batch["prev_logprobs"], batch["generation_logprobs"]
    loss, metrics, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    assert loss == want and torch.equal(gradient, want_gradient) and "gen_kl_error" not in metrics
    assert "generation_logprobs" in ClippedPGLossFn(cfg | {"use_importance_sampling_correction": True}).required_keys


def test_generation_logprobs_without_a_representable_weight_count_as_zero():
    batch, logprobs, _, num_seqs, num_toks = make()
    row, column = 0, 4
    for bad in (-math.inf, math.inf, math.nan, -1000.0):
        batch["generation_logprobs"][row, column] = bad
        cfg = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
        loss, _, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
        assert math.isfinite(loss) and gradient[row, column - 1] == 0 and torch.isfinite(gradient).all()


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_a_token_with_infinite_disagreement_is_outside_every_bound(kind, bad):
    batch, logprobs, _, num_seqs, num_toks = make()
    row, column = 0, 4
    cfg = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
    cfg |= {"truncated_importance_sampling_type": kind, "truncated_importance_sampling_ratio": 1e6}
    cfg |= {"truncated_importance_sampling_ratio_min": 1e-6}
    _, before, usual = run(cfg, batch, logprobs, num_seqs, num_toks)
    batch["generation_logprobs"][row, column] = bad
    _, metrics, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    left_out = slice(None) if kind == "seq-mask-tis" else column - 1
    usual[row, left_out] = 0
    torch.testing.assert_close(gradient, usual)
    assert metrics["is_oob_ratio"] > before["is_oob_ratio"] == 0
    assert metrics["mismatch_max"] == math.inf and metrics["gen_kl_error"] > before["gen_kl_error"]


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("low", [None, 0.5])
def test_an_infinite_weight_is_0_and_outside_whatever_the_lower_bound_is(low, bad):
    batch, logprobs, _, num_seqs, num_toks = make()
    cfg = {"use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.0}
    cfg |= {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1e6}
    cfg |= {} if low is None else {"truncated_importance_sampling_ratio_min": low}
    _, before, usual = run(cfg, batch, logprobs, num_seqs, num_toks)
    token = usual[0].nonzero()[0].item()
    batch["generation_logprobs"][0, token + 1] = bad
    _, metrics, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    assert gradient[0, token] == 0 and metrics["is_oob_ratio"] > before["is_oob_ratio"]


class WithItsOwnCall(ClippedPGLossFn):
    """A loss that is called as it is, and takes old logprobs from the model's output if a batch lacks them."""

    on_policy_keys = frozenset({"prev_logprobs"})

    def __call__(self, *arguments, **keywords):
        return super().__call__(*arguments, **keywords)


def test_a_loss_with_its_own_call_reads_old_logprobs_as_its_settings_say():
    assert as_loss(WithItsOwnCall()).reads_on_policy_keys
    assert not as_loss(WithItsOwnCall({"force_on_policy_ratio": True})).reads_on_policy_keys


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
@pytest.mark.parametrize("kind", [{"sequence_rejection_type": "geometric", "sequence_rejection_min": 1e-6},
                                  {"sequence_rejection_type": "k3"}, {"token_veto_threshold": 1e-6}])  # fmt: skip
def test_a_sequence_with_infinite_disagreement_is_rejected(kind, bad):
    batch, logprobs, _, num_seqs, num_toks = make()
    cfg = kind | {"reference_policy_kl_penalty": 0.0}
    cfg |= {"sequence_rejection_max": 1e6} if "sequence_rejection_type" in kind else {}
    _, before, usual = run(cfg, batch, logprobs, num_seqs, num_toks)
    batch["generation_logprobs"][0, 4] = bad
    _, metrics, gradient = run(cfg, batch, logprobs, num_seqs, num_toks)
    usual[0] = 0
    torch.testing.assert_close(gradient, usual)
    assert metrics["rejected_sequences"] > before["rejected_sequences"] == 0


def test_a_token_that_does_not_count_vetoes_nothing():
    log_ratio = torch.tensor([[0.0, -9.0], [0.0, -9.0], [0.0, math.nan], [9.0, -0.5]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert any_token_below(log_ratio, mask, 0.5).tolist() == [
        [True, True],
        [False, False],
        [False, False],
        [False, False],
    ]


def test_one_token_vetoes_its_sequence_that_a_mean_would_keep():
    """Every other ratio is 1, so that the geometric mean is 1e-5 to the power of 1 over the number of tokens."""
    batch, logprobs, _, num_seqs, num_toks = make()
    batch["generation_logprobs"] = batch["prev_logprobs"].clone()
    batch["generation_logprobs"][1, 4] += math.log(1e5)  # a sampled token that the trainer finds unlikely
    batch["generation_logprobs"][2, 4] -= math.log(1e5)  # one that the engine found unlikely
    unread = (batch["token_mask"][3] == 0).nonzero()[-1]
    batch["generation_logprobs"][3, unread] += math.log(1e5)
    kept = {"sequence_rejection_type": "geometric", "sequence_rejection_min": 1e-4, "sequence_rejection_max": 1e4}
    no_kl = {"reference_policy_kl_penalty": 0.0}
    _, metrics, usual = run(kept | no_kl, batch, logprobs, num_seqs, num_toks)
    assert metrics["rejected_sequences"] == 0 and usual[1].any()
    assert batch["token_mask"][1, 4] and batch["token_mask"][2, 4]
    for threshold, vetoed in ((1e-4, True), (1e-6, False)):
        _, metrics, gradient = run(no_kl | {"token_veto_threshold": threshold}, batch, logprobs, num_seqs, num_toks)
        wanted = usual.clone()
        wanted[1] *= not vetoed
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)
        share = (batch["sample_mask"][1] / num_seqs).item() if vetoed else 0.0
        assert metrics["rejected_sequences"] == metrics["vetoed_sequences"] == pytest.approx(share)


def test_the_loss_of_sequences_of_one_token_is_0():
    batch, *_ = make()
    short = {key: value[:, :1] if value.dim() == 2 else value for key, value in batch.items()}
    logprobs = torch.zeros(len(short["rewards"]), 0, requires_grad=True)
    for cfg in (case.cfg for case in CLIPPED_PG_CASES if "entropy_coeff" not in case.cfg):
        loss, metrics, _ = run(cfg, short, logprobs, 5, 0)
        assert loss == 0 and metrics["probs_ratio_min"] == math.inf


def test_an_entropy_bonus_without_entropy_is_named():
    batch, logprobs, _, num_seqs, num_toks = make()
    with pytest.raises(ValueError, match="entropy_coeff=0.1 needs next_token_entropy"):
        run({"entropy_coeff": 0.1}, batch, logprobs, num_seqs, num_toks)


def test_the_weight_of_a_sample_does_not_enter_its_importance_ratio():
    """One sequence, however light, under GSPO with the correction: its weight and its count cancel."""
    cfg = {
        "sequence_level_importance_ratios": True, "token_level_loss": False, "reference_policy_kl_penalty": 0.0,
        "use_importance_sampling_correction": True,
    }  # fmt: skip
    batch, logprobs, _, _, _ = make()
    batch = {key: value[:1] for key, value in batch.items()}
    losses = [
        run(cfg, batch | {"sample_mask": torch.full((1,), weight, dtype=torch.float64)}, logprobs[:1], weight, 1.0)[0]
        for weight in (1.0, 0.5, 0.1)
    ]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-12)
