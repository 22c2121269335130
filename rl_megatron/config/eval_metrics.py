"""Held-out measures by name, and which way is up."""

from __future__ import annotations

# Every measure that an evaluation gives and that says how good a model is (algorithms/evaluate.py).
HIGHER_IS_BETTER: dict[str, bool] = {
    "accuracy": True,
    "nll_per_token": False,
    "nll_per_character": False,
    "preference_accuracy": True,
    "preference_margin": True,
    "reward_accuracy": True,
    "reward_margin": True,
}


def better(measure: str, value: float, than: float) -> bool:
    """Whether `value` of `measure` is better than another; a NaN is better than nothing, and worse than any number."""
    if value != value or than != than:
        return than != than and value == value
    return value > than if HIGHER_IS_BETTER[measure] else value < than
