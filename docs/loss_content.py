"""The parts of docs/losses.md that are written by hand: formulas, recipes, and the comparison with TRL.

`docs/generate_losses.py` writes the page from them and from the registered losses.
"""

from __future__ import annotations

from dataclasses import dataclass

# ---- what each loss computes

FORMULAS = {
    "clipped_pg": r"""
\mathcal L = \mathrm{mean}\big(w\,\ell\big) + \beta\;\mathrm{mean}\big(\widehat{\mathrm{KL}}\big)
           + \mu\,\mathrm{NLL}^{+} - c_H\;\mathrm{mean}\big(H\big)

\ell_t = \begin{cases}
-\min\big(r_t A_t,\; \mathrm{clip}(r_t,\, 1-\varepsilon_{\min},\, 1+\varepsilon_{\max})\, A_t\big)
  & \text{by default} \\
\min\big(\text{the above},\; -c\, A_t\big) \;\text{ where } A_t < 0 & \text{with ratio\_clip\_c: dual clip} \\
-\,\mathrm{sg}\big(\mathrm{clip}(r_t,\, 1-\varepsilon_{\min},\, 1+\varepsilon_{\max})\big)\, A_t \log \pi(y_t)
  & \text{with use\_cispo} \\
-\,A_t \big(\prod_{t'} \tilde r_{t'}\big)^{1/|y|},\;
  \log \tilde r = \mathrm{clip}(\log r,\, -\varepsilon_{\min},\, \varepsilon_{\max}) \text{ on the side of } A
  & \text{with use\_gmpo} \\
-\,A_t\,\frac{4}{\tau}\,\sigma\big(\tau (r_t - 1)\big) & \text{with use\_sapo} \\
(1 - s_t) \cdot \text{the default} & \text{with use\_clip\_cov} \\
-\,A_t\, r_t + s_t\, c\, |\log r_t| & \text{with use\_kl\_cov} \\
-\,A_t \log \pi(y_t) & \text{with disable\_ppo\_ratio: REINFORCE}
\end{cases}

r_t = \frac{\pi(y_t)}{\pi_{\text{prev}}(y_t)} \;\text{ or, per sequence (GSPO), }\;
\exp\Big(\frac{1}{|y|} \sum_t \log \frac{\pi(y_t)}{\pi_{\text{prev}}(y_t)}\Big),
\qquad w_t = \frac{\pi_{\text{prev}}(y_t)}{\pi_{\text{generation}}(y_t)} \;\text{ or }\; 1

\widehat{\mathrm{KL}}: \quad k_1 = -x, \quad k_2 = \tfrac{1}{2} x^2, \quad k_3 = e^x - 1 - x,
\qquad x = \log \pi_{\text{ref}}(y_t) - \log \pi(y_t)

s_t = 1 \text{ at tokens that are selected by } \big(A_t - \mathrm{mean}(A)\big)
  \big(\log \pi_{\text{prev}}(y_t) - \mathrm{mean}(\log \pi_{\text{prev}})\big), \text{ otherwise } 0
""",
    "dpo": r"""
\mathcal L = w_p\, \mathcal L_{\text{pref}} + w_s\, \mathcal L_{\text{sft}}, \qquad
\mathcal L_{\text{pref}} = -\frac{1}{N_{\text{pairs}}} \sum_{\text{pairs}}
  \log \sigma\big(\beta\,(r_{\text{chosen}} - r_{\text{rejected}})\big), \qquad
\mathcal L_{\text{sft}} = -\frac{1}{N_{\text{pairs}}} \sum_{\text{chosen}} \sum_t m_t \log \pi(y_t)

r = \sum_t m_t \big(\log \pi(y_t) - \log \pi_{\text{ref}}(y_t)\big)
""",
    "ipo": r"""
\mathcal L = \frac{1}{N_{\text{pairs}}} \sum_{\text{pairs}}
  \Big(r_{\text{chosen}} - r_{\text{rejected}} - \frac{1}{2\tau}\Big)^2, \qquad
r = \sum_t m_t \big(\log \pi(y_t) - \log \pi_{\text{ref}}(y_t)\big)
""",
    "kto": r"""
\mathcal L = \frac{1}{N} \sum_{\text{answers}} \begin{cases}
\lambda_D\,\big(1 - \sigma(\beta\,(r - z_0))\big) & \text{desirable} \\
\lambda_U\,\big(1 - \sigma(\beta\,(z_0 - r))\big) & \text{undesirable}
\end{cases}, \qquad
r = \sum_t m_t \big(\log \pi(y_t) - \log \pi_{\text{ref}}(y_t)\big)

z_0 = \max\Big(0,\; \frac{1}{N} \sum r\Big) \text{ over mismatched prompts and answers, fixed}
""",
    "simpo": r"""
\mathcal L = -\frac{1}{N_{\text{pairs}}} \sum_{\text{pairs}}
  \log \sigma\big(\beta\,(r_{\text{chosen}} - r_{\text{rejected}}) - \gamma\big) + w_s\, \mathcal L_{\text{sft}}, \qquad
r = \frac{1}{|y|} \sum_t m_t \log \pi(y_t)
""",
    "cpo": r"""
\mathcal L = -\frac{1}{N_{\text{pairs}}} \sum_{\text{pairs}}
  \log \sigma\big(\beta\,(r_{\text{chosen}} - r_{\text{rejected}})\big) + w_s\, \mathcal L_{\text{sft}}, \qquad
r = \sum_t m_t \log \pi(y_t), \qquad
\mathcal L_{\text{sft}} = -\frac{1}{N_{\text{pairs}}} \sum_{\text{chosen}} r
""",
    "orpo": r"""
\mathcal L = -\frac{1}{N_{\text{pairs}}} \sum_{\text{pairs}} \Big( \log P_{\text{chosen}} + \beta\,
  \log \sigma\big(r_{\text{chosen}} - r_{\text{rejected}}\big) \Big), \qquad
r = \log \frac{P}{1 - P}, \qquad
P = \exp\Big(\frac{1}{|y|} \sum_t m_t \log \pi(y_t)\Big)
""",
    "preference": r"""
\mathcal L = -\frac{1}{N_{\text{pairs}}} \sum_{\text{pairs}}
  \log \sigma\big(\beta\,(r_{\text{chosen}} - r_{\text{rejected}})\big), \qquad
r = \text{the score at the sequence's last token}
""",
    "nll": r"""
\mathcal L = -\frac{1}{N_{\text{tokens}}} \sum_t m_t \log \pi(y_t)
""",
    "mse_value": r"""
\mathcal L = \frac{\text{scale}}{2\, N_{\text{tokens}}} \sum_t m_t \max\Big(
  (v_t - R_t)^2,\; \big(\mathrm{clip}(v_t,\, v_{\text{old},t} - c,\, v_{\text{old},t} + c) - R_t\big)^2\Big)
""",
    "distillation": r"""
\mathcal L = \frac{1}{N_{\text{tokens}}} \sum_t m_t \big((1-\alpha)\, D_t - \alpha \log q(y_t)\big), \qquad
D = w\,\mathrm{KL}(p\,\|\,q) + (1-w)\,\mathrm{KL}(q\,\|\,p)

\text{jensen\_shannon:} \qquad D = \beta\,\mathrm{KL}(p\,\|\,m) + (1-\beta)\,\mathrm{KL}(q\,\|\,m), \qquad
m = \beta\, p + (1-\beta)\, q

p = \text{teacher}, \quad q = \text{student, both over the teacher's top } k

\text{with zero\_outside\_topk:} \qquad \mathrm{KL}(q\,\|\,p)
  = \sum_v q \log q - \sum_k q \log p + 100\,\Big(1 - \sum_k q\Big), \qquad q \text{ over the whole vocabulary}
""",
    "full_distillation": r"""
\mathcal L = \frac{1}{N_{\text{tokens}}} \sum_t m_t \big((1-\alpha)\, D_t - \alpha \log q(y_t)\big), \qquad
D = w\,\mathrm{KL}(p\,\|\,q) + (1-w)\,\mathrm{KL}(q\,\|\,p)

\text{jensen\_shannon:} \qquad D = \beta\,\mathrm{KL}(p\,\|\,m) + (1-\beta)\,\mathrm{KL}(q\,\|\,m), \qquad
m = \beta\, p + (1-\beta)\, q

p = \text{teacher}, \quad q = \text{student, both over the whole vocabulary}
""",
    "draft_cross_entropy": r"""
\mathcal L = -\frac{1}{N_{\text{tokens}}} \sum_t m_{t+1} \sum_v p_{t+1}(v) \log q_t(v),
\qquad p = \mathrm{sg}(\text{policy}), \quad q = \text{draft}
""",
}

PPO_FORMULA = r"""
\mathcal L = \mathcal L_\pi + \text{value\_coeff}\;\mathcal L_V, \qquad
\mathcal L_\pi = -\,\mathrm{mean}\,\min\big(r A,\; \mathrm{clip}(r,\, 1 \pm \varepsilon)\, A\big), \qquad
\mathcal L_V = \tfrac{1}{2}\,\mathrm{mean}\,\max\big((v - R)^2,\;
  (\mathrm{clip}(v,\, v_{\text{old}} \pm \text{value\_clip\_range}) - R)^2\big)
"""

# ---- what to write to get a published method


@dataclass(frozen=True)
class Recipe:
    name: str
    overrides: str  # of `rl-megatron train`
    notes: str


_NO_KL = "loss.reference_policy_kl_penalty=0"
RECIPES = (
    Recipe(
        "GRPO",
        "algorithm=grpo data=arithmetic loss.token_level_loss=false loss.reference_policy_kl_penalty=0.04",
        "[2402.03300](https://arxiv.org/abs/2402.03300). The advantage is the reward minus the group's mean, "
        "divided by the group's standard deviation. All answers have the same weight.",
    ),
    Recipe(
        "Dr. GRPO",
        "algorithm=grpo data=arithmetic "
        "algorithm.normalize_std=false loss.fixed_sequence_length=32 generation.max_new_tokens=32 "
        f"{_NO_KL}",
        "[2503.20783](https://arxiv.org/abs/2503.20783). The advantage is not divided by the standard deviation, and "
        "an answer's sum over tokens is divided by the length of the longest allowed answer.",
    ),
    Recipe(
        "DAPO",
        f"algorithm=grpo data=arithmetic algorithm.dynamic_sampling=true loss.ratio_clip_max=0.28 {_NO_KL}",
        "[2503.14476](https://arxiv.org/abs/2503.14476). It raises the upper clip bound, averages over all tokens, "
        "and replaces groups with equal rewards by other prompts. Its penalty on overlong answers is the reward "
        "function `overlong`.",
    ),
    Recipe(
        "GSPO",
        "algorithm=grpo data=arithmetic "
        "loss.sequence_level_importance_ratios=true loss.token_level_loss=false "
        f"loss.ratio_clip_min=3e-4 loss.ratio_clip_max=4e-4 {_NO_KL}",
        "[2507.18071](https://arxiv.org/abs/2507.18071). Each sequence has one ratio, the geometric mean of its "
        "tokens' ratios.",
    ),
    Recipe(
        "CISPO",
        f"algorithm=grpo data=arithmetic loss.use_cispo=true loss.ratio_clip_min=1.0 loss.ratio_clip_max=4.0 {_NO_KL}",
        "[2506.13585](https://arxiv.org/abs/2506.13585). The ratio is clipped from above only, and is a constant "
        "weight of log π, so every token has a gradient. The upper bound of 5 is from "
        "[ScaleRL](https://arxiv.org/abs/2510.13786).",
    ),
    Recipe(
        "GMPO",
        "algorithm=grpo data=arithmetic "
        f"loss.use_gmpo=true loss.token_level_loss=false loss.ratio_clip_min=0.4 loss.ratio_clip_max=0.4 {_NO_KL}",
        "[2507.20673](https://arxiv.org/abs/2507.20673). The ratio of a sequence is the geometric mean of its "
        "tokens' clipped ratios, so the clip range can be wide.",
    ),
    Recipe(
        "SAPO",
        f"algorithm=grpo data=arithmetic loss.use_sapo=true loss.token_level_loss=false {_NO_KL}",
        "[2511.20347](https://arxiv.org/abs/2511.20347). A sigmoid around the ratio 1 replaces the clip. Its "
        "gradient vanishes faster for negative advantages.",
    ),
    Recipe(
        "Clip-Cov",
        f"algorithm=grpo data=arithmetic loss.use_clip_cov=true {_NO_KL}",
        "[2505.22617](https://arxiv.org/abs/2505.22617). The loss leaves out a few tokens with a high covariance of "
        "advantage and logprob, because they lower the entropy most. They are drawn once for each rollout.",
    ),
    Recipe(
        "KL-Cov",
        f"algorithm=grpo data=arithmetic algorithm.updates_per_rollout=2 loss.use_kl_cov=true {_NO_KL}",
        "[2505.22617](https://arxiv.org/abs/2505.22617). A penalty keeps the tokens with the highest covariances "
        "near the policy that sampled them, and no ratio is clipped. It needs several optimizer steps on each rollout.",
    ),
    Recipe(
        "Rejection of mismatched sequences",
        "algorithm=grpo data=arithmetic loss.sequence_rejection_type=geometric loss.sequence_rejection_min=0.99 "
        f"loss.sequence_rejection_max=1.01 {_NO_KL}",
        "A sequence has loss 0 if the geometric mean of its tokens' probability ratios between trainer and engine "
        "differs from 1 by more than 1 %. "
        "`loss.sequence_rejection_type=k3` bounds the k3 estimate of the KL instead.",
    ),
    Recipe(
        "Token veto",
        f"algorithm=grpo data=arithmetic loss.token_veto_threshold=1e-4 {_NO_KL}",
        "A sequence has loss 0 if the trainer gives one of its tokens less than 1/10,000 of the engine's "
        "probability. The metric `vetoed_sequences` is the share of such sequences. The rejection above can be added.",
    ),
    Recipe(
        "OPO",
        f"algorithm=grpo data=arithmetic algorithm.advantage_estimator=optimal_baseline {_NO_KL}",
        "[2505.23585](https://arxiv.org/abs/2505.23585). The baseline is the group's mean reward, weighted by length. "
        "It assumes exactly on-policy training.",
    ),
    Recipe(
        "GDPO",
        "algorithm=grpo data=arithmetic algorithm.advantage_estimator=group_decoupled "
        "'reward.functions=[{name: exact_match}, {name: length_penalty, weight: 0.5, kwargs: {max_tokens: 32}}]' "
        f"{_NO_KL}",
        "[2601.05242](https://arxiv.org/abs/2601.05242). The scores of each reward function are normalised within the "
        "group before they are added up, so only its weight determines its influence.",
    ),
    Recipe(
        "RLOO",
        "algorithm=grpo data=arithmetic "
        "algorithm.leave_one_out=true algorithm.normalize_std=false loss.disable_ppo_ratio=true "
        f"loss.fixed_sequence_length=1 {_NO_KL}",
        "[2402.14740](https://arxiv.org/abs/2402.14740). It is REINFORCE with the mean reward of the group's other "
        "answers as the baseline. The loss is summed over an answer's tokens.",
    ),
    Recipe(
        "REINFORCE++",
        "algorithm=grpo data=arithmetic "
        "algorithm.advantage_estimator=reinforce_plus_plus loss.use_kl_in_reward=true "
        "loss.reference_policy_kl_type=k1",
        "[2501.03262](https://arxiv.org/abs/2501.03262). The KL is subtracted from each token's reward, and returns "
        "are whitened over the whole batch.",
    ),
    Recipe(
        "REINFORCE++-baseline",
        "algorithm=grpo data=arithmetic algorithm.advantage_estimator=reinforce_plus_plus_baseline "
        "loss.reference_policy_kl_type=k2",
        "[2501.03262](https://arxiv.org/abs/2501.03262). Rewards minus the group's mean are whitened over the whole "
        "batch, and the KL is in the loss.",
    ),
    Recipe(
        "PPO",
        "algorithm=ppo data=arithmetic loss.use_kl_in_reward=true loss.reference_policy_kl_type=k1",
        "[1707.06347](https://arxiv.org/abs/1707.06347), with the KL in the reward as in "
        "[InstructGPT](https://arxiv.org/abs/2203.02155). It has a critic with the policy's shape, and GAE.",
    ),
    Recipe(
        "DPO",
        "algorithm=dpo loss=dpo data=gsm8k_pairs data.path=path/to/pairs",
        "[2305.18290](https://arxiv.org/abs/2305.18290). `loss.sft_loss_weight` adds the likelihood of chosen answers.",
    ),
    Recipe(
        "IPO",
        "algorithm=dpo loss=ipo data=gsm8k_pairs data.path=path/to/pairs",
        "[2310.12036](https://arxiv.org/abs/2310.12036). The squared loss pulls the margin to a finite value, 1/(2τ).",
    ),
    Recipe(
        "Online DPO",
        "algorithm=online_dpo loss=dpo data=arithmetic train.global_batch_size=64",
        "[2402.04792](https://arxiv.org/abs/2402.04792). The best and the worst completion of a prompt form the pair.",
    ),
    Recipe(
        "KTO",
        "algorithm=kto loss=kto data.path=path/to/labelled.jsonl",
        "[2402.01306](https://arxiv.org/abs/2402.01306). It learns from single answers that are labelled desirable or "
        "undesirable.",
    ),
    Recipe(
        "SimPO",
        "algorithm=dpo loss=simpo data=gsm8k_pairs data.path=path/to/pairs",
        "[2405.14734](https://arxiv.org/abs/2405.14734). It compares mean logprobs and asks for a margin γ. There is "
        "no reference policy.",
    ),
    Recipe(
        "CPO",
        "algorithm=dpo loss=cpo data=gsm8k_pairs data.path=path/to/pairs",
        "[2401.08417](https://arxiv.org/abs/2401.08417). It is DPO without a reference policy, and adds the "
        "likelihood of chosen answers.",
    ),
    Recipe(
        "ORPO",
        "algorithm=dpo loss=orpo data=gsm8k_pairs data.path=path/to/pairs",
        "[2403.07691](https://arxiv.org/abs/2403.07691). Its one loss combines fine-tuning and preference, so it can "
        "start from a pretrained model.",
    ),
)

# ---- the same in TRL's terms; tests/contract/test_trl_oracle*.py call both

TRL = (
    ('`GRPOConfig(loss_type="dapo")`', "the defaults", "equal"),
    (
        '`loss_type="bnpo"`',
        "the defaults",
        "equal for one microbatch; TRL averages the means of several microbatches",
    ),
    (
        '`loss_type="grpo"`',
        "`token_level_loss: false`",
        "equal, except that TRL includes sequences without tokens in the mean",
    ),
    (
        '`loss_type="dr_grpo"`',
        "`normalize_std: false`, `fixed_sequence_length: L`",
        "equal with L = `max_completion_length`",
    ),
    (
        '`importance_sampling_level="sequence"` (GSPO)',
        "`sequence_level_importance_ratios: true`, `token_level_loss: false`",
        'equal to `loss_type="grpo"`; other averages are refused here',
    ),
    ("`epsilon`, `epsilon_high`", "`ratio_clip_min`, `ratio_clip_max`", "equal"),
    ("`delta`", "`ratio_clip_c`", "equal if it is at least 1 + `ratio_clip_max`"),
    (
        '`loss_type="cispo"`, `epsilon_high=e`',
        "`use_cispo: true`, `ratio_clip_min: 1`, `ratio_clip_max: e − 1`",
        "equal; TRL's value is the upper bound itself",
    ),
    (
        '`loss_type="sapo"`, `sapo_temperature_pos`, `sapo_temperature_neg`',
        "`use_sapo: true`, `token_level_loss: false`, and the same keys",
        "equal",
    ),
    (
        "`GMPOConfig`, `epsilon`, `epsilon_high`",
        "`use_gmpo: true`, `token_level_loss: false`, `ratio_clip_min`, `ratio_clip_max`",
        "equal",
    ),
    (
        '`multi_objective_aggregation="normalize_then_sum"`',
        "`algorithm.advantage_estimator: group_decoupled`",
        "equal, but TRL adds 1e-4 to standard deviations; here, 1e-6 is added in the group and 1e-8 in the batch",
    ),
    (
        "`beta`",
        "`reference_policy_kl_penalty`",
        "equal in value; the gradient here also has k3·∇log π, because the policy sampled the tokens",
    ),
    ("`beta`, `use_bias_correction_kl=True`", "… and on-policy, or `use_on_policy_kl_approximation: true`", "equal"),
    (
        "`entropy_coef`",
        "`entropy_coeff`",
        "equal with a mean over tokens; here, the entropy is averaged in the same way as the loss",
    ),
    (
        "`RLOOConfig`",
        "`disable_ppo_ratio: true`, `fixed_sequence_length: 1`",
        "on-policy, the gradient is equal",
    ),
    ('`DPOConfig(loss_type="sigmoid")`', "`dpo`", "equal; rewards are reported without β here"),
    ('`loss_type="sigmoid_norm"`', "`preference_average_log_probs: true`", "equal"),
    ('`loss_type="ipo"`, `beta`', "`ipo`, `tau`, `preference_average_log_probs: true`", "equal"),
    (
        '`loss_type="sft"`',
        "`sft_loss_weight`",
        "TRL averages over the chosen tokens, this loss over pairs",
    ),
    (
        "`KTOConfig`, `beta`, `desirable_weight`, `undesirable_weight`",
        "`kto` and the same keys",
        "equal, but z₀ is a mean over the global batch here, and over microbatches of ranks there; rewards are "
        "reported without β here",
    ),
    (
        '`CPOConfig(loss_type="sigmoid")`, `cpo_alpha`',
        "`cpo`, `sft_loss_weight`",
        "the preference loss is equal; TRL averages the NLL over tokens, prompts included; here, it is averaged over "
        "pairs",
    ),
    (
        '`CPOConfig(loss_type="simpo", cpo_alpha=0)`, `simpo_gamma`',
        "`simpo`, `gamma`",
        "equal",
    ),
    (
        "`ORPOConfig`, `beta`",
        "`orpo`, `beta`",
        "the odds-ratio loss is equal (TRL computes in fp32); for the NLL, see `cpo`",
    ),
    ("`RewardConfig`", "`preference`", "equal"),
    (
        "`GKDConfig`, `DistillationConfig`: `beta=0`, `1` or between",
        "`full_distillation`, `kl_type: forward`, `reverse` or `jensen_shannon` with `jsd_beta`",
        "equal; so is `distillation` if the teacher's top k is the whole vocabulary; `mixed` mixes divergences instead "
        "of distributions",
    ),
)
