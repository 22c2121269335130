"""Evaluate a stage when it is due, keep the newest results, and find out whether they reach a goal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from rl_megatron import log
from rl_megatron.config.metrics import find_reached_goal
from rl_megatron.config.train import TrainConfig
from rl_megatron.evaluation.heldout import Evaluation
from rl_megatron.evaluation.sets import EvalSet, EvalSets, is_multiple
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.rewards.reward_models import RewardModels
from rl_megatron.timing import PhaseTimer
from rl_megatron.training.megatron_policy import MegatronPolicy


@dataclass
class Evaluations:
    """The evaluations of a stage.

    Attributes:
        stage: The name of the stage.
        sets: The named sets of problems, or None if there are none.
        reward_models: The reward models that run on the ranks, or None if there are none.
        results: The newest eval metrics and samples, which checkpoints store.
        evaluated_at: The step of these results, or None before the first evaluation.
    """

    stage: str
    train: TrainConfig
    policy: MegatronPolicy
    engine: SyncedEngine
    heldout: Evaluation
    metrics_logger: MetricsLogger
    timer: PhaseTimer
    sets: EvalSets | None = None
    reward_models: RewardModels | None = None
    results: dict[str, Any] = field(default_factory=dict)
    evaluated_at: int | None = None

    def run(self, step: int, last: bool = False) -> bool:
        """Evaluate on the held-out data and the named sets, if they are due; after the last step, all are due.

        Returns:
            Whether this is the last step, because `last` is true or an evaluation reached a goal of `train.stop_at`.
        """
        is_due, sets = self._due(step, last)
        self._evaluate(step, is_due, sets)
        if last or step == 0 or not self._reaches_goal(step):
            return last
        _, all_sets = self._due(step, last=True)
        self._evaluate(step, not is_due, [eval_set for eval_set in all_sets if eval_set not in sets])
        return True

    def close(self) -> None:
        if self.sets is not None:
            self.sets.close()

    def _due(self, step: int, last: bool) -> tuple[bool, list[EvalSet]]:
        """Return whether the held-out data is due after a step, and which sets are."""
        is_due = last or step == 0 or is_multiple(step, self.train.eval_every)
        return is_due, [] if self.sets is None else self.sets.select_due(step, last)

    def _evaluate(self, step: int, on_heldout: bool, sets: Sequence[EvalSet]) -> None:
        if not on_heldout and not sets:
            return
        frozen = nullcontext() if self.reward_models is None else self.reward_models.freeze_statistics()
        with self.timer.phase("evaluate"), frozen:
            eval_metrics: dict[str, float] = {}
            samples = self.results.get("samples", [])
            if on_heldout:
                eval_metrics, samples = self.heldout.evaluate(self.policy, self.engine)
            if self.sets is not None:
                eval_metrics = eval_metrics | self.sets.evaluate(step, sets, self.engine)
            self.engine.sleep()  # in a stage without rollouts, nothing else puts the engine to sleep
        earlier = self.results["measures"] if self.evaluated_at == step else {}
        self.results, self.evaluated_at = {"measures": earlier | eval_metrics, "samples": samples}, step
        self.metrics_logger.record(step, eval_metrics, kind="eval")
        self.metrics_logger.record_samples(step, samples)

    def _reaches_goal(self, step: int) -> bool:
        """Return whether the evaluation after this step, if there was one, reaches a goal of `train.stop_at`."""
        goals = self.train.stop_at
        name = find_reached_goal(goals, self.results["measures"]) if self.evaluated_at == step else None
        if name is None:
            return False
        value = self.results["measures"][name]
        log.LOGGER.info(
            "stage %s: ends after step %d, because %s=%g has reached train.stop_at=%g",
            *(self.stage, step, name, value, goals[name]),
        )
        return True
