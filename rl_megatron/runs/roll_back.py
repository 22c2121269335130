"""`RollBack`: after a loss or norm that is not finite, a stage returns to a checkpoint and skips the batches since.

The steps up to the failure would only repeat themselves, because they depend on nothing but the checkpoint and the
batches. So the stage continues with the batches after the failed one (Chowdhery et al. 2022, arXiv:2204.02311, section
5.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from rl_megatron import log
from rl_megatron.checkpoint.directory import find_checkpoints, read_manifest_alone
from rl_megatron.config.train import TrainConfig
from rl_megatron.training.metrics import NonFiniteLoss

_T = TypeVar("_T")


class RollBack:
    """The roll-backs of one stage. All ranks roll back together, because every rank gets the same error.

    Attributes:
        step: The step that the stage is in.
        batches_skipped: The number of batches that are left out. Checkpoints keep it, so that a resumed stage leaves
            out the same batches.
    """

    def __init__(self) -> None:
        self.step = self.batches_skipped = 0
        self._target, self._count = -1, 0

    def state_dict(self) -> dict[str, int]:
        return {"batches_skipped": self.batches_skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a checkpoint. Batches that were left out after it was written are still left out."""
        self.batches_skipped = max(self.batches_skipped, state["batches_skipped"])

    def begin(self, error: NonFiniteLoss, train: TrainConfig, checkpoints: Path) -> None:
        """Leave out the batches since the newest checkpoint; the caller runs the stage again from it.

        NonFiniteLoss is raised again if the stage does not roll back, has no checkpoint yet, or has gone back to it too
        often.
        """
        if train.on_nonfinite != "roll_back":
            raise error
        saved = find_checkpoints(checkpoints)
        if not saved:
            raise NonFiniteLoss(f"{error}; train.on_nonfinite=roll_back has no checkpoint of the stage to go back to")
        target = read_manifest_alone(saved[-1])["step"]
        self._count = self._count + 1 if target == self._target else 1
        self._target = target
        if self._count > train.max_nonfinite_steps:
            raise NonFiniteLoss(
                f"{error}; the stage has gone back to step {target} {train.max_nonfinite_steps} times already "
                "(train.max_nonfinite_steps)"
            )
        self.batches_skipped += self.step - target
        log.LOGGER.warning(
            "%s; going back to step %d, and continuing with the batches after the failed one (%d of at most %d times)",
            *(error, target, self._count, train.max_nonfinite_steps),
        )


def run_with_roll_backs(run_stage: Callable[[RollBack], _T], train: TrainConfig, checkpoints: Path) -> _T:
    """Run a stage, and run it again from its newest checkpoint whenever it rolls back.

    `run_stage` builds the stage's models and runs it from its newest checkpoint, or from its beginning if it has none.
    """
    roll_back = RollBack()
    while True:
        try:
            return run_stage(roll_back)
        except NonFiniteLoss as error:
            roll_back.begin(error, train, checkpoints)
