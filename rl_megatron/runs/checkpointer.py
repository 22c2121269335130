"""`Checkpointer` begins the checkpoints of a stage, completes them when they are written, and deletes older ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_megatron import disk, log
from rl_megatron.checkpoint.directory import find_checkpoints
from rl_megatron.checkpoint.exports import Exporter
from rl_megatron.checkpoint.retention import delete_older
from rl_megatron.checkpoint.save import Save, SaveFailed
from rl_megatron.config.train import TrainConfig
from rl_megatron.training.megatron_policy import MegatronPolicy


def critic_checkpoints(checkpoints: Path) -> Path:
    """Return the directory of the critic's checkpoints, next to the policy's. A step has the same name in both."""
    return checkpoints.with_name(f"{checkpoints.name}.critic")


class Checkpointer:
    """The saves of a stage's policy and of its critic, if it has one. It owns the save and the export in progress.

    Every rank calls every method. With `train.async_save`, a save is written while training continues. It is completed
    by the first call of `poll` after it has been written, or before the next save begins. The critic's save is
    completed first, so that every checkpoint of the policy has its critic's checkpoint.

    With `train.export_hf`, rank 0 then exports the policy's checkpoint, also while training continues. The next save
    waits for the export, so that the checkpoint is not deleted while it is read.
    """

    def __init__(
        self,
        checkpoints: Path,
        train: TrainConfig,
        policy: MegatronPolicy,
        critic: MegatronPolicy | None,
        record_save: Callable[[float], object] = lambda seconds: None,
        finish_writing: Callable[[], object] = lambda: None,
    ):
        """Prepare the saves of a stage.

        Args:
            checkpoints: The directory of the policy's checkpoints.
            train: The section `train`.
            policy: The stage's policy.
            critic: Its critic, or None if it has none.
            record_save: Called with the seconds of each save, from its beginning until it is complete.
            finish_writing: Called on rank 0 before each save. If it raises OSError, the save fails, so that no
                checkpoint lacks the metrics of its steps.
        """
        self._directory, self._train, self._record_save, self._began = checkpoints, train, record_save, 0.0
        self._finish_writing, self._ranks = finish_writing, policy.topology.ranks
        self._models = [(policy, checkpoints)]
        self._companions: Path | None = None
        if critic is not None:
            self._companions = critic_checkpoints(checkpoints)
            self._models.insert(0, (critic, self._companions))
        self._under_way: list[Save] = []
        self.exporter = Exporter(checkpoints, self._ranks, train.export_hf)

    def save(self, step: int, last: bool, **kept: object) -> bool:
        """Begin the checkpoint of `step`, after completing the one before.

        The stage's last checkpoint is complete on return; if it fails, SaveFailed is raised on every rank. If another
        save fails, a warning is logged and training continues. `kept` is stored in the checkpoint's manifest.

        Returns:
            Whether the checkpoint is complete, or is being written.
        """
        self.complete()
        self.exporter.wait(must_succeed=False)
        try:
            self._begin(step, kept)
            if last or not self._train.async_save:
                self._complete()
        except SaveFailed as error:
            if last:
                raise
            self._warn(error)
            return False
        if not last and not self._train.async_save:
            self.exporter.wait(must_succeed=False)
        return True

    def poll(self) -> None:
        """Complete the save in progress if it has been written. Collective if there is a save in progress."""
        if self._under_way and all(save.is_written() for save in self._under_way):
            self.complete()

    def complete(self) -> bool:
        """Wait for the save in progress, if there is one, and complete it. Return whether that succeeded."""
        try:
            self._complete()
        except SaveFailed as error:
            self._warn(error)
            return False
        return True

    def _begin(self, step: int, kept: dict[str, Any]) -> None:
        self._began = time.monotonic()
        self.exporter.discard(step)
        failure = self._ranks.try_on_rank0(self._finish_writing, lambda error: disk.describe(error, self._directory))
        if failure is not None:
            raise SaveFailed(
                f"the checkpoint of step {step} was not saved, because metrics are not written: {failure}; free space"
            )
        try:
            for model, directory in self._models:
                self._under_way.append(model.begin_checkpoint(directory, step, **kept))
        except SaveFailed:
            self._abandon()
            raise

    def _complete(self) -> None:
        if not self._under_way:
            return
        failed, checkpoint = None, None
        try:
            while self._under_way:
                checkpoint = self._under_way.pop(0).finish()
        except SaveFailed as error:
            self._abandon()
            failed = error
        self._delete_older()  # also deletes the critic's new checkpoint if the policy's save failed
        if failed is not None:
            raise failed
        self._record_save(time.monotonic() - self._began)
        if checkpoint is not None:
            self.exporter.begin(checkpoint)  # the policy's: the last save of the loop

    def _delete_older(self) -> None:
        keep, best = self._train.keep_checkpoints, self._train.keep_best
        failure = self._ranks.try_on_rank0(lambda: delete_older(self._directory, keep, self._companions, best))
        if failure is not None:
            log.LOGGER.warning("older checkpoints in %s could not be deleted: %s", self._directory, failure)

    def _abandon(self) -> None:
        while self._under_way:
            self._under_way.pop(0).abandon()

    def _warn(self, error: SaveFailed) -> None:
        saved = find_checkpoints(self._directory)
        newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        log.LOGGER.warning("%s; training continues, and %s", error, newest)
