"""Report how far the decoding of sequences is."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from rl_megatron import log

_SECONDS_BETWEEN = 0.25  # because counting the ended sequences waits for the device


class DecodingProgress:
    """The progress of one call that generates sequences, batch by batch. It owns the number that were generated.

    A sequence that goes on counts as the share of its tokens that it has, so that the number also grows within a batch.
    Nothing is counted on a rank where nobody watches (`log.watch_progress`).
    """

    def __init__(self, total: int, share: int = 1, clock: Callable[[], float] = time.monotonic):
        """Begin at none of `total` sequences.

        Args:
            total: The sequences of all ranks.
            share: The number of ranks that generate them in equal parts. This rank's count stands for all.
            clock: Returns seconds.
        """
        self._total, self._share, self._clock = total, share, clock
        self._ended, self._next = 0, clock()

    def token_added(self, token: int, max_tokens: int, running: Tensor) -> None:
        """Report after a token was added to each sequence of a batch, unless that was done just before.

        Args:
            token: How many tokens the batch's longest completion has.
            max_tokens: How many it may have.
            running: [b] bool, which sequences go on.
        """
        if log.is_watched() and self._clock() >= self._next:
            going_on = int(running.sum())
            ended = len(running) - going_on
            self._report(self._ended + ended + going_on * token // max_tokens, f"token {token}/{max_tokens}")
            self._next = self._clock() + _SECONDS_BETWEEN

    def batch_ended(self, sequences: int) -> None:
        """Report that all sequences of a batch were generated."""
        self._ended += sequences
        if log.is_watched():
            self._report(self._ended)

    def _report(self, done: int, detail: str = "") -> None:
        log.report_progress(min(done * self._share, self._total), self._total, "sequences", detail)
