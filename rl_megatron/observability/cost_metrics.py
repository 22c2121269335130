"""Declare the metrics of the cost of a step: times by phase, speeds, MFU and memory."""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.config.metrics import Metric, declare_metrics

# The outermost phases of steps (timing.py), and the work that is done in them.
OUTER_PHASES = {
    "generate": "generating completions",
    "environment": "waiting for rollout workers, with their environments and tools",
    "reward": "scoring completions",
    "wait": "waiting for trajectories that are made while the policy trains",
    "exchange": "moving rollouts to the ranks that learn from them",
    "sleep": "letting a rollout engine release its memory",
    "logprobs": "computing the policy's logprobs",
    "reference": "computing the reference policy's logprobs",
    "teacher": "computing the teachers' logprobs or top-k logits",
    "values": "computing the critic's values",
    "advantages": "computing advantages",
    "train": "training the policy",
    "train_critic": "training the critic",
    "refit": "sending weights to the rollout engine",
    "gate": "the logprob check",
    "save": "saving checkpoints, as far as training waits for it",
    "evaluate": "evaluating the policy",
}
# The parts of training phases. Collectives within layers belong to forward and backward.
INNER_PHASES = {
    "forward": "the forward pass and the loss",
    "backward": "the backward pass",
    "pipeline_wait": "waiting for other pipeline stages and exchanging activations and gradients with them",
    "collectives": "summing gradients over ranks and gathering weights, as far as training waits for it",
    "optimizer": "clipping gradients and updating weights",
}
TRAINING_PHASES = ("train", "train_critic")
TOKEN_PHASES = ("generate", "logprobs", "reference", "values", *TRAINING_PHASES)  # whose tokens are counted


def _declare_seconds(phase: str, meaning: str) -> Metric:
    return Metric(f"time_{phase}_s", "seconds", meaning, "sum", "lower")


def _declare_speed(name: str, unit: str, meaning: str, healthy: str = "") -> Metric:
    return Metric(name, unit, meaning, "mean", "higher", healthy)


def _declare_times() -> Iterator[Metric]:
    yield _declare_seconds("step", "The wall-clock time since the previous training line; the phases add up to it.")
    for name, doing in OUTER_PHASES.items():
        yield _declare_seconds(name, f"The time of {doing}.")
    yield _declare_seconds("other", "The time of the step that belongs to no phase.")
    for outer in TRAINING_PHASES:
        for name, doing in INNER_PHASES.items():
            yield _declare_seconds(f"{outer}_{name}", f"The part of time_{outer}_s that is {doing}.")
        yield _declare_seconds(f"{outer}_other", f"The rest of time_{outer}_s, such as preparing microbatches.")


def _declare_speeds() -> Iterator[Metric]:
    without = "second of the step without evaluations and saves."
    yield _declare_speed("samples_per_s", "1/s", f"The sequences that the policy learns from, per {without}")
    yield _declare_speed(
        "tokens_per_s_per_rank", "1/s", f"The tokens that the policy learns from, per rank and {without}"
    )
    yield _declare_speed("tokens_per_s_generate", "1/s", "The tokens of completions, per second of time_generate_s.")
    for name in TOKEN_PHASES[1:]:
        yield _declare_speed(f"tokens_per_s_{name}", "1/s", f"The tokens without padding, per second of time_{name}_s.")
    yield _declare_speed(
        "tflops_per_rank",
        "TFLOP/s",
        "The operations of forward and backward passes that the result depends on, per rank and second of training: "
        "without padding, recomputation and attention to later tokens.",
    )
    yield _declare_speed(
        "mfu",
        "1",
        "tflops_per_rank as a share of the GPU's peak, if the peak is known.",
        healthy="0.3 to 0.5 for dense models of billions of weights",
    )


def _declare_over_ranks() -> Iterator[Metric]:
    meaning = "The share of time_train_s in which a rank waits for other pipeline stages, as a mean over ranks."
    yield Metric("pipeline_bubble", "1", meaning, "mean", "lower", healthy="below 0.2")
    for name, doing in OUTER_PHASES.items():
        yield Metric(f"peak_memory_{name}_gb", "GB", f"The most memory of a rank while {doing}.", "max", "lower")


COSTS = declare_metrics(*_declare_times(), *_declare_speeds(), *_declare_over_ranks())
