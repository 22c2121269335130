"""`Registry`: the sessions, training runs, samplers and futures of a service, and the order of its operations.

It lives on the event loop of rank 0. Every change that a client relies on is in the journal before it is acknowledged.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rl_megatron import disk, log
from rl_megatron.config.peft import LoraConfig
from rl_megatron.service.journal import Journal, Record, read_journal
from rl_megatron.service.operations import Create, Operation, Outcome, Restore, Sample, Save, Unload
from rl_megatron.service.requests import Refused

_ATTEMPTS = 3  # an operation that was being executed when the server died this often is given up
_SAMPLES_TOGETHER = 256
_GONE = Outcome(b"the training run is not there: it was unloaded, or could not be made", error="user")
_DEADLY = Outcome(b"the server died several times while it executed this request", error="server")
_SECONDS_OF_OUTCOMES = 3600.0  # how long the outcome of a request is kept after it is done


@dataclass
class Session:
    """A client's session.

    Attributes:
        owner: The name of the key that opened it.
        heard: When it was last heard of, by `time.time`.
    """

    owner: str
    details: Mapping[str, Any]
    heard: float


@dataclass(frozen=True)
class Accepted:
    """A request that was accepted: its operation, and the record from which it can be accepted again."""

    operation: Operation
    record: Record


@dataclass
class Run:
    """A training run.

    Attributes:
        owner: The name of the key that owns it.
        session: The session that made it.
        settings: JSON values: its base model and its adapter.
        next_seq: The number of its next request.
        waiting: Requests that came before an earlier one of the same run.
        last_time: When it got its last request.
    """

    owner: str
    session: str
    settings: Mapping[str, Any]
    next_seq: int = 1
    waiting: dict[int, Accepted] = field(default_factory=dict)
    last_time: float = 0.0


@dataclass
class Future:
    """The future of a request.

    Attributes:
        owner: The name of the key that may ask for it.
        record: The record of the request, until it is done.
        outcome: The outcome, once it is done.
        done_at: When it was done.
        done: Set once it is done.
        written: Set once the record is in the journal, or could not be put there.
    """

    owner: str
    record: Record | None
    outcome: Outcome | None = None
    done_at: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    written: asyncio.Event = field(default_factory=asyncio.Event)


class Registry:
    """The state of a service on rank 0. All methods run on one event loop, except `__init__`."""

    def __init__(self, journal: Path, most_pending: int, most_bytes: int, is_exact: bool):
        """Begin without sessions; `recover` reads the journal.

        Args:
            journal: The file of the journal.
            most_pending: How many unfinished requests a key may have.
            most_bytes: How many bytes they may have in all.
            is_exact: Whether the samples of each request are decoded alone.
        """
        self.sessions: dict[str, Session] = {}
        self.runs: dict[str, Run] = {}
        self.samplers: dict[str, tuple[str, str, str | None]] = {}  # (owner, session, directory of the weights)
        self.futures: dict[str, Future] = {}
        self._journal = Journal(journal)
        self._most_pending, self._most_bytes = most_pending, most_bytes
        self._together = 1 if is_exact else _SAMPLES_TOGETHER
        self._lanes: dict[str, dict[str, deque[Accepted]]] = {}  # by owner, then by run or by weights
        self._pending: Counter[str] = Counter()  # the unfinished operations of each key
        self._pending_bytes: Counter[str] = Counter()  # the bytes of their requests
        self._again: deque[Accepted] = deque()  # operations of a killed server, in the order in which it executed them
        self._attempts: dict[str, int] = {}
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._samples_done: dict[str, list[str]] = {}  # by sampler, in the order in which they were done
        self._sampled = asyncio.Event()
        self._is_stopping = False

    # --- requests ---

    async def write(self, record: Record) -> None:
        """Put a record into the journal. It is on the disk when this returns.

        Raises:
            Refused: The disk is full.
        """
        async with self._writing:
            try:
                await asyncio.to_thread(self._journal.append, [record])
            except OSError as error:
                raise Refused(
                    f"the server cannot write its journal ({error.strerror}); try again later", 503
                ) from error

    async def accept(self, owner: str, record: Record) -> bool:
        """Put a request into the journal, and return whether it is new. A repetition waits until the first is there.

        Raises:
            Refused: The disk is full, or the key has too many unfinished requests.
        """
        name = record.header["id"]
        future = self.futures.get(name)
        if future is not None:
            await future.written.wait()
            if self.futures.get(name) is not future or future.owner != owner:
                raise Refused(f"the request {name} could not be accepted; try again", 503)
            return False
        self._refuse_more(owner, len(record.body))
        future = self.futures[name] = Future(owner, record)
        try:
            await self.write(record)
        except BaseException:
            del self.futures[name]
            raise
        finally:
            future.written.set()
        return True

    def _refuse_more(self, owner: str, num_bytes: int) -> None:
        """Refuse a further request of a key that has too many unfinished ones."""
        if self._pending_bytes[owner] + num_bytes > self._most_bytes:
            raise Refused(
                f"this key has unfinished requests of {self._most_bytes} bytes; wait until some are done", 429
            )
        if self._pending[owner] >= self._most_pending:
            raise Refused(f"this key has {self._most_pending} unfinished requests; wait until some are done", 429)

    def add(self, owner: str, accepted: Accepted, seq: int | None) -> None:
        """Append an operation to its queue. Those of a run are executed in the order of their numbers, without gaps."""
        operation = accepted.operation
        future = self.futures.setdefault(operation.request_id, Future(owner, accepted.record))
        future.written.set()
        self._pending[owner] += 1
        self._pending_bytes[owner] += len(accepted.record.body)
        if operation.run is not None and operation.run not in self.runs:
            self._finish(operation.request_id, _GONE)
            return
        if seq is None or operation.run is None:
            work = operation.work
            lane = f"samples of {work.path}" if isinstance(work, Sample) else str(operation.run)
            self._queue(owner, lane, accepted)
            return
        run = self.runs[operation.run]
        run.waiting[seq], run.last_time = accepted, time.time()
        while run.next_seq in run.waiting:
            self._queue(owner, operation.run, run.waiting.pop(run.next_seq))
            run.next_seq += 1

    def _queue(self, owner: str, lane: str, accepted: Accepted) -> None:
        self._lanes.setdefault(owner, {}).setdefault(lane, deque()).append(accepted)
        self._changed.set()

    # --- a new start ---

    def recover(self, accept: Callable[[Record], None]) -> None:
        """Read the journal of a killed server. `accept` accepts a request's record again, as when it came.

        Operations that change runs are executed again, in the order in which they were executed: after the state that
        the journal begins with, they give bitwise the same.
        """
        done: list[str] = []
        for record in read_journal(self._journal.path):
            header, kind = record.header, record.header["kind"]
            if kind == "state":
                self._restore(header)
            elif kind == "session":
                self.sessions[header["id"]] = Session(header["owner"], header["details"], time.time())
            elif kind == "sampler":
                self.samplers[header["id"]] = (header["owner"], header["session"], header["path"])
            elif kind == "request":
                if header["id"] not in self.futures:
                    accept(record)
            elif kind == "began":
                self._attempts[header["id"]] = self._attempts.get(header["id"], 0) + 1
            elif kind == "cancelled":
                self.cancel(header["id"])
            elif kind == "outcome":
                if header.get("owner") is not None:  # of a request before the state
                    self.futures[header["id"]] = Future(header["owner"], None)
                self._finish(header["id"], Outcome(record.body, header["protobuf"], header["error"]))
                done.append(header["id"])
        queued: dict[str, Accepted] = {}
        for lanes in self._lanes.values():
            for queue in lanes.values():
                finished = [one for one in queue if self._is_done(one)]
                queued |= {one.operation.request_id: one for one in finished}
                for one in finished:
                    queue.remove(one)
        self._lanes = {
            owner: kept
            for owner, lanes in self._lanes.items()
            if (kept := {n: queue for n, queue in lanes.items() if queue})
        }
        for name in done:
            accepted, future = queued.pop(name, None), self.futures.get(name)
            failed = future is None or future.outcome is None or future.outcome.error is not None
            # What was saved is on the disk, and what failed has changed nothing.
            if accepted is not None and not failed and not isinstance(accepted.operation.work, (Sample, Save)):
                self._again.append(accepted)
        if repeated := sum(bool(accepted.record.header) for accepted in self._again):
            log.LOGGER.info("%d operations since the last kept state are executed again", repeated)

    @property
    def is_replaying(self) -> bool:
        """Return whether operations of a killed server are still to be executed again."""
        return bool(self._again)

    def _is_done(self, accepted: Accepted) -> bool:
        future = self.futures.get(accepted.operation.request_id)
        return future is None or future.outcome is not None

    def _restore(self, header: Mapping[str, Any]) -> None:
        now = time.time()
        for name, values in header["sessions"].items():
            self.sessions[name] = Session(values["owner"], values["details"], now)
        for name, (owner, session, path) in header["samplers"].items():
            self.samplers[name] = (owner, session, path)
        for name, values in header["runs"].items():
            self.runs[name] = Run(values["owner"], values["session"], values["settings"], values["next_seq"])
            config = TypeAdapter(LoraConfig).validate_python(values["settings"]["peft"])
            work = Restore(config, f"{header['path']}/{name}")
            self._again.append(Accepted(Operation(f"restore {name}", name, work), Record({})))

    async def keep(self, path: Path) -> None:
        """Replace the journal by one that begins with the states of all runs, which `Keep` has written to `path`.

        Every operation that was executed is in the states. Futures that were done more than an hour ago are dropped.
        """
        async with self._writing:
            now = time.time()
            pending = [
                future.record
                for future in self.futures.values()
                if future.record is not None and future.written.is_set()
            ]
            self.futures = {
                name: future
                for name, future in self.futures.items()
                if future.outcome is None or now - future.done_at < _SECONDS_OF_OUTCOMES
            }
            first: dict[str, int] = {}
            for record in pending:
                run, seq = record.header.get("run"), record.header.get("seq")
                if run is not None and seq is not None:
                    first[run] = min(seq, first.get(run, seq))
            state = {
                "kind": "state", "path": str(path),
                "sessions": {n: {"owner": s.owner, "details": s.details} for n, s in self.sessions.items()},
                "samplers": dict(self.samplers),
                "runs": {
                    name: {
                        "owner": run.owner, "session": run.session, "settings": run.settings,
                        "next_seq": min(first.get(name, run.next_seq), run.next_seq),
                    }
                    for name, run in self.runs.items() if first.get(name) != 0
                },
            }  # fmt: skip
            outcomes = [
                Record(
                    {"kind": "outcome", "id": name, "owner": future.owner, "error": future.outcome.error,
                     "protobuf": future.outcome.is_protobuf},
                    future.outcome.body,
                )
                for name, future in self.futures.items() if future.outcome is not None
            ]  # fmt: skip
            await asyncio.to_thread(self._replace_journal, [Record(state), *outcomes, *pending])

    def _replace_journal(self, records: Iterable[Record]) -> None:
        path, partial = self._journal.path, self._journal.path.with_suffix(".incomplete")
        partial.unlink(missing_ok=True)
        new = Journal(partial)
        new.append(records)
        partial.replace(path)
        disk.sync_directory(path.parent)
        self._journal.close()
        self._journal, new.path = new, path

    # --- execution ---

    async def next_operations(self) -> Sequence[Operation] | None:
        """Return the next operation, or samples with the same weights; None when the service stops.

        Keys take turns, and so do the runs of a key.
        """
        while not self._is_stopping:
            if self._again:
                return [self._again.popleft().operation]
            if chosen := self._choose():
                if operations := await self._begin(chosen):
                    return operations
                continue
            self._changed.clear()
            await self._changed.wait()
        return None

    def _choose(self) -> list[Accepted]:
        for owner in list(self._lanes):
            lanes = self._lanes.pop(owner)
            for lane in list(lanes):
                queue = lanes.pop(lane)
                chosen = self._take(queue)
                if queue:
                    lanes[lane] = queue  # at the end: the other lanes are first
                if lanes:
                    self._lanes[owner] = lanes
                return chosen
        return []

    def _take(self, queue: deque[Accepted]) -> list[Accepted]:
        chosen, samples = [queue.popleft()], 0
        while queue and isinstance(chosen[0].operation.work, Sample):
            if any(one.operation.request_id in self._attempts for one in (chosen[0], queue[0])):
                break  # the server may have died of it, so it is executed alone
            samples += sum(work.prompt.num_samples for work in [chosen[-1].operation.work] if isinstance(work, Sample))
            if samples >= self._together:
                break
            chosen.append(queue.popleft())
        return chosen

    async def _begin(self, chosen: Sequence[Accepted]) -> list[Operation]:
        """Return the operations without those that are done already, were cancelled or have been tried too often."""
        operations, records, given_up = [], [], []
        for accepted in chosen:
            name = accepted.operation.request_id
            future = self.futures.get(name)
            if future is None or future.outcome is not None:
                continue
            self._attempts[name] = self._attempts.get(name, 0) + 1
            if self._attempts[name] > _ATTEMPTS:
                log.LOGGER.warning("request %s is given up: the server died while it executed it", name)
                given_up.append(accepted.operation)
            else:
                records.append(Record({"kind": "began", "id": name}))
                operations.append(accepted.operation)
        async with self._writing:
            await asyncio.to_thread(self._journal.append, records, False)
        await self.finish(given_up, [_DEADLY] * len(given_up))
        return operations

    async def finish(self, operations: Sequence[Operation], outcomes: Sequence[Outcome]) -> None:
        """Give operations their outcomes. Those of samples are on the disk first: they may not come again bitwise."""
        names = [operation.request_id for operation in operations]
        records = [
            Record(
                {"kind": "outcome", "id": name, "error": outcome.error, "protobuf": outcome.is_protobuf}, outcome.body
            )
            for name, outcome in zip(names, outcomes, strict=True)
        ]
        are_samples = any(isinstance(operation.work, Sample) for operation in operations)
        async with self._writing:
            await asyncio.to_thread(self._journal.append, records, are_samples)
        for operation, outcome in zip(operations, outcomes, strict=True):
            self._finish(operation.request_id, outcome)
            is_gone = isinstance(operation.work, Unload) or (isinstance(operation.work, Create) and outcome.error)
            if is_gone and operation.run is not None:
                self._forget_run(operation.run)

    def has_unfinished(self, run: str) -> bool:
        """Return whether a run has unfinished requests."""
        return any(
            future.record is not None and future.record.header.get("run") == run for future in self.futures.values()
        )

    def _forget_run(self, name: str) -> None:
        """Forget a run that is gone. Its further requests fail."""
        self.runs.pop(name, None)
        for request, future in list(self.futures.items()):
            if future.record is not None and future.record.header.get("run") == name:
                self._finish(request, _GONE)

    def _finish(self, name: str, outcome: Outcome) -> None:
        self._attempts.pop(name, None)
        if (future := self.futures.get(name)) is None:
            return  # it was cancelled
        if future.outcome is None:
            self._uncount(future)
            future.outcome, future.done_at, future.record = outcome, time.time(), None
        future.done.set()
        sampler = name.rpartition(":")[0]
        if sampler in self.samplers:
            self._samples_done.setdefault(sampler, []).append(name)
            self._sampled.set()

    async def wait_for_samples(self, sampler: str, clone: int, cursor: int, until: float) -> dict[str, Any]:
        """Return which requests of a sampler's clone are done since `cursor`; wait until then, or the time `until`."""
        loop = asyncio.get_running_loop()
        while True:
            done = self._samples_done.get(sampler, [])
            chosen = [name for name in done[cursor:] if _get_clone(name) == clone]
            left = until - loop.time()
            if chosen or left <= 0:
                return {"completions": [self._describe_done(name) for name in chosen], "cursor": max(cursor, len(done))}
            self._sampled.clear()
            try:
                await asyncio.wait_for(self._sampled.wait(), left)
            except TimeoutError:
                continue

    def _describe_done(self, name: str) -> dict[str, Any]:
        outcome = self.futures[name].outcome if name in self.futures else None
        failed = outcome is None or outcome.error is not None
        return {"state": "failed" if failed else "finished", "request_id": name}

    def cancel(self, name: str) -> None:
        """Forget a request for samples; it is not executed if that has not begun."""
        future = self.futures.pop(name, None)
        if future is not None and future.outcome is None:
            self._uncount(future)

    def _uncount(self, future: Future) -> None:
        """Count a request as finished."""
        if future.record is not None:
            self._pending[future.owner] -= 1
            self._pending_bytes[future.owner] -= len(future.record.body)

    def stop(self) -> None:
        """Let `next_operations` return None."""
        self._is_stopping = True
        self._changed.set()


def _get_clone(request_id: str) -> int:
    """Return the clone of a sampler that has sent a request: each numbers its requests in a block of a billion."""
    number = request_id.rpartition(":")[2]
    return int(number) // 1_000_000_000 if number.isdigit() else 0
