"""How many items of each data set of a mixture form each batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import load_object, user_code
from rl_megatron.config.schema import DataConfig

Weights = Sequence[float] | Mapping[str, float]


class MixtureCounts:
    """The numbers of items that the batches of a mixture take from each data set.

    After every batch, the items that were taken from a data set differ from its share of all items by about one at
    most: what rounding took from a data set, a later batch gives back.

    Args:
        names: The names of the data sets.
        batch_size: The items of a batch.
        weights: Returns the weights at a step, counted from 1: one for each data set, in their order or by name.
        batches_per_step: The batches that a step may take. A rollout step takes one in each of its rounds.
    """

    def __init__(
        self, names: Sequence[str], batch_size: int, weights: Callable[[int], Weights], batches_per_step: int = 1
    ):
        self.names, self._batch_size = list(names), batch_size
        self._weights, self._batches_per_step = weights, batches_per_step
        self._begin()

    def at(self, number: int) -> tuple[list[int], list[int]]:
        """Return for batch `number` ≥ 0 the items that each data set gave before it, and those that it gives to it.

        Raises:
            ConfigError: The function of the weights raises an error or returns something else than weights.
        """
        if number < self._number:
            self._begin()
        while self._number < number:
            self._advance()
        return list(self._taken), self._counts()

    def _begin(self) -> None:
        self._number = 0
        self._taken = [0] * len(self.names)
        self._owed = [0.0] * len(self.names)  # what rounding left to each data set so far; it adds up to 0

    def _advance(self) -> None:
        counts = self._counts()
        self._owed = [due - count for due, count in zip(self._due(), counts, strict=True)]
        self._taken = [taken + count for taken, count in zip(self._taken, counts, strict=True)]
        self._number += 1

    def _due(self) -> list[float]:
        weights = self._weights_at(self._number // self._batches_per_step + 1)
        total = math.fsum(weights)
        return [owed + self._batch_size * each / total for owed, each in zip(self._owed, weights, strict=True)]

    def _counts(self) -> list[int]:
        if len(self.names) == 1:
            return [self._batch_size]
        due = self._due()
        counts = [max(0, math.floor(each)) for each in due]
        while (missing := self._batch_size - sum(counts)) != 0:
            step = 1 if missing > 0 else -1
            open_ = [which for which in range(len(counts)) if step > 0 or counts[which] > 0]
            best = max(open_, key=lambda which: (step * (due[which] - counts[which]), -which))
            counts[best] += step
        return counts

    def _weights_at(self, step: int) -> list[float]:
        given = user_code(f"data.mix_weights (step {step})", lambda: self._weights(step))
        problem = None
        if isinstance(given, Mapping):
            if set(given) != set(self.names):
                problem = f"the names {sorted(map(str, given))}, and data.mix has {sorted(self.names)}"
            else:
                given = [given[name] for name in self.names]
        elif not isinstance(given, Sequence) or len(given) != len(self.names):
            problem = f"{given!r}, and data.mix has {len(self.names)} data sets"
        if problem is None:
            assert isinstance(given, Sequence)
            numbers = [each for each in given if isinstance(each, (int, float)) and each >= 0 and math.isfinite(each)]
            if len(numbers) == len(given) and sum(numbers) > 0:
                return [float(each) for each in numbers]
            problem = f"{list(given)}: weights are finite numbers of 0 or more, and not all are 0"
        raise ConfigError(
            f"data.mix_weights returned {problem} (step {step}); return one weight for each data set, in the order of "
            "data.mix or by name"
        )


def configured_weights(data: DataConfig) -> Callable[[int], Weights]:
    """Return the function of the weights of a data section: the user's, or one that returns those of `data.mix`.

    Raises:
        ConfigError: `data.mix_weights` cannot be imported, or is no function.
    """
    if data.mix_weights is None:
        weights = [each.weight for each in data.mix] or [1.0]
        return lambda step: weights
    return load_object(data.mix_weights, "data.mix_weights")
