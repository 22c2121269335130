"""The requests that the embedded engine was given, on the policy's rank 0, which any thread may add to."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rl_megatron.generation.interfaces import Completion, Request
from rl_megatron.generation.ongoing import Ongoing


@dataclass(frozen=True)
class Orders:
    """What all ranks do next.

    Attributes:
        added: The new sequences, and for each the number of the model replica that decodes it.
        aborted: The ids of requests that end now.
        ends: Whether the ranks stop decoding, and give back what has not ended.
    """

    added: tuple[tuple[int, Ongoing], ...]
    aborted: frozenset[str]
    ends: bool


class RequestQueue:
    """All requests without a completion. It owns their futures, and remembers which ones ranks are decoding.

    Requests are given out in the order of their ids, so that the order in which they arrive changes nothing.
    """

    def __init__(self, num_replicas: int):
        self._changed = threading.Condition()
        self._waiting: dict[str, Ongoing] = {}
        self._futures: dict[str, Future[Completion]] = {}
        self._replica_of: dict[str, int] = {}  # of the requests that are being decoded
        self._num_replicas = num_replicas
        self._aborted: set[str] = set()
        self._paused = False

    def put(self, request: Request) -> Future[Completion]:
        """Add a request, and return the future of its completion.

        Raises:
            ValueError: Another request without a completion has this id.
        """
        with self._changed:
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} belongs to a request that has no completion yet")
            future: Future[Completion] = Future()
            future.set_running_or_notify_cancel()  # a request ends by `abort`, and not by cancelling its future
            self._futures[request.request_id], self._waiting[request.request_id] = future, Ongoing(request)
            self._changed.notify_all()
            return future

    def pause(self, abort: bool) -> None:
        """Let the ranks stop decoding, and with `abort` end all requests that have begun."""
        with self._changed:
            self._paused = True
            if abort:
                begun = [request_id for request_id, sequence in self._waiting.items() if sequence.ids]
                self._abort([*begun, *self._replica_of])
            self._changed.notify_all()

    def resume(self) -> None:
        """Let the ranks decode again."""
        with self._changed:
            self._paused = False

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests, or all, with the tokens that they have."""
        with self._changed:
            self._abort(list(self._futures) if request_ids is None else request_ids)
            self._changed.notify_all()

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._replica_of:
                self._aborted.add(request_id)
            elif request_id in self._waiting:
                self._futures.pop(request_id).set_result(self._waiting.pop(request_id).completion("abort"))

    def orders(self, until: Future | None, timeout_seconds: float) -> Orders:
        """Return what the ranks do next. If there is nothing to do, wait for a change first.

        Args:
            until: Decoding does not end for lack of requests before this future is done.
            timeout_seconds: How long to wait at most.
        """
        with self._changed:
            if not self._has_work(until):
                self._changed.wait(timeout_seconds)
            idle = not (self._waiting or self._replica_of)
            ends = self._paused or (idle and (until is None or until.done()))
            aborted, self._aborted = frozenset(self._aborted), set()
            return Orders(() if ends else tuple(self._give_out()), aborted, ends)

    def notify(self, _: object = None) -> None:
        """Let `orders` look again for something to do."""
        with self._changed:
            self._changed.notify_all()

    def _has_work(self, until: Future | None) -> bool:
        return bool(self._paused or self._waiting or self._replica_of or until is None or until.done())

    def _give_out(self) -> Iterable[tuple[int, Ongoing]]:
        """Yield the waiting sequences in the order of their ids, each to the replica that has the fewest."""
        load = [0] * self._num_replicas
        for replica in self._replica_of.values():
            load[replica] += 1
        for request_id in sorted(self._waiting):
            replica = load.index(min(load))
            load[replica] += 1
            self._replica_of[request_id] = replica
            yield replica, self._waiting.pop(request_id)

    def settle(self, ended: Iterable[Completion], unfinished: Iterable[Ongoing]) -> None:
        """Answer the requests that ended, and take back the sequences that did not."""
        with self._changed:
            for completion in ended:
                self._replica_of.pop(completion.request_id)
                self._futures.pop(completion.request_id).set_result(completion)
            for sequence in unfinished:
                self._replica_of.pop(sequence.request.request_id)
                self._waiting[sequence.request.request_id] = sequence

    def fail(self, error: Exception) -> None:
        """Let every request fail with this error."""
        with self._changed:
            for future in self._futures.values():
                future.set_exception(error)
            self._futures, self._waiting, self._replica_of = {}, {}, {}
