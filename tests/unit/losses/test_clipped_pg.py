"""The clipped policy gradient loss against a second derivation: scalar Python, token by token, from the papers."""

import math

import pytest
import torch

from rl_megatron.losses import ClippedPGLossConfig, ClippedPGLossFn
from tests.contract.loss_cases import CASES, policy_batch

DEFAULTS = ClippedPGLossConfig()
CLIPPED_PG_CASES = [case for case in CASES if case.name == "clipped_pg"]


def clamp(x, low, high):
    return max(low, min(high, x))


def kl_estimate(logprob, reference, kind):
    x = reference - logprob
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


class TokenByToken:
    """Loss and metrics in fp64 Python loops over the valid tokens of each valid sample."""

    def __init__(self, cfg, batch, logprobs, entropy):
        self.cfg, self.data = cfg, batch
        self.samples = []  # per valid sample: its tokens, as dicts
        for b in range(len(logprobs)):
            if batch["sample_mask"][b] == 0:
                continue
            positions = [t for t in range(1, logprobs.shape[1] + 1) if batch["token_mask"][b, t] != 0]
            self.samples.append([self.token(b, t, logprobs, entropy) for t in positions])
        self.all_tokens = [token for tokens in self.samples for token in tokens]
        self.num_samples = int(batch["sample_mask"].sum())

    def token(self, b, t, logprobs, entropy):
        lp = logprobs[b, t - 1].item()
        streams = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages")
        prev, gen, ref, advantage = (self.data[key][b, t].item() for key in streams)
        token = {"lp": lp, "prev": lp if self.cfg.force_on_policy_ratio else prev, "gen": gen, "ref": ref}
        token["selected"] = self.data["covariance_mask"][b, t].item()
        return token | {"A": advantage, "H": entropy[b, t - 1].item(), "reward": self.data["rewards"][b].item()}

    def token_mean(self, value):
        return sum(value(token) for token in self.all_tokens) / len(self.all_tokens)

    def sequence_mean(self, value):
        means = [sum(value(token) for token in tokens) / len(tokens) for tokens in self.samples if tokens]
        return sum(means) / self.num_samples

    def loss_mean(self, value):
        if (length := self.cfg.fixed_sequence_length) is not None:
            return sum(value(token) for token in self.all_tokens) / (self.num_samples * length)
        return self.token_mean(value) if self.cfg.token_level_loss else self.sequence_mean(value)

    def add_ratios(self):
        cfg = self.cfg
        for tokens in self.samples:
            differences = [token["lp"] - token["prev"] for token in tokens]
            for token, difference in zip(tokens, differences, strict=True):
                if cfg.sequence_level_importance_ratios:
                    difference = sum(differences) / len(differences)
                token["r"] = math.exp(difference)
                token["clipped"] = clamp(token["r"], 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
                if cfg.use_gmpo:
                    low, high = math.exp(-cfg.ratio_clip_min), math.exp(cfg.ratio_clip_max)
                    token["clipped"] = clamp(token["r"], low, high)
                if cfg.force_on_policy_ratio:
                    token["r"] = token["clipped"] = 1.0
                elif cfg.disable_ppo_ratio:
                    token["r"] = token["clipped"] = token["lp"]

            if cfg.use_gmpo:
                chosen = [(min if t["A"] > 0 else max)(t["r"], t["clipped"]) for t in tokens]
                for token in tokens:
                    token["geometric"] = math.prod(chosen) ** (1 / len(chosen))

    def add_rejections(self):
        cfg = self.cfg
        for tokens in self.samples:
            ratios = [math.exp(token["prev"] - token["gen"]) for token in tokens]
            mean, k3 = 1.0, 0.0
            if tokens:
                mean = math.prod(ratios) ** (1 / len(ratios))
                k3 = sum(r - 1 - math.log(r) for r in ratios) / len(ratios)
            rejected = {
                None: lambda: False,
                "geometric": lambda mean=mean: not cfg.sequence_rejection_min <= mean <= cfg.sequence_rejection_max,
                "k3": lambda k3=k3: k3 > cfg.sequence_rejection_max,
            }[cfg.sequence_rejection_type]()
            for token in tokens:
                token["rejected"] = rejected

    def add_weights(self):
        cfg, kind = self.cfg, self.cfg.truncated_importance_sampling_type
        low, high = cfg.truncated_importance_sampling_ratio_min or 0.0, cfg.truncated_importance_sampling_ratio
        for tokens in self.samples:
            differences = [token["prev"] - token["gen"] for token in tokens]
            for token, difference in zip(tokens, differences, strict=True):
                weight = math.exp(sum(differences) if cfg.sequence_level_importance_ratios else difference)
                token["outside"] = kind is not None and not low <= weight <= high
                if kind == "tis":
                    weight = clamp(weight, low, high)
                elif kind == "icepop" and token["outside"]:
                    weight = 0.0
                elif kind == "seq-mask-tis":
                    token["outside"] = not low <= math.exp(sum(differences) / len(differences)) <= high
                    weight = 0.0 if token["outside"] else weight
                token["w"] = weight

    def surrogate(self, token):
        cfg, A = self.cfg, token["A"]
        if cfg.use_cispo:
            loss = -token["clipped"] * A * token["lp"]
        elif cfg.use_gmpo:
            loss = -token["geometric"] * A
        elif cfg.use_sapo:
            temperature = cfg.sapo_temperature_pos if A > 0 else cfg.sapo_temperature_neg
            loss = -A * 4 / temperature / (1 + math.exp(-temperature * (token["r"] - 1)))
        elif cfg.use_kl_cov:
            loss = -token["r"] * A
            loss += cfg.kl_cov_coef * abs(token["lp"] - token["prev"]) if token["selected"] else 0.0
        else:
            loss = -min(token["r"] * A, token["clipped"] * A)
        if cfg.ratio_clip_c is not None and A < 0:
            loss = min(loss, -cfg.ratio_clip_c * A)
        if token["rejected"] or (cfg.use_clip_cov and token["selected"]):
            return 0.0
        return loss * (token["w"] if cfg.use_importance_sampling_correction else 1.0)

    def kl(self, token):
        cfg = self.cfg
        lp, ref, bound = token["lp"], token["ref"], cfg.kl_input_clamp_value
        kl = kl_estimate(lp, lp + clamp(ref - lp, -bound, bound), cfg.reference_policy_kl_type)
        if cfg.use_on_policy_kl_approximation:
            kl *= math.exp(lp - token["gen"])
        return clamp(kl, -cfg.kl_output_clamp_value, cfg.kl_output_clamp_value)

    def js(self, token):
        log_m = math.log((math.exp(token["prev"]) + math.exp(token["gen"])) / 2)
        return 0.5 * sum(kl_estimate(log_m, token[key], "k3") for key in ("prev", "gen"))

    def results(self):
        self.add_ratios()
        self.add_weights()
        self.add_rejections()
        cfg, mean, kind = self.cfg, self.token_mean, self.cfg.reference_policy_kl_type
        beta = 0.0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
        mu = cfg.positive_example_nll_weight
        kl = self.loss_mean(self.kl) if beta else 0.0
        positive_nll = mean(lambda t: -t["lp"] if t["reward"] > 0 else 0.0) if mu else 0.0
        loss = self.loss_mean(self.surrogate) + beta * kl + mu * positive_nll
        loss -= cfg.entropy_coeff * self.loss_mean(lambda t: t["H"])
        by_sequence = self.sequence_mean if cfg.sequence_level_importance_ratios else mean
        metrics = {
            "loss": loss,
            "probs_ratio": mean(lambda t: t["r"]),
            "probs_ratio_min": min(t["r"] for t in self.all_tokens),
            "probs_ratio_max": max(t["r"] for t in self.all_tokens),
            "probs_ratio_clamped": mean(lambda t: t["clipped"]),
            "probs_ratio_clamped_min": min(t["clipped"] for t in self.all_tokens),
            "probs_ratio_clamped_max": max(t["clipped"] for t in self.all_tokens),
            "clip_fraction": mean(lambda t: float(t["r"] != t["clipped"])),
            "kl_penalty": kl,
            "token_mult_prob_error": mean(lambda t: math.exp(abs(t["gen"] - t["prev"]))),
            "gen_kl_error": mean(lambda t: kl_estimate(t["gen"], t["prev"], kind)),
            "policy_kl_error": mean(lambda t: kl_estimate(t["prev"], t["gen"], kind)),
            "js_divergence_error": mean(self.js),
            "mismatch_mean": mean(lambda t: abs(t["gen"] - t["prev"])),
            "mismatch_max": max(abs(t["gen"] - t["prev"]) for t in self.all_tokens),
            "sampling_importance_ratio": by_sequence(lambda t: t["w"]),
            "sampling_importance_ratio_square": by_sequence(lambda t: t["w"] ** 2),
            "approx_entropy": mean(lambda t: -math.exp(t["lp"] - t["gen"]) * t["lp"]),
            "num_valid_samples": self.num_samples,
            "positive_nll_loss": positive_nll,
            "entropy": mean(lambda t: t["H"]),
        }
        if cfg.truncated_importance_sampling_type is not None:
            by_sequence = self.sequence_mean if cfg.truncated_importance_sampling_type == "seq-mask-tis" else mean
            metrics["is_oob_ratio"] = by_sequence(lambda t: float(t["outside"]))
        if cfg.use_clip_cov or cfg.use_kl_cov:
            metrics["covariance_fraction"] = mean(lambda t: t["selected"])
        if cfg.sequence_rejection_type is not None:
            metrics["rejected_sequences"] = self.sequence_mean(lambda t: float(t["rejected"]))
        return metrics


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
