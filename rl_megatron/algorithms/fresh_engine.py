"""The engine as a stage's story uses it: it always draws from the policy's present weights, and only past the gate."""

from __future__ import annotations

from collections.abc import Callable

from rl_megatron.algorithms.gate import Gate
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.interfaces import RolloutEngine, Sampling


class FreshEngine:
    """A `RolloutEngine` around another. `note` is told what every refit cost and what the gate found."""

    def __init__(self, engine: RolloutEngine, gate: Gate, note: Callable[[dict[str, float]], None]):
        self._engine, self._gate, self._note = engine, gate, note
        self._passed = False  # the gate, with the weights that are served

    def update_weights(self) -> dict[str, float]:
        costs = self._engine.update_weights()
        if costs:
            self._passed = False
            self._note(costs)
        return costs

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """See `RolloutEngine.generate`.  Raises: EngineMismatch, before anything is drawn."""
        self.update_weights()
        if not self._passed:
            self._note(self._gate.check(self._engine, prompts))
            self._passed = True
        return self._engine.generate(prompts, sampling, seed)

    def shutdown(self) -> None:
        self._engine.shutdown()
