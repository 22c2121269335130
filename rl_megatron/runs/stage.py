"""`Stage`: the loop of a stage in a run. It evaluates and saves between steps, and resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_megatron import log
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.exchange import is_first_of_replica
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.checkpoint.directory import find_checkpoints
from rl_megatron.checkpoint.resumed_state import MustBe, Resumable, ResumedState
from rl_megatron.config.schema import StageConfig
from rl_megatron.config.train import TrainConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.loader import DataLoader
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import build_in_memory_loader
from rl_megatron.losses.contract import LossFunction
from rl_megatron.observability.liveness import Position
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.step_profiler import StepProfiler
from rl_megatron.runs.anomalies import Anomalies, describe_sequences
from rl_megatron.runs.checkpointer import Checkpointer, critic_checkpoints
from rl_megatron.runs.desync import DesyncCheck
from rl_megatron.runs.evaluations import Evaluations
from rl_megatron.runs.roll_back import RollBack
from rl_megatron.runs.step_meter import StepMeter
from rl_megatron.runs.stopping import RunStopped, Stopping
from rl_megatron.runs.user_files import digest_files
from rl_megatron.timing import PhaseTimer
from rl_megatron.training.loop import Closes, Loop
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.training.teacher import Teacher


@dataclass
class Stage(Loop):
    """The loop of a stage. It owns the stage's checkpointer.

    Attributes:
        weights_from: A description of the initial weights, which are also the reference policy's. Checkpoints store it.
        critic: The critic, for algorithms that have one. It is saved and resumed with the policy.
        run_config: The run's configuration as YAML, which checkpoints store.
        progress_metric: The training metric that the progress line always shows.
        meter: The meter of a step's costs; None if they are not reported.
        loader: The loader of the training data, whose position checkpoints keep.
        roll_back: The current step of the stage, and the number of batches that the stage leaves out.
        position: The position of this process in the run, for its heartbeat.
        closing: The parts that are closed with the stage, before its rollout engine.
    """

    name: str
    config: StageConfig
    policy: MegatronPolicy
    tokenizer: Tokenizer
    metrics_logger: MetricsLogger
    checkpoints: Path
    evaluations: Evaluations
    weights_from: str
    critic: MegatronPolicy | None = None
    run_config: str | None = None
    progress_metric: str = "loss"
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    meter: StepMeter | None = None
    profiler: StepProfiler | None = None
    loader: DataLoader[Any] | None = None
    stopping: Stopping = field(default_factory=Stopping)
    roll_back: RollBack = field(default_factory=RollBack)
    position: Position = field(default_factory=Position)
    closing: list[Closes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpointer = Checkpointer(
            self.checkpoints, self.config.train, self.policy, self.critic, self.stopping.record_save,
            self.metrics_logger.finish_writing,
        )  # fmt: skip
        train = self.config.train
        self._resumed_state = ResumedState()
        self._resumed_state.add("order", MustBe({"seed": train.seed, "global_batch_size": train.global_batch_size}))
        self._resumed_state.add("roll_back", self.roll_back)
        self._resumed_state.add("schedule", _Schedules(self.models))
        self._anomalies = Anomalies(self.config.train)
        self._desync = DesyncCheck(self.config.train.desync_check_every)
        self._most_informative: float | None = None  # the largest `informative_groups` of this start's steps
        self._batch: Batch | None = None  # the policy's training batch of the current step
        self._file_digests = digest_files(self.config)  # now, because the files are read now
        self.timer.observer = self._enter

    @property
    def models(self) -> dict[str, MegatronPolicy]:
        """Return the stage's models by name: its policy and, if there is one, its critic."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    def use_loader(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        loader.ranks = self.policy.topology.ranks
        self.keep("loader", loader)

    def keep(self, name: str, part: Resumable) -> None:
        self._resumed_state.add(name, part)

    def close_at_end(self, part: Closes) -> None:
        self.closing.append(part)

    def steps(self) -> Iterator[int]:
        train = self.config.train
        start = self._resume_from_newest()
        self.metrics_logger.begin_stage(self.name, start, train.steps, self.progress_metric)
        self.timer.restart()
        self.stopping.begin_stage(train.save_every_seconds if train.saves_by_time else 0.0)
        try:
            self._stop_if_asked(start, is_saved=True)
            if start == 0:
                self.evaluations.run(0)
            self.stopping.begin_step()
            for step in range(start + 1, train.steps + 1):
                self.roll_back.step = step
                self.position.begin_step(step)
                if self.profiler is not None:
                    self.profiler.begin(step)
                yield step
                self.checkpointer.poll()
                last = self.evaluations.run(step, last=step == train.steps)
                is_due = last or self.stopping.is_save_due or bool(train.save_every and step % train.save_every == 0)
                is_saved = False
                if is_due:
                    with self.timer.phase("save"):
                        is_saved = self._save(step, last)
                if last:
                    with self.timer.phase("save"):
                        self.checkpointer.exporter.wait()
                    self._warn_of_equal_groups()
                    return
                self._stop_if_asked(step, is_saved=is_saved)
        finally:
            self.metrics_logger.end_stage()

    def batches(self, data: Dataset | DataLoader[BatchedDataDict]) -> Iterator[tuple[int, Batch]]:
        loader, topology = _to_loader(data, self.config.train), self.policy.topology
        self.use_loader(loader)
        for step in self.steps():
            part = loader.part(self.batch_number(step) - 1, topology.data_rank, topology.data)
            if part is not None and loader.group_size > 1 and self.config.train.share_prefixes == "auto":
                part[PREFIX_SET] = torch.arange(part.size) // loader.group_size
            batch = Batch.gather_facts(part if is_first_of_replica(topology) else None, topology)
            together = None if loader.group_size == 1 else torch.arange(batch.size) // loader.group_size
            yield step, self.policy.distribute(batch, groups=together)

    def whole_batches(self, data: Dataset | DataLoader[BatchedDataDict]) -> Iterator[tuple[int, BatchedDataDict]]:
        loader = _to_loader(data, self.config.train)
        self.use_loader(loader)
        for step in self.steps():
            yield step, loader.batch(self.batch_number(step) - 1)

    def batch_number(self, step: int) -> int:
        return step + self.roll_back.batches_skipped

    @property
    def next_batch_number(self) -> int:
        return self.batch_number(self.roll_back.step) + 1

    def distinct_batches(self, data: Dataset | DataLoader[BatchedDataDict]) -> Iterator[BatchedDataDict]:
        return _to_loader(data, self.config.train).distinct_batches(self.config.train.steps)

    @property
    def reference_logprobs(self) -> Path:
        return self.checkpoints.parent.parent / "reference_logprobs" / f"{self.name}.safetensors"

    @property
    def rollout_files(self) -> Path:
        return self.checkpoints.parent.parent / "rollouts" / self.name

    def train(
        self,
        step: int,
        batch: Mapping[str, object],
        loss_fn: LossFunction,
        model: MegatronPolicy | None = None,
        teacher: Teacher | None = None,
    ) -> dict[str, float]:
        batch = (model or self.policy).as_batch(batch)
        self._desync.check(step, batch, self.models)
        if model is None:
            self._batch = batch
        try:
            with self.timer.phase("train" if model is None else "train_critic"):
                if self.meter is not None:
                    self.meter.count_step(model or self.policy, batch, is_policy=model is None)
                options: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
                if getattr(loss_fn, "on_policy_keys", ()):
                    options["on_policy"] = True  # `recomputes_logprobs` has decided whether the batch has prev_logprobs
                if (sizes := batch.trajectories.step_sizes(self.config.train.global_batch_size)) is not None:
                    options["sizes"] = sizes
                return (model or self.policy).train(batch, loss_fn, **options)
        except NonFiniteLoss as error:
            raise NonFiniteLoss(f"stage {self.name}, step {step}: {error}") from error

    def record(self, step: int, report: dict[str, float]) -> None:
        if self.profiler is not None:
            self.profiler.end()
        self.metrics_logger.record(step, report | ({} if self.meter is None else self.meter.metrics()))
        if (informative := report.get("informative_groups")) is not None:
            self._most_informative = max(informative, self._most_informative or 0.0)
        batch, self._batch = self._batch, None
        rewards = None if batch is None else batch.facts.get("rewards")
        for anomaly in self._anomalies.check_step(step, report, rewards):
            if log.is_main_rank() and batch is not None:
                self._warn(step, anomaly, batch)

    def _warn_of_equal_groups(self) -> None:
        """Warn if no group of this start had rewards that differ. Groups of one sample cannot have any."""
        if self._most_informative == 0 and getattr(self.config.algorithm, "samples_per_prompt", 1) > 1:
            log.LOGGER.warning(
                "stage %s: the rewards were equal within every group of every step (informative_groups=0), so an "
                "advantage relative to the group is 0; check reward.functions on the completions in samples.jsonl, or "
                "use prompts that the policy answers sometimes right and sometimes wrong",
                self.name,
            )

    def _warn(self, step: int, anomaly: str, batch: Batch) -> None:
        loader = self.loader

        def locations() -> list[str]:
            return [] if loader is None or loader.is_streamed else loader.locations(self.batch_number(step) - 1)

        window = self.config.train.anomaly_window
        log.LOGGER.warning(
            "stage %s, step %d: %s; the step learned from %s; no further warning of this kind before step %d "
            "(train.anomaly_window=%d; 0 turns these warnings off)",
            *(self.name, step, anomaly, describe_sequences(batch, self.tokenizer, locations), step + window, window),
        )

    def _enter(self, phase: str | None) -> None:
        self.position.enter(phase)
        self.metrics_logger.show_phase(phase)

    def _resume_from_newest(self) -> int:
        saved = find_checkpoints(self.checkpoints)
        if not saved:
            if self.metrics_logger.has_steps(self.name):
                log.LOGGER.warning(
                    "stage %s: an earlier start of this run ended before its first checkpoint, so the stage begins "
                    "again (set train.save_every to save more often)",
                    self.name,
                )
            return 0
        manifest = self.policy.load_checkpoint(saved[-1], verify=False)  # verified at the start of the run
        if self.critic is not None:
            self.critic.load_checkpoint(critic_checkpoints(self.checkpoints) / saved[-1].name, verify=False)
        self.roll_back.step = manifest["step"]
        self._resumed_state.load(manifest["stage_state"], str(saved[-1]))
        self.evaluations.results = manifest["results"]
        self.evaluations.evaluated_at = manifest.get("evaluated_at")
        step, steps = manifest["step"], self.config.train.steps
        log.LOGGER.info("stage %s: resuming after step %d of %d, from %s", self.name, step, steps, saved[-1])
        self.checkpointer.exporter.begin_missing()
        return manifest["step"]

    def _stop_if_asked(self, step: int, is_saved: bool) -> None:
        """End the run if a signal asks for it, or if its time is nearly up. Collective.

        `step` is the last step that is done. `is_saved` is true if its checkpoint is complete, being written or not
        needed.
        """
        reason = self.stopping.reason()
        if reason is None:
            return
        with self.timer.phase("save"):
            if not (self.checkpointer.complete() and is_saved):
                self._save(step, last=True)
        raise RunStopped(
            f"stage {self.name}: stopped after step {step} of {self.config.train.steps}, because {reason}",
            self.name,
            step,
            self.evaluations.results,
        )

    def _save(self, step: int, last: bool) -> bool:
        self.stopping.note_save()
        return self.checkpointer.save(
            step,
            last,
            config=self.run_config,
            results=self.evaluations.results,
            evaluated_at=self.evaluations.evaluated_at,
            stage=self.name,
            tokenizer=self.tokenizer.digest,
            weights_from=self.weights_from,
            user_files=self._file_digests,
            stage_state=self._resumed_state.state_dict(),
        )


def _to_loader(data: Dataset | DataLoader[BatchedDataDict], train: TrainConfig) -> DataLoader[BatchedDataDict]:
    return data if isinstance(data, DataLoader) else build_in_memory_loader(data, train)


class _Schedules:
    """The check that the learning-rate schedules, which the models themselves load, are at the right step."""

    def __init__(self, models: Mapping[str, MegatronPolicy]):
        self._models = models

    def state_dict(self) -> dict[str, int]:
        schedules = {name: model.scheduler for name, model in self._models.items()}
        return {name: 0 if schedule is None else schedule.num_steps for name, schedule in schedules.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Check that each schedule, as loaded, is at the step in `state`; see `MustBe.load_state_dict`."""
        MustBe(self.state_dict()).load_state_dict(state)
