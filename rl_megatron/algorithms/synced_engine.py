"""A rollout engine that always generates with the policy's present weights, after their logprobs were checked."""

from __future__ import annotations

from collections.abc import Callable

from rl_megatron.algorithms.logprob_check import LogprobCheck
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.interfaces import EngineFailed, RolloutEngine, Sampling, Served


class SyncedEngine:
    """A `RolloutEngine` around another, which it owns.

    It syncs weights before it generates, and compares the engine's logprobs with the trainer's once for each copy of
    the weights that the engine serves.
    """

    def __init__(self, engine: RolloutEngine, check: LogprobCheck, note: Callable[[dict[str, float]], None]):
        """`note` is given the metrics of every weight sync and of every logprob check."""
        self._engine, self._check, self._note = engine, check, note
        self._checked: Served | None = None

    @property
    def served(self) -> Served | None:
        return self._engine.served

    def update_weights(self) -> dict[str, float]:
        metrics = self._engine.update_weights()
        self._note(metrics)
        return metrics

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """See `RolloutEngine.generate`.

        Raises:
            EngineMismatch: the engine's logprobs are not the trainer's; nothing was generated for the caller.
        """
        while True:
            served = self._sync()
            if served != self._checked:
                self._note(self._check.run(self._engine, prompts))
                self._checked = served
                continue  # the engine may have restarted during the check, which is then repeated
            rollouts = self._engine.generate(prompts, sampling, seed)
            if self.served == served:
                return rollouts  # otherwise a restarted engine generated them, which is not checked yet

    def _sync(self) -> Served:
        """Return which copy of the policy's present weights the engine serves."""
        self.update_weights()
        if self.served is None:
            raise EngineFailed("the rollout engine serves no weights after update_weights()")
        return self.served

    def shutdown(self) -> None:
        self._engine.shutdown()
