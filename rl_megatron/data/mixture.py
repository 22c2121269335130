"""The number of items that each data set of a mixture contributes to each batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import load_object, run_user_code
from rl_megatron.config.schema import DataConfig

Weights = Sequence[float] | Mapping[str, float]


class MixtureCounts:
    """The numbers of items that the batches of a mixture take from each data set.

    After every batch, the number of items taken from a data set differs from its share of all items by about one at
    most: a later batch compensates for rounding.

    Args:
        names: The names of the data sets.
        batch_size: The number of items in a batch.
        weights: Returns the weights at a step, counted from 1: one for each data set, in the order of `names` or by
            name.
        batches_per_step: The maximum number of batches per step. A rollout step draws one batch in each of its rounds.
    """

    def __init__(
        self, names: Sequence[str], batch_size: int, weights: Callable[[int], Weights], batches_per_step: int = 1
    ):
        self.names, self._batch_size = list(names), batch_size
        self._weights, self._batches_per_step = weights, batches_per_step
        self._begin()

    def at(self, number: int) -> tuple[list[int], list[int]]:
        """Return how many items of each data set the batches before `number` take, and how many this batch takes."""
        if number < self._number:
            self._begin()
        while self._number < number:
            counts = self._compute_counts()
            self._owed = [due - count for due, count in zip(self._compute_due(), counts, strict=True)]
            self._taken = [total + count for total, count in zip(self._taken, counts, strict=True)]
            self._number += 1
        return list(self._taken), self._compute_counts()

    def _begin(self) -> None:
        self._number = 0
        self._taken = [0] * len(self.names)
        self._owed = [0.0] * len(self.names)  # how many items each data set has lost by rounding; the sum is 0

    def _compute_due(self) -> list[float]:
        weights = self._read_weights(self._number // self._batches_per_step + 1)
        total = math.fsum(weights)
        return [owed + self._batch_size * weight / total for owed, weight in zip(self._owed, weights, strict=True)]

    def _compute_counts(self) -> list[int]:
        if len(self.names) == 1:
            return [self._batch_size]
        due = self._compute_due()
        counts = [max(0, math.floor(items)) for items in due]
        while (missing := self._batch_size - sum(counts)) != 0:
            step = 1 if missing > 0 else -1
            candidates = [which for which in range(len(counts)) if step > 0 or counts[which] > 0]
            best = max(candidates, key=lambda which: (step * (due[which] - counts[which]), -which))
            counts[best] += step
        return counts

    def _read_weights(self, step: int) -> list[float]:
        weights = run_user_code(f"data.mix_weights (step {step})", lambda: self._weights(step))
        problem = None
        if isinstance(weights, Mapping):
            if set(weights) != set(self.names):
                problem = f"the names {sorted(map(str, weights))}, but data.mix has {sorted(self.names)}"
            else:
                weights = [weights[name] for name in self.names]
        elif not isinstance(weights, Sequence) or len(weights) != len(self.names):
            problem = f"{weights!r}, but data.mix has {len(self.names)} data sets"
        if problem is None:
            assert isinstance(weights, Sequence)
            valid = [w for w in weights if isinstance(w, (int, float)) and w >= 0 and math.isfinite(w)]
            if len(valid) == len(weights) and sum(valid) > 0:
                return [float(weight) for weight in valid]
            problem = f"{list(weights)}: weights must be finite numbers of 0 or more, and not all 0"
        raise ConfigError(
            f"data.mix_weights returned {problem} (step {step}); return one weight for each data set, in the order of "
            "data.mix or by name"
        )


def load_weights(data: DataConfig) -> Callable[[int], Weights]:
    """Return the user's function for the weights, or one that always returns the weights in `data.mix`."""
    if data.mix_weights is None:
        weights = [data_set.weight for data_set in data.mix] or [1.0]
        return lambda step: weights
    return load_object(data.mix_weights, "data.mix_weights")
