"""Declarations of the metrics that losses return. Each loss declares the reductions itself (`metric_reductions`).

Means are over the tokens of the global batch unless a metric's meaning says otherwise.
"""

from __future__ import annotations

from rl_megatron.config.metrics import Metric, declare_metrics

COMMON = declare_metrics(
    Metric(
        "loss",
        "of the loss",
        "The value that the optimizer minimises, without the experts' balancing loss.",
        "sum",
        healthy="falls for `nll`; stays near 0 for policy gradients, where it does not show progress",
    ),
    Metric("num_valid_samples", "samples", "Σ sample_mask; for a preference loss, half of it.", "sum"),
)

NLL = declare_metrics(Metric("num_unmasked_tokens", "tokens", "Predicted tokens that count.", "sum"))

CLIPPED_PG = declare_metrics(
    Metric("probs_ratio", "1", "The mean of π/π_prev; of log π with disable_ppo_ratio.", "sum", healthy="0.95 to 1.05"),
    Metric("probs_ratio_min", "1", "The smallest π/π_prev of a token.", "min"),
    Metric("probs_ratio_max", "1", "The largest π/π_prev of a token.", "max"),
    Metric("probs_ratio_clamped", "1", "The mean of π/π_prev, clipped to the clip range.", "sum"),
    Metric("probs_ratio_clamped_min", "1", "The smallest clipped π/π_prev of a token.", "min"),
    Metric("probs_ratio_clamped_max", "1", "The largest clipped π/π_prev of a token.", "max"),
    Metric(
        "clip_fraction",
        "1",
        "The share of tokens whose π/π_prev is outside the clip range.",
        "sum",
        healthy="below 0.2",
    ),
    Metric(
        "kl_penalty",
        "nats",
        "KL(π‖π_ref) without β, averaged like the loss.",
        "sum",
        healthy="rises slowly; below 0.1 nats per token in most runs",
    ),
    Metric(
        "positive_nll_loss",
        "nats",
        "−log π of the tokens of samples with a positive reward, over the count that the loss divides by.",
        "sum",
        "lower",
    ),
    Metric(
        "entropy",
        "nats",
        "The mean entropy of the policy's next-token distribution.",
        "sum",
        healthy="falls slowly; near 0, all completions of a prompt are alike",
    ),
    Metric(
        "sampling_importance_ratio",
        "1",
        "The mean weight π_prev/π_generation, after truncation; over sequences for GSPO.",
        "sum",
    ),
    Metric(
        "sampling_importance_ratio_square",
        "1",
        "The mean square of the weights of `sampling_importance_ratio`, each clamped to e²⁰.",
        "sum",
    ),
    Metric(
        "approx_entropy",
        "nats",
        "The entropy estimated from sampled tokens: −mean( π/π_generation · log π ).",
        "sum",
        healthy="falls slowly; near 0, all completions of a prompt are alike",
    ),
    Metric("covariance_fraction", "1", "The share of tokens that Clip-Cov or KL-Cov has selected.", "sum"),
    Metric(
        "rejected_sequences",
        "1",
        "The share of sequences that `sequence_rejection_type` or `token_veto_threshold` rejects.",
        "sum",
        healthy="below 0.1",
    ),
    Metric(
        "vetoed_sequences",
        "1",
        "The share of sequences that have a token below `token_veto_threshold`.",
        "sum",
        healthy="below 0.05",
    ),
    Metric(
        "is_oob_ratio",
        "1",
        "The share of tokens (sequences for seq-mask-tis) whose weight is outside the truncation bounds.",
        "sum",
    ),
)

# The difference between the trainer's and the rollout engine's probabilities of sampled tokens (losses/mismatch.py).
MISMATCH = declare_metrics(
    Metric(
        "token_mult_prob_error",
        "1",
        "The mean of e^|log π_generation − log π_prev|; 1 if they agree.",
        "sum",
        "lower",
        healthy="below 1.05",
    ),
    Metric("gen_kl_error", "nats", "KL(π_generation‖π_prev); 0 if they agree.", "sum", "lower"),
    Metric("policy_kl_error", "nats", "KL(π_prev‖π_generation); 0 if they agree.", "sum", "lower"),
    Metric(
        "js_divergence_error",
        "nats",
        "The Jensen-Shannon divergence of π_generation and π_prev; 0 if they agree.",
        "sum",
        "lower",
    ),
    Metric(
        "mismatch_mean",
        "nats",
        "The mean of |log π_generation − log π_prev| of sampled tokens.",
        "sum",
        "lower",
        healthy="below 1e-4 in fp32, and below 0.03 in bf16",
    ),
    Metric("mismatch_max", "nats", "The largest |log π_generation − log π_prev| of a sampled token.", "max", "lower"),
)

PREFERENCE = declare_metrics(
    Metric("accuracy", "1", "The share of pairs whose chosen answer has the higher reward.", "sum", "higher"),
    Metric(
        "rewards_chosen_mean",
        "reward",
        "The mean reward of chosen answers; the loss defines it as score, log π − log π_ref, log π or log odds.",
        "sum",
    ),
    Metric(
        "rewards_rejected_mean",
        "reward",
        "The mean reward of rejected answers; the loss defines it as score, log π − log π_ref, log π or log odds.",
        "sum",
    ),
    Metric("reference_point", "nats", "KTO's estimate z₀ of KL(π‖π_ref), which rewards are compared with.", "sum"),
    Metric("rewards_desirable_mean", "reward", "The mean log π − log π_ref of desirable answers.", "sum", "higher"),
    Metric("rewards_undesirable_mean", "reward", "The mean log π − log π_ref of undesirable answers.", "sum", "lower"),
    Metric("preference_loss", "nats", "The part of the loss that compares pairs, without its weight.", "sum", "lower"),
    Metric(
        "sft_loss", "nats", "−log π of chosen answers, the SFT part of the loss, without its weight.", "sum", "lower"
    ),
)

VALUE = declare_metrics(
    Metric("vf_clipfrac", "1", "The share of tokens whose clipped value error is the larger one.", "sum"),
    Metric("returns_mean", "reward", "The mean return.", "sum"),
    Metric("returns_sq_mean", "reward²", "The mean squared return.", "sum"),
    Metric("values_mean", "reward", "The mean value that the critic predicts.", "sum"),
    Metric("values_min", "reward", "The smallest value that the critic predicts.", "min"),
    Metric("values_max", "reward", "The largest value that the critic predicts.", "max"),
    Metric("residual_sq_mean", "reward²", "The mean squared difference of return and value.", "sum", "lower"),
)

DISTILLATION = declare_metrics(
    Metric("forward_kl", "nats", "KL(teacher‖student), over the teacher's top tokens or all tokens.", "sum", "lower"),
    Metric("reverse_kl", "nats", "KL(student‖teacher), over the teacher's top tokens or all tokens.", "sum", "lower"),
    Metric(
        "jensen_shannon",
        "nats",
        "The Jensen-Shannon divergence of teacher and student, over the teacher's top tokens or all tokens.",
        "sum",
        "lower",
    ),
    Metric("nll", "nats", "−log π of the data's tokens, a term of the distillation loss.", "sum", "lower"),
    Metric("draft_loss", "nats", "The cross entropy of the draft model against the policy.", "sum", "lower"),
)
