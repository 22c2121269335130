"""Signals that ask a run to end early. The run finishes its step and saves before it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from rl_megatron import log

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_SIGNAL_SECONDS = 2.0  # signals within this time count as one: terminal and launcher may both send it


class StopSignals:
    """The first stop signal that this process receives; a second one ends the process at once.

    It is a context manager that handles `SIGNALS` during its block. Python allows handlers only in the main thread; in
    another thread, the context changes nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # it came from signal.signal
        self._handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        if self.received is None:
            self.received, self._at = name, time.monotonic()
            if log.is_main_rank():
                log.LOGGER.warning(
                    "%s: the run saves after this step and ends; a second signal ends it at once", name.name
                )
        elif time.monotonic() - self._at > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
