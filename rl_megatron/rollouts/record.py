"""The recorded rollouts of steps: files that a run can learn from again, and the log of an asynchronous run.

The log is the file `log.jsonl` beside the files, one JSON object per step: which groups the step has learned from, in
what order, and how old they were. A step's file of rollouts, and then its line of the log, are synced to disk before
the run learns from the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron import disk, log
from rl_megatron.batching.batch import DATA_SET, Batch
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rewards import ENVIRONMENT, RewardConfig
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rollouts.batch import COMPONENT, index_data_sets
from rl_megatron.rollouts.files import KEPT, Draw, build_rows, rows_to_batch
from rl_megatron.rollouts.rows import read_rows, rollout_file, write_rows
from rl_megatron.topology.ranks import Ranks

# The index of a sequence among all sequences of its step, in the order of sampling: a fact of sharded batches, and a
# key of other batches.
ORDER = "draw_order"


@dataclass(frozen=True)
class LoggedGroup:
    """A group that a step learned from.

    Attributes:
        number: Its position in the stream of prompts.
        location: The location of its record in the data.
        ages: The age of each trajectory, in steps.
        versions: The oldest and the newest version of the weights that sampled its tokens; empty if there are none.
    """

    number: int
    location: str
    ages: Sequence[int]
    versions: Sequence[int]


@dataclass(frozen=True)
class LoggedStep:
    """The entry of a step in the log.

    Attributes:
        used: The groups that the step learned from, in the order of the batch.
        dropped: The groups that were dropped since the last step, with the reason.
        metrics: The metrics of its rollouts, which cannot be computed again.
    """

    step: int
    used: Sequence[LoggedGroup]
    dropped: Mapping[int, str]
    metrics: Mapping[str, float]

    @property
    def ended(self) -> list[int]:
        """Return the groups that will not be made again."""
        return [*(group.number for group in self.used), *self.dropped]


class RolloutLog:
    """The log of a stage. All ranks may read it, and rank 0 writes it."""

    def __init__(self, directory: Path):
        """Use the directory of the stage's files of rollouts; nothing is read or written yet."""
        self._path = directory / "log.jsonl"

    def read(self) -> dict[int, LoggedStep]:
        """Return the steps of the log, without a last line whose write was cut off."""
        if not self._path.exists():
            return {}
        steps = {}
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            entry = json.loads(line)
            used = [LoggedGroup(**group) for group in entry["used"]]
            dropped = {int(number): reason for number, reason in entry["dropped"].items()}
            steps[entry["step"]] = LoggedStep(entry["step"], used, dropped, entry["metrics"])
        return steps

    def append(self, step: LoggedStep) -> None:
        """Write a step; replace a last line that was cut off."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.read_bytes().rpartition(b"\n") if self._path.exists() else (b"", b"", b"")
        with self._path.open("r+b" if self._path.exists() else "w+b") as file:
            file.truncate(len(whole[0]) + len(whole[1]))
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(asdict(step)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self, after: int) -> None:
        """Remove the steps after `after`, the step to which the run rolled back. The file is replaced atomically."""
        kept = [step for number, step in self.read().items() if number <= after]
        if not self._path.exists():
            return
        disk.replace_file(self._path, "".join(json.dumps(asdict(step)) + "\n" for step in kept), is_synced=True)


class RolloutRecord:
    """The rollouts of the current step on rank 0, which produces, writes and replays them.

    Other ranks have only the order of the sequences.

    Attributes:
        log: The log of an asynchronous run.
    """

    def __init__(
        self,
        config: TrajectoryConfig,
        directory: Path,
        tokenizer: Tokenizer,
        samples_per_prompt: int,
        ranks: Ranks,
        *,
        reward: RewardConfig | None = None,
        mixture: Sequence[str] = (),
    ):
        """Start without rollouts.

        Args:
            config: The section `rollout`.
            directory: The directory of the files.
            tokenizer: The run's tokenizer.
            samples_per_prompt: How many consecutive trajectories belong to one prompt.
            ranks: The policy's ranks.
            reward: The section `reward`, if rollouts have the scores of each reward function.
            mixture: The names of the data sets of the mixture, if rollouts have the key `data_set`.
        """
        self._reward, self._mixture = reward, mixture
        self._config, self._directory, self._tokenizer = config, directory, tokenizer
        self._samples_per_prompt, self._ranks = samples_per_prompt, ranks
        self.log = RolloutLog(directory)
        self._draws: list[Draw] = []
        self._num_drawn = 0
        self._replayed: tuple[int, dict[int, BatchedDataDict]] = (0, {})
        self._replayed_log: dict[int, LoggedStep] | None = None

    @property
    def replays(self) -> bool:
        """Return whether the run learns from recorded rollouts."""
        return self._config.replay is not None

    def replay(self, step: int, round_: int, num_trajectories: int) -> BatchedDataDict | None:
        """Return the recorded rollouts of a round on rank 0, and None on other ranks. Collective."""
        return self._ranks.run_on_rank0(lambda: self._read(step, round_, num_trajectories))

    def _read(self, step: int, round_: int, num_trajectories: int) -> BatchedDataDict:
        path = rollout_file(Path(str(self._config.replay)), step)
        if self._replayed[0] != step:
            rounds = groupby(self._read_checked_rows(path), key=lambda row: row["round"])
            self._replayed = step, {number: self._read_batch(list(rows)) for number, rows in rounds}
        batch = self._replayed[1].get(round_)
        size = 0 if batch is None else TrajectoryIndex(batch).num_trajectories
        if batch is None or size != num_trajectories:
            raise ConfigError(
                f"rollout.replay={self._config.replay}: {path.name} has {size} trajectories of round {round_}, but "
                f"the step needs {num_trajectories}; replay a run with the same algorithm.prompts_per_step and "
                "samples_per_prompt, and with rollout.save_prompts=null"
            )
        return batch

    def _read_checked_rows(self, path: Path) -> list[dict[str, Any]]:
        """Return the rows of a replayed file; raise ConfigError if it has scores of other reward functions."""
        rows = read_rows(path)
        if self._reward is not None:
            names = {reward["component"] for row in rows for reward in row["rewards"]} - {ENVIRONMENT}
            wanted = {function.shown_name for function in self._reward.functions}
            if names - wanted and (wanted or len(names) > 1):  # without functions, a single name is the task's reward
                raise ConfigError(
                    f"rollout.replay={self._config.replay}: {path.name} has scores of {sorted(names)}, but "
                    f"reward.functions has {sorted(wanted)}; the advantage estimator reads these scores and their "
                    "weights, so use the recorded run's reward.functions"
                )
        return rows

    def _read_batch(self, rows: Sequence[Mapping[str, object]]) -> BatchedDataDict:
        names = None if self._reward is None else [function.shown_name for function in self._reward.functions]
        batch = rows_to_batch(rows, names)
        if self._mixture:
            batch[DATA_SET] = self._read_data_sets(rows)
        return batch

    def _read_data_sets(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        names = [row["data_set"] for row in rows]
        if unknown := sorted(set(names) - set(self._mixture)):
            raise ConfigError(
                f"rollout.replay={self._config.replay}: step {rows[0]['step']} has samples of the data set "
                f"{unknown[0]!r}, which data.mix={list(self._mixture)} lacks; algorithm.teachers chooses teachers by "
                "data set, so use the recorded run's data.mix"
            )
        return index_data_sets(names, self._mixture)

    def read_logged_metrics(self, step: int) -> dict[str, float]:
        """Return a step's metrics from the log of a replayed asynchronous run; empty without such a log."""
        if self._config.replay is None:
            return {}
        if self._replayed_log is None:
            self._replayed_log = RolloutLog(Path(self._config.replay)).read()
        logged = self._replayed_log.get(step)
        return {} if logged is None else dict(logged.metrics)

    def read_step(self, step: int) -> BatchedDataDict | None:
        """Return the rollouts of an asynchronous step of this run on rank 0, and None on other ranks. Collective."""
        return self._ranks.run_on_rank0(lambda: self._read_batch(read_rows(rollout_file(self._directory, step))))

    def add(self, round_: int, rollouts: Batch, prompts: Sequence[EncodedPrompt], metrics: RewardMetrics) -> None:
        """Add the rollouts of a round, and give them the fact `draw_order`, if the run saves rollouts."""
        if not self._config.save_every:
            return
        if round_ == 0:
            self._draws, self._num_drawn = [], 0
        unknown = sorted(key for key in rollouts.columns.keys() - KEPT if not key.startswith(COMPONENT))
        if unknown:
            log.once(f"files of rollouts have no columns for {', '.join(unknown)}, which a replay will lack")
        rollouts.facts[ORDER] = torch.arange(self._num_drawn, self._num_drawn + rollouts.size, dtype=torch.int32)
        self._num_drawn += rollouts.size
        if len(rollouts.numbers):
            self._draws.append(Draw(round_, rollouts.local, prompts, metrics.scores))

    def write(self, step: int, learned: Batch, newest_version: int, line: LoggedStep | None = None) -> None:
        """Write the rollouts of a step, if they are due, and then its line of the log, if it has one. Collective.

        Args:
            step: The step.
            learned: The rollouts that it learns from, with `draw_order` and, if the loss reads them, `advantages`. Only
                the advantages are gathered on rank 0, which has the rest.
            newest_version: The version of the policy's weights.
            line: The line of the log of an asynchronous step.
        """
        if not self._config.save_every or step % self._config.save_every:
            return
        if "advantages" not in learned:
            orders, advantages = torch.zeros(0), torch.zeros(0)
        else:
            orders = learned.facts[ORDER][learned.homes == 0]
            advantages = learned.gather_at_homes(["advantages"])["advantages"]
        advantages_by_order = dict(zip(orders.tolist(), advantages, strict=False))  # empty on ranks other than 0
        path = rollout_file(self._directory, step)
        failure = self._ranks.try_on_rank0(
            lambda: write_rows(path, self._build_rows(step, advantages_by_order, newest_version))
        )
        if failure is not None:
            raise SaveFailed(f"{path} cannot be written: {failure}; free space, or set rollout.save_every=0")
        if line is not None:
            self._change_log(lambda: self.log.append(line))

    def forget_steps(self, after: int) -> None:
        """Remove from the log the steps after `after`, the step to which the run rolled back. Collective."""
        self._change_log(lambda: self.log.forget(after))

    def _change_log(self, change: Callable[[], None]) -> None:
        failure = self._ranks.try_on_rank0(change)
        if failure is not None:
            raise SaveFailed(f"the log of rollouts in {self._directory} cannot be written: {failure}")

    def _build_rows(self, step: int, advantages: Mapping[int, Tensor], newest_version: int) -> list[dict]:
        written: list[dict] = []
        num_earlier = 0
        for draw in self._draws:
            draw_advantages = {
                order - num_earlier: values for order, values in advantages.items() if order >= num_earlier
            }
            new = build_rows(
                step, draw, self._tokenizer, samples_per_prompt=self._samples_per_prompt,
                newest_version=newest_version, advantages=draw_advantages,
            )  # fmt: skip
            most = self._config.save_prompts
            written += [row for row in new if most is None or row["group"] < most]
            num_earlier += draw.rollouts.size
        return written
