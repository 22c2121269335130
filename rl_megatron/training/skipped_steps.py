"""`SkippedSteps`: what a policy does with an optimizer step whose loss or gradient norm is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rl_megatron import log
from rl_megatron.training.metrics import NonFiniteLoss


class SkippedSteps:
    """The rule for optimizer steps whose loss or gradient norm is NaN or infinite: fail, or skip so many in a row.

    All ranks raise `NonFiniteLoss` for the same step, so all of them skip it. It owns the number of steps that were
    skipped since the last update.
    """

    def __init__(self, allowed: int):
        """Start without a skipped step.

        Args:
            allowed: The number of steps in a row that may be skipped; 0 if none may be.
        """
        self._allowed, self._consecutive = allowed, 0

    def take(self, step: Callable[[], dict[str, float]], lr: float) -> dict[str, float]:
        """Return the report of `step`, or that of a skipped step.

        Args:
            step: Takes the optimizer step, and returns its metrics.
            lr: The learning rate, which a skipped step leaves as it is.

        Raises:
            NonFiniteLoss: The step failed, and no further step in a row may be skipped.
        """
        try:
            report = step()
        except NonFiniteLoss as error:
            if self._allowed == 0:
                raise
            if self._consecutive == self._allowed:
                raise NonFiniteLoss(
                    f"{error}; the {self._allowed} optimizer steps before were skipped for such a reason already "
                    "(train.max_nonfinite_steps)"
                ) from error
            self._consecutive += 1
            log.LOGGER.warning("an optimizer step is skipped, and weights and optimizer state stay: %s", error)
            return {"lr": lr, "updated": 0.0, "skipped_steps": 1.0}
        if report["updated"]:
            self._consecutive = 0
        return report | ({"skipped_steps": 0.0} if self._allowed else {})


def counts(reports: Sequence[dict[str, float]]) -> dict[str, int]:
    """Return the metrics of several optimizer steps that are numbers of steps."""
    found = {"num_updates": int(sum(report["updated"] for report in reports))}
    if any("skipped_steps" in report for report in reports):
        found["skipped_steps"] = int(sum(report["skipped_steps"] for report in reports))
    return found
