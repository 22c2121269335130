"""One stage of a run, as its story sees it: steps to iterate over, and evaluation, saving and resuming in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.algorithms.checkpointer import Checkpointer, critic_checkpoints
from rl_megatron.checkpoint.directory import complete_checkpoints
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.order import BatchSchedule
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.execution import NonFiniteLoss
from rl_megatron.generation.interfaces import RolloutEngine
from rl_megatron.losses.contract import LossFunction
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.phase_timer import PhaseTimer
from rl_megatron.policy.megatron_policy import MegatronPolicy

Evaluation = Callable[[], tuple[dict[str, float], list[dict[str, Any]]]]


@dataclass
class Stage:
    """What a story works with. `evaluate` gives held-out measures and samples to look at; `weights_from` tells in
    checkpoints where the stage began, and so what its reference policy is; `critic` is there for algorithms that have
    one, saved and resumed with the policy; `run_config` is the run's YAML, which checkpoints keep; `timer` has the time
    of the phases; `progress_metric` is what the progress line always has."""

    name: str
    config: StageConfig
    policy: MegatronPolicy
    engine: RolloutEngine
    tokenizer: Tokenizer
    metrics_logger: MetricsLogger
    checkpoints: Path
    resume: bool
    evaluate: Evaluation
    weights_from: str
    critic: MegatronPolicy | None = None
    run_config: str | None = None
    progress_metric: str = "loss"
    results: dict[str, Any] = field(default_factory=dict)
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def __post_init__(self) -> None:
        self.checkpointer = Checkpointer(self.checkpoints, self.config.train, self.policy, self.critic)
        self._evaluated_at: int | None = None
        self.timer.observer = self.metrics_logger.show_phase

    def steps(self) -> Iterator[int]:
        """Step numbers 1 … train.steps, from where the newest checkpoint of this stage ends.

        Between steps the stage evaluates and saves when due; at the end it does both, and keeps the results.
        """
        train = self.config.train
        start = self._resume_from_newest()
        self.metrics_logger.begin_stage(self.name, start, train.steps, self.progress_metric)
        try:
            if start == 0:
                self._evaluate(0)
            for step in range(start + 1, train.steps + 1):
                yield step
                self.checkpointer.poll()
                last = step == train.steps
                if last or (train.eval_every and step % train.eval_every == 0):
                    self._evaluate(step)
                if last or (train.save_every and step % train.save_every == 0):
                    with self.timer.phase("save"):
                        self._save(step, last)
        finally:
            self.metrics_logger.end_stage()

    def batches(self, dataset: Dataset) -> Iterator[tuple[int, BatchedDataDict]]:
        """Each step with its `train.global_batch_size` rows: shuffled epochs, the same after a resume."""
        order = self._order(dataset)
        for step in self.steps():
            yield step, dataset.batch(order.items_at(step - 1))

    def distinct_batches(self, dataset: Dataset) -> Iterator[BatchedDataDict]:
        """The items that the stage's steps read, each once, in the batches that they come in first."""
        order, seen = self._order(dataset), set()
        for step in range(self.config.train.steps):
            fresh = [item for item in dict.fromkeys(order.items_at(step)) if item not in seen]
            if fresh:
                yield dataset.batch(fresh)
            seen.update(fresh)
            if len(seen) == len(dataset):
                return

    def _order(self, dataset: Dataset) -> BatchSchedule:
        train = self.config.train
        return BatchSchedule(len(dataset), train.global_batch_size // dataset.group_size, train.seed)

    @property
    def reference_logprobs(self) -> Path:
        """Where recorded logprobs of the stage's reference policy are kept."""
        return self.checkpoints.parent.parent / "reference_logprobs" / f"{self.name}.safetensors"

    def train(
        self, step: int, batch: BatchedDataDict, loss_fn: LossFunction, model: MegatronPolicy | None = None
    ) -> dict[str, float]:
        """One pass of the policy (or of `model`) over `batch`.

        Raises: NonFiniteLoss with the stage and step added; the last checkpoint stays.
        """
        try:
            with self.timer.phase("train" if model is None else "train_critic"):
                return (model or self.policy).train(batch, loss_fn)
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"stage {self.name}, step {step}: {error}") from error

    def record(self, step: int, report: dict[str, float]) -> None:
        self.metrics_logger.record(step, report)

    def _resume_from_newest(self) -> int:
        saved = complete_checkpoints(self.checkpoints) if self.resume else []
        if not saved:
            return 0
        manifest = self.policy.load_checkpoint(saved[-1], verify=False)  # the run has, before it began
        if self.critic is not None:
            self.critic.load_checkpoint(critic_checkpoints(self.checkpoints) / saved[-1].name, verify=False)
        self.results = manifest["results"]
        self._evaluated_at = manifest.get("evaluated_at")
        step, steps = manifest["step"], self.config.train.steps
        log.LOGGER.info("stage %s: resuming after step %d of %d, from %s", self.name, step, steps, saved[-1])
        return manifest["step"]

    def _evaluate(self, step: int) -> None:
        with self.timer.phase("evaluate"):
            measures, samples = self.evaluate()
        self.results, self._evaluated_at = {"measures": measures, "samples": samples}, step
        self.metrics_logger.record(step, measures, kind="eval")

    def _save(self, step: int, last: bool) -> None:
        train = self.config.train
        self.checkpointer.save(
            step,
            last,
            config=self.run_config,
            results=self.results,
            evaluated_at=self._evaluated_at,
            stage=self.name,
            tokenizer=self.tokenizer.digest,
            weights_from=self.weights_from,
            # Which rows and prompts come next is a function of these (data/order.py).
            data={"batches_taken": step, "seed": train.seed, "global_batch_size": train.global_batch_size},
        )
