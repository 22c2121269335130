"""Report the progress of decoding sequences."""

from __future__ import annotations

import time
from collections.abc import Callable

from rl_megatron import log

_SECONDS_BETWEEN = 0.25  # the least time between two reports, because counting generated tokens waits for the device


class DecodingProgress:
    """The progress of one call that generates sequences, batch by batch. It owns the number of generated sequences.

    A running sequence counts by its generated share (see `Decoder.sum_shares`), so that the number also grows within a
    batch. A rank without a watcher (`log.watch_progress`) leaves the shares out: computing them waits for the device.
    """

    def __init__(self, total: int, share: int = 1, clock: Callable[[], float] = time.monotonic):
        """Begin with 0 of the `total` sequences of all ranks.

        `share` is the number of ranks that generate equal parts. The total progress is estimated from this rank's.
        """
        self._total, self._share, self._clock = total, share, clock
        self._ended, self._next = 0, clock()

    def update(self, ended: int, shares: Callable[[], float], running: int) -> None:
        """Report how many sequences have ended and how many are running, unless the last report was just before.

        `shares` returns the sum of the running sequences' generated shares; see `Decoder.sum_shares`.
        """
        if self._clock() >= self._next:
            self._report(int(ended + shares()) if log.has_watcher() else ended, f"{running} running")
            self._next = self._clock() + _SECONDS_BETWEEN

    def finish_batch(self, sequences: int) -> None:
        """Report that all sequences of a batch were generated."""
        self._ended += sequences
        self._report(self._ended)

    def _report(self, done: int, detail: str = "") -> None:
        log.report_progress(min(done * self._share, self._total), self._total, "sequences", detail)
