"""Decide on all ranks at once whether a run ends after a step: a signal asked for it, or its time is nearly up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.train import parse_duration
from rl_megatron.runs.step_times import write_step_times
from rl_megatron.runs.stop_signals import StopSignals
from rl_megatron.topology.ranks import Ranks

SLURM_END = "SLURM_JOB_END_TIME"  # environment variable: when SLURM ends the job, in seconds since 1970
_UNMEASURED_SAVE_SECONDS = 60.0  # assumed until a save has been measured
_LEAVING_SECONDS = 30.0  # the time that a job needs to end and to be queued again
_OF_TRAIN, _OF_SLURM = 1001, 1002  # votes for a limit; smaller votes are signal numbers


class RunStopped(Exception):
    """The end of a run that was asked to end early. The same command continues the run.

    `step` of `stage` is the last step that was done, and is saved. `results` are the newest eval metrics and samples of
    the stage; empty if there are none.
    """

    def __init__(self, message: str, stage: str, step: int, results: Mapping[str, object]):
        super().__init__(message)
        self.stage, self.step, self.results = stage, step, results


class Stopping:
    """The time limits of a run, and the signals that it received. All ranks call `reason` at the same points.

    A step is begun only if it can end, and be saved, before the limit. The time needed is estimated as the longest step
    plus the longest save so far.

    Attributes:
        is_save_due: Whether the next step is saved because the last checkpoint is old; the same on all ranks.
    """

    def __init__(
        self,
        signals: StopSignals | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008  # it is frozen
        save_by: str | None = None,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ):
        """Prepare the limits. `clock` returns seconds since 1970; `save_by` is `train.checkpoint_must_save_by`."""
        self._signals, self._ranks, self._clock = signals or StopSignals(), ranks, clock
        self._last_time = clock()
        self._longest_step, self._longest_save, self._has_begun = 0.0, 0.0, False
        self._limits: dict[int, float] = {}
        if save_by is not None:
            self._limits[_OF_TRAIN] = clock() + parse_duration(save_by)
        if environment.get(SLURM_END, "").isdigit():
            self._limits[_OF_SLURM] = float(environment[SLURM_END]) - _LEAVING_SECONDS
        self._save_by = save_by
        self._save_seconds, self._saved_at, self.is_save_due = 0.0, self._last_time, False

    def begin_stage(self, save_every_seconds: float) -> None:
        """Begin a stage that saves a checkpoint after this time; 0: time does not matter."""
        self._save_seconds = save_every_seconds
        self.note_save()

    def note_save(self) -> None:
        """Count the time to the next save from now on."""
        self._saved_at, self.is_save_due = self._clock(), False

    def record_save(self, seconds: float) -> None:
        self._longest_save = max(self._longest_save, seconds)

    def begin_step(self) -> None:
        """Start to time the first step. A step includes its evaluation and its save."""
        self._last_time, self._has_begun = self._clock(), True

    def reason(self) -> str | None:
        """Return why the run has to end now, or None if it may continue. Collective: every rank gets the same answer.

        A limit that leaves no time for a single step is a ConfigError, because the same command would never get
        further.
        """
        now = self._clock()
        self._longest_step = max(self._longest_step, now - self._last_time)
        self._last_time = now
        vote = 0 if self._signals.received is None else int(self._signals.received)
        write_step_times(self._longest_step, self._longest_save)
        needed = self._longest_step + (self._longest_save or _UNMEASURED_SAVE_SECONDS)
        for limit, ends_at in self._limits.items():
            if now + needed > ends_at:
                vote = max(vote, limit)
        is_due = self._save_seconds > 0 and now - self._saved_at >= self._save_seconds
        if self._ranks.size > 1:
            votes = torch.tensor([vote, int(is_due)], device=self._ranks.device)
            dist.all_reduce(votes, dist.ReduceOp.MAX)
            vote, is_due = votes.tolist()
        self.is_save_due = bool(is_due)
        if vote == 0:
            return None
        if vote not in (_OF_TRAIN, _OF_SLURM):
            return f"{signal.Signals(vote).name} was received"
        limit = f"train.checkpoint_must_save_by={self._save_by}" if vote == _OF_TRAIN else "the SLURM job's time limit"
        if not self._has_begun:
            raise ConfigError(
                f"{limit} leaves no time for a step and its save ({needed:.0f} s, of which "
                f"{_UNMEASURED_SAVE_SECONDS:.0f} s are assumed until a save has been measured); set a later one"
            )
        return f"another step and its save may end after {limit}"
