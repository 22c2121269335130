"""The checkpoints of a stage as its steps go by: begun, completed when written, and thinned out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.checkpoint.directory import complete_checkpoints
from rl_megatron.checkpoint.retention import delete_older
from rl_megatron.checkpoint.save import Save, SaveFailed
from rl_megatron.config.schema import TrainConfig
from rl_megatron.policy.megatron_policy import MegatronPolicy
from rl_megatron.topology.collective_errors import on_main_rank


def critic_checkpoints(checkpoints: Path) -> Path:
    """Where the critic's checkpoints stand, beside those of the stage's policy; a step has the same name in both."""
    return checkpoints.with_name(f"{checkpoints.name}.critic")


class Saver:
    """Saves a stage's policy and, where it has one, its critic, one step at a time. Every rank calls every method.

    With `train.async_save` a save is written while training goes on, and completed at the first call of `poll` that
    finds it written, or before the next one. The critic's is completed first, so that a policy's checkpoint always has
    its critic's.
    """

    def __init__(self, checkpoints: Path, train: TrainConfig, policy: MegatronPolicy, critic: MegatronPolicy | None):
        self._directory, self._train = checkpoints, train
        self._companions = None if critic is None else critic_checkpoints(checkpoints)
        self._models = [(policy, checkpoints)]
        if critic is not None:
            self._models.insert(0, (critic, self._companions))
        self._under_way: list[Save] = []

    def save(self, step: int, last: bool, **kept: Any) -> None:
        """Begins the checkpoint of `step`, after completing the one before; the `last` is complete on return.

        Raises: SaveFailed, on every rank, for the last. Others that fail are warned of, and training goes on.
        """
        self.complete()
        try:
            self._begin(step, kept)
            if last or not self._train.async_save:
                self._complete()
        except SaveFailed as error:
            if last:
                raise
            self._warn(error)

    def poll(self) -> None:
        """Completes a save that has been written. Collective where one is under way, and nothing where none is."""
        if self._under_way and all(save.is_written() for save in self._under_way):
            self.complete()

    def complete(self) -> None:
        """Waits for the save that is under way, if one is, and completes it."""
        try:
            self._complete()
        except SaveFailed as error:
            self._warn(error)

    def _begin(self, step: int, kept: dict[str, Any]) -> None:
        try:
            for model, directory in self._models:
                self._under_way.append(model.begin_checkpoint(directory, step, **kept))
        except SaveFailed:
            self._abandon()
            raise

    def _complete(self) -> None:
        if not self._under_way:
            return
        failed = None
        try:
            while self._under_way:
                self._under_way.pop(0).finish()
        except SaveFailed as error:
            self._abandon()
            failed = error
        self._thin_out()  # with its critic's checkpoint, should the policy's have failed
        if failed is not None:
            raise failed

    def _thin_out(self) -> None:
        keep, best = self._train.keep_checkpoints, self._train.keep_best
        failure = on_main_rank(lambda: delete_older(self._directory, keep, self._companions, best))
        if failure is not None:
            log.LOGGER.warning("older checkpoints in %s could not be deleted: %s", self._directory, failure)

    def _abandon(self) -> None:
        while self._under_way:
            self._under_way.pop(0).abandon()

    def _warn(self, error: SaveFailed) -> None:
        saved = complete_checkpoints(self._directory)
        newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        log.LOGGER.warning("%s; training goes on, and %s", error, newest)
