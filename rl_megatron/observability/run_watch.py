"""`RunWatch`: threads that send a rank's heartbeats, notice other ranks' failures and, on ranks 0 and 1, hangs."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from rl_megatron import log
from rl_megatron.observability.failures import FailureFile, FirstFailure, describe_failure, record_failure
from rl_megatron.observability.liveness import Heartbeat, Position, format_stacks
from rl_megatron.observability.watchdog import Diagnosis, Watchdog
from rl_megatron.topology.job_store import launcher_has_store

_LONGEST_INTERVAL = 5.0  # seconds between two heartbeats
_INTERVALS_PER_LIMIT = 8
_INTERVALS_TO_REPORT = 3  # a hang is detected this many intervals before the limit, to leave time for its report
_SECONDS_TO_REPORT = 10.0  # how much longer than `seconds_to_end` a rank waits for the store
_SECONDS_AFTER_A_LOSS = 5.0  # how long rank 0 keeps the store for the other ranks if a rank was lost
_TRACEBACK = "the traceback"


class RunWatch:
    """The watch of one run on this rank. It owns the rank's position, the threads, and their connections to the store.

    The first thread writes heartbeats and, on ranks 0 and 1, reads those of all ranks. It blocks if the store does not
    answer. A second thread on one of these two ranks detects this.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        limit: float,
        timeout_minutes: float,
        file: FailureFile,
        seconds_to_end: float = 30.0,
    ):
        """Prepare the watch.

        Args:
            store: The store of the ranks' rendezvous; None disables the watch.
            rank: This rank.
            world_size: The number of ranks.
            limit: `train.hang_report_seconds`; 0 disables the watch.
            timeout_minutes: `train.collective_timeout_minutes`.
            file: Where reports are written.
            seconds_to_end: How long a rank may still run after another rank failed.
        """
        self.position, self.file = Position(), file
        self._rank, self._world_size, self._timeout_minutes = rank, world_size, timeout_minutes
        self._store, self._limit, self._seconds_to_end = store, limit, seconds_to_end
        self._interval = min(_LONGEST_INTERVAL, limit / _INTERVALS_PER_LIMIT)
        self._silence = limit - _INTERVALS_TO_REPORT * self._interval
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ticks = 0
        self._watchdog: Watchdog | None = None
        self._own_failure: dict[str, object] | None = None
        self._others_failed_at: float | None = None
        self._has_reported, self._knows_of_failure = False, False

    def __enter__(self) -> RunWatch:
        log.follow_progress(self.position.update_progress)
        if self._store is not None and self._limit > 0:
            self._threads = [threading.Thread(target=self._run, name="heartbeat", daemon=True)]
            if self._rank < 2 and self._world_size > 1 and (launcher_has_store() == (self._rank == 0)):
                self._threads.append(threading.Thread(target=self._watch_store, name="store watch", daemon=True))
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        log.unfollow_progress(self.position.update_progress)
        self._end_threads()

    def _end_threads(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * self._interval)  # a limit, because the thread may wait for a store that has ended

    def begin_writing(self) -> None:
        """Let reports be written to the output directory, which belongs to this run from now on."""
        self.file.begin(self._rank == 0)

    def report_error(self, error: BaseException, on_all_ranks: bool) -> None:
        """Report the error that ends this rank, unless another rank's failure has caused it.

        If all ranks raise the error, only rank 0 prints it.
        """
        failure = record_failure(error, self._rank, self.position.place, on_all_ranks)
        self._own_failure = failure
        self._end_threads()  # torch prints a stack trace if a thread uses a store whose process has ended
        if self._store is None or self._world_size == 1:
            written = self.file.write(failure, _TRACEBACK)
            if self._world_size > 1 and not on_all_ranks:  # without a store, no rank knows who failed first
                self._print(failure, written)
            return
        recording = threading.Thread(target=self._record, args=(failure,), daemon=True)
        recording.start()
        recording.join(self._seconds_to_end + _SECONDS_TO_REPORT)  # the store may have ended, or hang

    def _record(self, failure: dict[str, Any]) -> None:
        """Record the failure in the store. The first rank that fails waits until rank 0 has reported the failure."""
        if self._knows_of_failure:
            return  # this rank has told rank 0 that it knows of the first failure, so the store may have ended
        try:
            shared = FirstFailure(self._store.clone())
            first = shared.record(failure)
            if self._rank == 0:
                self._report_failure(shared, first)
                if not (failure["on_all_ranks"] or launcher_has_store()):
                    self._keep_store(shared, first)
                return
            if first["rank"] == self._rank and not failure["on_all_ranks"]:
                self._wait_for_report(shared)
            shared.count_informed()
        except RuntimeError as error:
            self._report_without_store(failure, error)

    def _keep_store(self, shared: FirstFailure, first: dict[str, Any]) -> None:
        """Keep rank 0, which holds the store, running until the others have read the first failure or time is up."""
        ends_at = time.monotonic() + {"error": self._seconds_to_end, "lost": _SECONDS_AFTER_A_LOSS}[first["kind"]]
        while shared.count_informed(0) < self._world_size - 1 and time.monotonic() < ends_at:
            time.sleep(0.05)

    def _wait_for_report(self, shared: FirstFailure) -> None:
        """Wait for rank 0 to report this rank's failure; if it does not in time, report the failure on this rank."""
        assert self._own_failure is not None, "it was recorded"
        ends_at = time.monotonic() + (self._interval + 2.0 if self._threads else 0.0)
        while not shared.has_been_reported():
            if time.monotonic() > ends_at:
                self._report_failure(shared, self._own_failure)
                return
            time.sleep(0.05)
        log.error(self._own_failure["message"])  # rank 0 has printed the message; this only tells the launcher

    def _report_failure(self, shared: FirstFailure, first: dict[str, Any]) -> None:
        """Write failure.json and print the failure, unless it has been reported."""
        with self._lock:
            if self._has_reported or shared.has_been_reported():
                return
            self._has_reported = True
            written = self.file.write(first, _TRACEBACK)
            if not first["on_all_ranks"] or self._own_failure is None:
                self._print(first, written)
            shared.mark_reported()

    def _print(self, first: dict[str, Any], written: str) -> None:
        text = describe_failure(first, written)
        log.error(text)
        if self._rank != 0:
            print("error:", text, file=sys.stderr, flush=True)
        if not self.file.path.is_file() and not first["disk_is_full"]:
            print("\n".join(first["traceback"]), file=sys.stderr, flush=True)

    def _report_without_store(self, failure: dict[str, Any], error: RuntimeError) -> None:
        """Report a failure if the store cannot be read, because its process has ended."""
        holder = "the launcher" if launcher_has_store() else "rank 0"
        failure = failure | {"message": f"{failure['message']}; the store of {holder} at {_find_store()}: {error}"}
        if self._rank == (0 if launcher_has_store() else 1) and self._others_failed_at is None:
            self._print(failure, self.file.write(failure, _TRACEBACK))

    def _run(self) -> None:
        """Write heartbeats until the run ends."""
        longest_interval, last = 2 * self._interval, time.monotonic()
        try:
            store = self._store.clone()
            heartbeat = Heartbeat(store, self._rank, self.position, longest_interval)
            if self._rank < 2:
                self._watchdog = Watchdog(
                    store, self._rank, self._world_size, self._silence, longest_interval, self.file,
                    self._timeout_minutes, log.LOGGER.error,
                )  # fmt: skip
            failures = FirstFailure(store)
            heartbeat.send(0.0)
            while not self._stop.wait(self._interval):
                now = time.monotonic()
                elapsed, last = now - last, now
                heartbeat.send(elapsed)
                heartbeat.send_requested_stacks()
                if self._watchdog is not None and self._others_failed_at is None:
                    self._watchdog.tick(elapsed)
                self._check_first_failure(failures)
                if self._rank != 0 and self._others_failed_at is not None and self._own_failure is None:
                    self._knows_of_failure = True
                    failures.count_informed()  # then rank 0 may end, which frees a rank that waits for it
                    self._end_in_time()
                    return
                self._ticks += 1
            heartbeat.send(0.0, has_ended=True)
        except RuntimeError as error:
            if not self._stop.is_set() and self._own_failure is None:
                log.LOGGER.warning(
                    "the heartbeat has ended, because the job's store at %s fails: %s", _find_store(), error
                )

    def _check_first_failure(self, failures: FirstFailure) -> None:
        """Report another rank's failure on rank 0, and end this process if its main thread does not end in time."""
        first = failures.get()
        if first is None:
            return
        now = time.monotonic()
        if self._others_failed_at is None:
            self._others_failed_at = now
        patience = 2 * self._interval if first["on_all_ranks"] else 0.0  # rank 0 raises such an error itself
        if self._rank == 0 and self._own_failure is None and now - self._others_failed_at >= patience:
            self._report_failure(failures, first)
        if self._own_failure is None and now - self._others_failed_at > self._seconds_to_end:
            _end_process()

    def _end_in_time(self) -> None:
        """Give the main thread `seconds_to_end` to end, and then end this process; do not use the store."""
        if not self._stop.wait(self._seconds_to_end):
            _end_process()

    def _watch_store(self) -> None:
        """Report that the store does not answer when the first thread is stuck for as long as a rank may be silent."""
        ticks, silent, last = -1, 0.0, time.monotonic()
        while not self._stop.wait(self._interval) and self._others_failed_at is None:
            now = time.monotonic()
            elapsed, last = now - last, now
            if ticks != self._ticks:
                if silent > self._silence and self._watchdog is not None:
                    self._watchdog.report_end()
                ticks, silent = self._ticks, 0.0
                continue
            previous, silent = silent, silent + min(elapsed, 2 * self._interval)
            if previous <= self._silence < silent and self._watchdog is not None:
                self._report_store_hang(self._watchdog, silent)

    def _report_store_hang(self, watchdog: Watchdog, seconds: float) -> None:
        reason = (
            f"has not answered for {seconds:.0f} s (it holds the job's store at {_find_store()}, so the rest is what "
            "the ranks wrote before)"
        )
        if launcher_has_store():
            diagnosis = Diagnosis(None, seconds, f"the launcher on the first node {reason}")
        else:
            diagnosis = Diagnosis(0, seconds, reason)
        watchdog.report(diagnosis, [{"ranks": [self._rank], "stack": format_stacks().splitlines()}])


def _end_process() -> None:
    """End this process, whose main thread waits in a collective for a rank that has ended."""
    sys.stderr.flush()
    os._exit(1)


def _find_store() -> str:
    return f"{os.environ.get('MASTER_ADDR', 'this process')}:{os.environ.get('MASTER_PORT', '')}"
