"""Declare the metrics of a weight sync that rollout engines report (`RolloutEngine.sync`)."""

from __future__ import annotations

from rl_megatron.config.metrics import Metric, declare_metrics

_PHASES = {
    "": "the last weight sync, until every engine serves the weights",
    "fill_": "writing rank 0's weights into buckets, with their fingerprints",
    "transfer_": "waiting for the collectives that carry the buckets",
    "verify_": "comparing fingerprints in the slowest engine",
    "copy_": "copying tensors into the model of the slowest engine",
}

WEIGHT_SYNC = declare_metrics(
    Metric("refit_bytes", "bytes", "The size of the weights that the last weight sync sent.", "last"),
    *(
        metric
        for phase, meaning in _PHASES.items()
        for metric in (
            Metric(f"refit_{phase}seconds", "seconds", f"The wall-clock time of {meaning}.", "last", "lower"),
            Metric(f"refit_{phase}gb_per_s", "GB/s", f"refit_bytes over the time of {meaning}.", "last", "higher"),
        )
    ),
)
