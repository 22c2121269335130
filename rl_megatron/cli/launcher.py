"""Start ranks with torchrun's arguments, and report in one line how the run ended: `rl_megatron.cli.launcher`.

It differs from `torchrun` in how it handles the ends of ranks, and in its store:

- SIGTERM, SIGINT and SIGUSR1 go to the ranks, which save and end. The launcher gives them about twice the time of a
  step and a save, and then ends the ranks that still run. A second signal ends them at once.
- Ranks that found bad input, or that ended because of a signal, are not started again.
- A rank that still runs long after another one has ended with status 0 is reported and killed.
- Instead of torchrun's report, one line reports which rank failed first and how. The exit status is that of this rank.
- On one node, only this machine reaches the rendezvous store, and the store has no pickles. torchrun's store listens on
  all interfaces, and torchrun reads a pickle from it every few seconds.
- On several nodes with the rendezvous backend `c10d`, that pickle may contain only classes that describe a rendezvous.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar

import torch.distributed.launcher.api as launcher_api
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import get_args_parser, run

from rl_megatron import disk
from rl_megatron.config.errors import STOPPED
from rl_megatron.runs.step_times import FILE, read_step_times
from rl_megatron.runs.stop_signals import SAME_SIGNAL_SECONDS, SIGNALS

_NOT_STARTED_AGAIN = (2, STOPPED)  # exit statuses: bad input, and ended as asked
_ONE_NODE, _LOOPBACK = "one_node", "127.0.0.1"  # this module's rendezvous backend, and its address
_SECONDS_TO_MEET = 600
# The classes in torch's rendezvous state, by module.
_RENDEZVOUS_CLASSES = {
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": {"_RendezvousState", "_NodeDesc"},
    "datetime": {"datetime", "timedelta", "timezone"},
}
_OTHER_SIGNALS = "SIGHUP,SIGQUIT"  # torch handles them: it ends the ranks
_SECONDS_OF_EVERYTHING_ELSE = 30.0  # for ranks to end, in addition to a step and a save
_SECONDS_UNMEASURED = 300.0  # for ranks to end, until a save has been measured
_SECONDS_TO_KILL = 1  # between SIGTERM and SIGKILL for ranks that exceed the limit
SECONDS_TO_FOLLOW = 300.0  # for ranks to end after the first one has ended well; rank 0 writes the run's report


class RunAgent(LocalElasticAgent):
    """torchrun's agent, which starts and watches the ranks of a node, with this module's differences."""

    was_asked_to_end: ClassVar = False  # a class attribute, because torch gives no access to the agent

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._deadline: float | None = None
        self._asked_at: float | None = None
        self._first_ended_at: float | None = None
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif number != signal.SIGUSR1:
            if now - self._asked_at <= SAME_SIGNAL_SECONDS:
                return  # the launcher's parent has forwarded the signal that the launcher also received
            self._shutdown_timeout = _SECONDS_TO_KILL
            raise SignalException(f"a second {signal.Signals(number).name}", signal.Signals(number))
        limit = max(self._shutdown_timeout, _estimate_seconds_to_end())
        self._deadline, RunAgent.was_asked_to_end = now + limit, True
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]  # a decorator
        if result.state == WorkerState.FAILED:
            is_final = any(failure.exitcode in _NOT_STARTED_AGAIN for failure in result.failures.values())
            if is_final or self._deadline is not None:
                self._remaining_restarts = 0
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self._shutdown_timeout = _SECONDS_TO_KILL
            raise SignalException("the ranks did not end in time", signal.SIGTERM)
        elif result.state == WorkerState.HEALTHY:
            self._kill_remaining_ranks(worker_group)
        return result

    def _kill_remaining_ranks(self, worker_group: WorkerGroup) -> None:
        """Kill ranks, such as suspended ones, that still run long after another one has ended with status 0."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        left = {number: handler.proc.pid for number, handler in handlers.items() if handler.proc.poll() is None}
        if len(left) == len(handlers):
            self._first_ended_at = None
            return
        now = time.monotonic()
        if self._first_ended_at is None:
            self._first_ended_at = now
        if now - self._first_ended_at < SECONDS_TO_FOLLOW:
            return
        for number, pid in left.items():
            rank = worker_group.workers[number].global_rank
            print(
                f"rank {rank} (process {pid} on {socket.gethostname()}) has not ended {SECONDS_TO_FOLLOW:.0f} s after "
                "other ranks ended well, so it is killed",
                file=sys.stderr,
            )
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _estimate_seconds_to_end() -> float:
    """Estimate how long the ranks need to end after a signal, from their measured steps and saves."""
    times = read_step_times()
    if times is None or times["save_seconds"] == 0.0:
        return _SECONDS_UNMEASURED
    return 2 * (times["step_seconds"] + times["save_seconds"]) + _SECONDS_OF_EVERYTHING_ELSE


def _read_message(failure: ProcessFailure) -> str | None:
    """Return the message that a rank wrote to its error file (`log.error`), or None if it wrote none."""
    data: Any = failure.error_file_data["message"] if Path(failure.error_file).is_file() else None
    return data["message"] if isinstance(data, dict) else data


def _has_ended_as_asked(status: int) -> bool:
    """Return whether a rank ended because of a stop signal: after it saved, or before its first step."""
    return status == STOPPED or -status in SIGNALS


def _report(failures: dict[int, ProcessFailure]) -> int:
    """Print how the run failed, unless a rank has printed it, and return the exit status."""

    def get_order(rank: int) -> tuple[int, int, int]:
        # Killed ranks come first, because they make others fail. SIGTERM comes last: the agent sends it to the others.
        failure = failures[rank]
        kind = 2 if failure.exitcode == -signal.SIGTERM else int(failure.exitcode > 0)
        return kind, failure.timestamp, rank

    if RunAgent.was_asked_to_end and all(_has_ended_as_asked(failure.exitcode) for failure in failures.values()):
        return STOPPED
    first = min(failures, key=get_order)
    failure = failures[first]
    message = _read_message(failure)
    if message is not None:
        if 0 in failures and _read_message(failures[0]) is None:
            print("error:", message, file=sys.stderr)  # rank 0 was ended before it could print the message
    elif failure.exitcode != STOPPED:
        how = f"with status {failure.exitcode}" if failure.exitcode > 0 else f"killed by {failure.signal_name()}"
        print(
            f"error: rank {first} (process {failure.pid} on {socket.gethostname()}) was the first rank to end, {how}; "
            "the same command continues from the newest checkpoint",
            file=sys.stderr,
        )
    return max(failure.exitcode, 0) or 1


class _OneNodeRendezvous(StaticTCPRendezvous):
    """The rendezvous of the only node, with a store that listens on the loopback address."""

    def __init__(self, parameters: RendezvousParameters):
        listening = socket.create_server((_LOOPBACK, 0))
        port = listening.getsockname()[1]
        super().__init__(_LOOPBACK, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=_SECONDS_TO_MEET)
        self._store = TCPStore(
            _LOOPBACK, port, 1, is_master=True, timeout=self.timeout, master_listen_fd=listening.detach()
        )

    def get_backend(self) -> str:
        """Return the name under which the rendezvous is registered."""
        return _ONE_NODE


class _RendezvousUnpickler(pickle.Unpickler):
    """An unpickler for the state of a `c10d` rendezvous, whose store others may write to."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class of the rendezvous state, and refuse all others."""
        if name in _RENDEZVOUS_CLASSES.get(module, ()) or (module, name) == ("builtins", "set"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the state of the rendezvous names {module}.{name}, which cannot be part of it")


def _meet_safely(parsed: argparse.Namespace) -> None:
    """Set up the rendezvous so that it unpickles no code from others; see the module's docstring."""
    dynamic_rendezvous.pickle = SimpleNamespace(  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        dumps=pickle.dumps, loads=lambda data: _RendezvousUnpickler(io.BytesIO(data)).load(),
        PickleError=pickle.PickleError,
    )  # fmt: skip
    is_one_node = parsed.nnodes in ("1", "1:1") and not parsed.rdzv_endpoint and parsed.master_port is None
    if parsed.standalone or is_one_node:
        rendezvous_handler_registry.register(_ONE_NODE, _OneNodeRendezvous)
        parsed.standalone, parsed.rdzv_backend = False, _ONE_NODE
        parsed.rdzv_endpoint, parsed.rdzv_id = f"{_LOOPBACK}:0", str(uuid.uuid4())


def main(arguments: list[str] | None = None) -> int:
    """Start the ranks of this node and return the exit status."""
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    parsed = get_args_parser().parse_args(arguments)
    parsed.signals_to_handle = _OTHER_SIGNALS
    _meet_safely(parsed)
    launcher_api.LocalElasticAgent = RunAgent  # pyright: ignore[reportPrivateImportUsage]  # torch has no argument for it
    with tempfile.TemporaryDirectory(prefix=disk.make_temporary_prefix("launcher")) as directory:
        os.environ[FILE] = str(Path(directory) / "step_times.json")
        try:
            run(parsed)
        except ChildFailedError as error:
            return _report(error.failures)
        except SignalException as error:
            print(f"error: ended by {error.sigval.name} before the ranks could save: {error}", file=sys.stderr)
            return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
