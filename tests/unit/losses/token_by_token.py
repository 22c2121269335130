"""The clipped policy gradient loss in scalar Python, token by token, from the papers."""

import math


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
            vetoed = cfg.token_veto_threshold is not None and any(r < cfg.token_veto_threshold for r in ratios)
            for token in tokens:
                token["rejected"], token["vetoed"] = rejected or vetoed, vetoed

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
        if cfg.token_veto_threshold is not None:
            metrics["vetoed_sequences"] = self.sequence_mean(lambda t: float(t["vetoed"]))
        if cfg.sequence_rejection_type is not None or cfg.token_veto_threshold is not None:
            metrics["rejected_sequences"] = self.sequence_mean(lambda t: float(t["rejected"]))
        return metrics
