"""Declare the metrics of training steps, rollouts and the logprob check.

Importing this module declares every metric that a run of this package writes: those of training steps and engines in
`config.metrics.METRICS`, those of evaluations in `config.metrics.EVAL_METRICS`.
"""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.config.metrics import Metric, declare_metrics
from rl_megatron.generation.metrics import WEIGHT_SYNC
from rl_megatron.losses import metrics as losses
from rl_megatron.observability.cost_metrics import COSTS

LAYER_GROUPS = {
    "embedding": "the embedding",
    **{f"layers_{quarter}": f"the {ordinal} quarter of the layers" for quarter, ordinal in enumerate(
        ("first", "second", "third", "last"), start=1)},
    "output": "what follows the layers: the final norm, the head and prediction modules",
}  # fmt: skip

OPTIMIZER = declare_metrics(
    Metric(
        "grad_norm",
        "1",
        "The norm of the gradient before clipping, over the optimizer steps.",
        "mean",
        healthy="within a factor of 10 of its median",
    ),
    *(
        Metric(f"grad_norm_{group}", "1", f"The norm of the gradient of {what}, before clipping.", "mean")
        for group, what in LAYER_GROUPS.items()
    ),
    Metric("grad_norm_clipped", "1", "The norm of the gradient after clipping, over the optimizer steps.", "mean"),
    Metric("lr", "1", "The learning rate, over the optimizer steps.", "mean"),
    Metric("updated", "1", "The share of optimizer steps that changed the weights.", "mean", "higher", healthy="1"),
    Metric("num_updates", "steps", "The number of optimizer steps that changed the weights.", "sum"),
    Metric(
        "skipped_steps",
        "steps",
        "With train.on_nonfinite=skip, the number of optimizer steps that were skipped.",
        "sum",
        "lower",
        healthy="0",
    ),
    Metric(
        "packing_efficiency",
        "1",
        "The tokens of all sequences for each token slot that is computed; above 1 if sequences share tokens.",
        "mean",
        "higher",
        healthy="above 0.9",
    ),
    Metric(
        "expert_load_max",
        "1",
        "The most tokens routed to an expert, as a multiple of its layer's mean.",
        "max",
        "lower",
        healthy="below 3",
    ),
    Metric(
        "expert_load_min",
        "1",
        "The fewest tokens routed to an expert, as a share of its layer's mean.",
        "min",
        "higher",
    ),
    Metric("router_aux_loss", "1", "The experts' load-balancing loss, summed over layers.", "mean", "lower"),
)


def _distribution(name: str, unit: str, what: str) -> tuple[Metric, ...]:
    return (
        Metric(f"{name}_std", unit, f"The standard deviation of {what}.", "mean"),
        Metric(f"{name}_min", unit, f"The smallest of {what}.", "min"),
        *(Metric(f"{name}_p{q}", unit, f"The {q}th percentile of {what}.", "quantile") for q in (10, 50, 90)),
        Metric(f"{name}_max", unit, f"The largest of {what}.", "max"),
    )


ASYNCHRONOUS = declare_metrics(
    Metric(
        "trajectory_age_mean",
        "steps",
        "With rollout.async_enabled, how many steps ago a trajectory's oldest token was sampled, on average.",
        "mean",
        "lower",
    ),
    Metric(
        "trajectory_age_max",
        "steps",
        "With rollout.async_enabled, how many steps ago the oldest token of the step was sampled.",
        "max",
        "lower",
        healthy="at most rollout.max_trajectory_age_steps",
    ),
    Metric(
        "partial_trajectories", "trajectories", "Trajectories with tokens of several versions of the weights.", "sum"
    ),
    Metric("dropped_groups", "groups", "Groups that no step learns from, for any reason.", "sum", "lower"),
    Metric(
        "dropped_groups_too_old",
        "groups",
        "Dropped groups that were older than rollout.max_trajectory_age_steps.",
        "sum",
        "lower",
    ),
    Metric(
        "dropped_groups_not_in_time",
        "groups",
        "Dropped groups that a step with rollout.over_sampling did not wait for.",
        "sum",
        "lower",
    ),
    Metric("refilled_groups", "groups", "Groups that were started to replace dropped ones.", "sum"),
    Metric("running_groups", "groups", "Groups that are still being sampled when the step has its groups.", "last"),
    Metric("ready_groups", "groups", "Complete groups that wait for later steps when the step has its groups.", "last"),
    Metric(
        "engine_idle",
        "1",
        "The share of time in which the rollout engine has no request.",
        "mean",
        "lower",
        healthy="below 0.15; otherwise raise rollout.max_trajectory_age_steps, or use fewer engines",
    ),
    Metric(
        "trainer_idle",
        "1",
        "The share of time in which training waits for trajectories.",
        "mean",
        "lower",
        healthy="below 0.15; otherwise use more engines",
    ),
    Metric("trainer_devices", "devices", "The devices that train.", "last"),
    Metric("engine_devices", "devices", "The devices of the rollout engine.", "last"),
    Metric(
        "correction_ess",
        "1",
        "The effective sample size (Σw)²/Σw² of the weights π_prev/π_generation, as a share of the tokens.",
        "mean",
        "higher",
        healthy="above 0.9",
    ),
    Metric("old_logprobs_of_engine", "1", "1 if π_prev is what the engine reported, and 0 if not.", "last"),
)

ROLLOUT = declare_metrics(
    Metric(
        "reward",
        "reward",
        "The mean reward of all samples of the step, dropped ones included.",
        "mean",
        "higher",
        healthy="rises",
    ),
    *_distribution("reward", "reward", "the rewards of all samples"),
    Metric(
        "completion_tokens",
        "tokens",
        "The mean length of a completion, its stop token included.",
        "mean",
        healthy="no sudden jump, and well below generation.max_new_tokens",
    ),
    *_distribution("completion_tokens", "tokens", "the lengths of completions"),
    Metric("stopped", "1", "The share of samples that ended with a stop token.", "mean", "higher", healthy="above 0.9"),
    Metric(
        "informative_groups",
        "1",
        "The share of groups whose rewards differ.",
        "mean",
        "higher",
        healthy="0.2 to 0.9; at 0, the policy learns nothing",
    ),
    Metric("turns", "turns", "The mean number of completions of a trajectory.", "mean"),
    Metric(
        "segments",
        "segments",
        "The mean number of segments of a trajectory; above 1 if a chat template rewrites earlier turns.",
        "mean",
    ),
    Metric("tool_calls", "calls", "The mean number of tool calls in a trajectory that has tools.", "mean"),
    Metric(
        "tool_errors",
        "calls",
        "The mean number of a trajectory's tool calls that failed or could not be read.",
        "mean",
        "lower",
    ),
    Metric(
        "malformed_calls",
        "calls",
        "The mean number of a trajectory's tool calls that could not be read.",
        "mean",
        "lower",
    ),
    Metric(
        "failed_trajectories",
        "trajectories",
        "The trajectories that failed in all attempts; see rollout.on_failure.",
        "sum",
        "lower",
        healthy="0",
    ),
    Metric(
        "masked_groups",
        "groups",
        "The groups that are not learned from because a trajectory failed (with mask_sample: too many failed).",
        "sum",
        "lower",
        healthy="0",
    ),
    Metric("retried_trajectories", "trajectories", "The trajectories that were tried more than once.", "sum", "lower"),
    Metric("sampling_rounds", "rounds", "The rounds of dynamic sampling that the step took.", "last", "lower"),
    Metric(
        "mismatch_routing",
        "1",
        "With router replay, the share of (token, layer) pairs for which the trainer's router prefers other experts.",
        "mean",
        "lower",
    ),
    Metric("advantage_mean", "reward", "The mean advantage, over the tokens that are learned from.", "mean"),
    *_distribution("advantage", "reward", "the advantages of the tokens that are learned from"),
    Metric(
        "weight_age_mean",
        "versions",
        "How many versions newer the policy's weights are than those that sampled a completion, on average.",
        "mean",
        "lower",
    ),
    Metric(
        "weight_age_max",
        "versions",
        "How many versions newer the policy's weights are than the oldest that sampled a completion.",
        "max",
        "lower",
        healthy="0, unless generation runs ahead of training",
    ),
    Metric(
        "mismatch_p99",
        "nats",
        "The 99th percentile of |log π_generation − log π_prev|, if the trainer's logprobs are recomputed.",
        "quantile",
        "lower",
        healthy="below 0.5 in bf16",
    ),
    Metric(
        "teacher_kl",
        "nats",
        "The reverse KL from the teachers, estimated from sampled tokens: the mean of log π − log π_teacher.",
        "mean",
        "lower",
    ),
    Metric("reward_kl", "nats", "The mean KL that, times β, is subtracted from the reward of each token.", "mean"),
)

LOGPROB_CHECK = declare_metrics(
    Metric(
        "gate_mean",
        "nats",
        "The mean of |trainer's − engine's logprob| in the logprob check.",
        "mean",
        "lower",
        healthy="below 1e-4 in fp32, and below 0.03 in bf16",
    ),
    Metric(
        "gate_p99", "nats", "The 99th percentile of |trainer's − engine's logprob| in the check.", "quantile", "lower"
    ),
    Metric("gate_max", "nats", "The largest |trainer's − engine's logprob| in the logprob check.", "max", "lower"),
)

CRITIC_PREFIX = "critic_"
CRITIC = declare_metrics(
    *(
        replace(metric, name=f"{CRITIC_PREFIX}{metric.name}", meaning=f"Of the critic: {metric.meaning}", healthy="")
        for metric in (*losses.COMMON, *losses.VALUE, *OPTIMIZER)
    )
)

__all__ = ["COSTS", "CRITIC", "CRITIC_PREFIX", "LOGPROB_CHECK", "OPTIMIZER", "ROLLOUT", "WEIGHT_SYNC"]
