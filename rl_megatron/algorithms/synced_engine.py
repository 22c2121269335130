"""`SyncedEngine`: a rollout engine that syncs weights and checks logprobs before it generates."""

from __future__ import annotations

from collections.abc import Callable

from rl_megatron.algorithms.logprob_check import LogprobCheck
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution.phase_timer import count_tokens, phase
from rl_megatron.generation.interfaces import EngineFailed, RolloutEngine, Sampling, Served, SleepingEngine


class SyncedEngine:
    """A `RolloutEngine` that wraps another engine, which it owns.

    It generates only with the policy's current weights, after comparing the engine's logprobs with the trainer's. The
    comparison is made once for each copy of the weights that the engine serves.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        check: LogprobCheck,
        note: Callable[[dict[str, float]], None],
        needs_routing: bool = False,
    ):
        """Initialize the wrapper.

        Args:
            engine: The engine to wrap.
            check: The logprob check.
            note: Called with the metrics of every weight sync and of every logprob check.
            needs_routing: Whether completions must have routed experts, for router replay.
        """
        self._engine, self._check, self._note = engine, check, note
        self._needs_routing = needs_routing
        self._checked: Served | None = None

    @property
    def served(self) -> Served | None:
        """Return which copy of the policy's weights the engine serves, or None."""
        return self._engine.served

    def update_weights(self) -> dict[str, float]:
        """Sync the policy's current weights to the engine, and return the metrics of the sync."""
        with phase("refit"):
            metrics = self._engine.update_weights()
        self._note(metrics)
        return metrics

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """Generate completions of `prompts`, as `RolloutEngine.generate`, with the policy's current weights.

        Raises:
            EngineMismatch: The engine's logprobs differ from the trainer's. Nothing was generated for the caller.
            EngineFailed: The completions have no routed experts, although the engine is one that records them.
        """
        while True:
            served = self._sync()
            if served != self._checked:
                with phase("gate"):
                    self._note(self._check.run(self._engine, prompts))
                self._checked = served
                continue  # if the engine restarted during the check, the check is repeated
            with phase("generate"):
                rollouts = self._engine.generate(prompts, sampling, seed)
                count_tokens(int((rollouts["input_lengths"] - rollouts["prompt_lengths"]).sum()))
            if self._needs_routing and ROUTED_EXPERTS not in rollouts:
                raise EngineFailed(
                    "no routed experts came with the completions, and generation.router_replay=true needs them; set "
                    "router_replay=false, or use another engine"
                )
            if self.served == served:
                return rollouts  # otherwise they come from a restarted engine, which has not been checked

    def sleep(self) -> None:
        """Let the engine release memory that the policy needs for training, if it shares devices with the policy."""
        if isinstance(self._engine, SleepingEngine):
            with phase("sleep"):
                self._engine.sleep()

    def _sync(self) -> Served:
        """Sync weights, and return which copy of them the engine serves."""
        self.update_weights()
        if self.served is None:
            raise EngineFailed("the rollout engine serves no weights after update_weights()")
        return self.served

    def shutdown(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()
