"""Declare the metrics of training steps, rollouts and the logprob check.

Importing this module declares every metric that a run of this package writes: `config.metrics.METRICS` for training
steps and engines, `config.eval_metrics.EVAL_METRICS` for evaluations.
"""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.config.metrics import Metric, declare_metrics
from rl_megatron.generation.metrics import WEIGHT_SYNC
from rl_megatron.losses import metrics as losses

OPTIMIZER = declare_metrics(
    Metric("grad_norm", "1", "The norm of the gradient before clipping, over the optimizer steps.", "mean"),
    Metric("grad_norm_clipped", "1", "The norm of the gradient after clipping, over the optimizer steps.", "mean"),
    Metric("lr", "1", "The learning rate, over the optimizer steps.", "mean"),
    Metric("updated", "1", "The share of optimizer steps that moved the weights.", "mean", "higher"),
    Metric("num_updates", "steps", "The number of optimizer steps that moved the weights.", "sum"),
    Metric(
        "skipped_steps",
        "steps",
        "With train.on_nonfinite=skip, the number of optimizer steps that were left out.",
        "sum",
        "lower",
    ),
    Metric("packing_efficiency", "1", "The share of computed token slots that hold a token.", "mean", "higher"),
    Metric("router_aux_loss", "1", "The experts' load-balancing loss, summed over layers.", "mean", "lower"),
)

ROLLOUT = declare_metrics(
    Metric("reward", "reward", "The mean reward of all samples of the step, dropped ones included.", "mean", "higher"),
    Metric("completion_tokens", "tokens", "The mean length of a completion, its stop token included.", "mean"),
    Metric("stopped", "1", "The share of samples that ended with a stop token.", "mean", "higher"),
    Metric("informative_groups", "1", "The share of groups whose rewards differ.", "mean", "higher"),
    Metric("sampling_rounds", "rounds", "The rounds of dynamic sampling that the step took.", "last", "lower"),
    Metric(
        "mismatch_routing",
        "1",
        "With router replay, the share of (token, layer) pairs for which the trainer's router prefers other experts.",
        "mean",
        "lower",
    ),
    Metric("reward_kl", "nats", "The mean KL that, times β, is subtracted from the reward of each token.", "mean"),
)

LOGPROB_CHECK = declare_metrics(
    Metric("gate_mean", "nats", "The mean of |trainer's − engine's logprob| in the logprob check.", "mean", "lower"),
    Metric(
        "gate_p99", "nats", "The 99th percentile of |trainer's − engine's logprob| in the check.", "quantile", "lower"
    ),
    Metric("gate_max", "nats", "The largest |trainer's − engine's logprob| in the logprob check.", "max", "lower"),
)

CRITIC_PREFIX = "critic_"
CRITIC = declare_metrics(
    *(
        replace(metric, name=f"{CRITIC_PREFIX}{metric.name}", meaning=f"Of the critic: {metric.meaning}")
        for metric in (*losses.COMMON, *losses.VALUE, *OPTIMIZER)
    )
)

__all__ = ["CRITIC", "CRITIC_PREFIX", "LOGPROB_CHECK", "OPTIMIZER", "ROLLOUT", "WEIGHT_SYNC"]
