"""The engine as a stage's story uses it: it always draws from the policy's present weights, and only past the gate."""

from __future__ import annotations

from collections.abc import Callable

from rl_megatron.algorithms.logprob_check import Gate
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
        """See `RolloutEngine.generate`.  Raises: EngineMismatch, before anything that is returned is drawn."""
        self._pass_gate(prompts)
        while True:
            rollouts = self._engine.generate(prompts, sampling, seed)
            if not self._pass_gate(prompts):
                return rollouts  # else another start of the engine drew them, which had not passed: it draws them again

    def _pass_gate(self, prompts: list[list[int]]) -> bool:
        """Whether it had to; again where the engine needed the weights anew on the way."""
        had_to = False
        self.update_weights()
        while not self._passed:
            self._note(self._gate.check(self._engine, prompts))
            self._passed = had_to = True
            self.update_weights()
        return had_to

    def shutdown(self) -> None:
        self._engine.shutdown()
