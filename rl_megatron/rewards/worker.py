"""The process in which reward functions run. `RewardWorkers` starts it and sends samples over a socket.

A function may do anything: raise, print, fork, close files, or end the process. Every call is marked in shared memory
before it begins, so that the parent process knows which call was running if this process ends.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from typing import Any

from rl_megatron.config.errors import ConfigError, describe_with_place
from rl_megatron.config.loading.import_strings import load_object
from rl_megatron.rewards.reward_function import (
    BadFunction,
    BadResult,
    RewardFunction,
    TaskReward,
    read_result,
    read_results,
    run_async,
)
from rl_megatron.rewards.samples import Failure, FunctionSpec, Outcome, Sample
from rl_megatron.workers.calls import BusyTime, CallMark, TimedCall, finish_within
from rl_megatron.workers.child import serve_user_code
from rl_megatron.workers.frames import read_frame, write_frame

_SECONDS_BETWEEN_TOUCHES = 0.1  # by an event loop that nothing blocks


class Worker:
    """The functions of one worker process, and its end of the socket."""

    def __init__(self, connection: socket.socket, mark: CallMark):
        self._connection, self._mark = connection, mark
        self._loop = asyncio.new_event_loop()
        self._functions: list[RewardFunction | TaskReward] = []
        self._timeout, self._busy = 0.0, BusyTime()

    def serve(self) -> None:
        """Answer messages until the other end closes the socket."""
        waiting: list[tuple[Any, ...]] = []
        while True:
            message = waiting.pop(0) if waiting else read_frame(self._connection)
            if message is None:
                return
            kind, *arguments = message
            if kind == "await":
                waiting += self._loop.run_until_complete(self._await_all(arguments))
            else:
                {"load": self._load, "call": self._call, "list": self._call_list}[kind](*arguments)

    def _load(self, specs: list[FunctionSpec], timeout: float) -> None:
        """Load the functions, and send their descriptions, or the error of the first one that cannot be loaded."""
        self._timeout = timeout
        where = ""
        try:
            for spec in specs:
                where = spec.where
                self._functions.append(_load_function(spec))
        except (ConfigError, BadFunction) as error:
            names_key = str(error).startswith(where.partition("=")[0])
            self._send("refused", str(error) if names_key else f"{where}: {error}")
            return
        except Exception as error:  # unpickling runs the user's imports
            self._send("refused", f"{where}: {describe_with_place(error)}")
            return
        self._send("loaded", [function.describe() for function in self._functions])

    def _call(self, job: int, indices: list[int], sample: Sample) -> None:
        """Call functions for one sample, one after the other, and send each outcome."""
        for index in indices:
            with self._mark.mark_call(job, index):
                try:
                    result = run_async(self._functions[index].call(sample), self._loop)
                    outcome = Outcome(*read_result(result))
                except BaseException as error:  # also SystemExit, with which a function would end this process
                    outcome = _build_failure(error)
                self._send("outcomes", job, index, [outcome])

    def _call_list(self, job: int, index: int, samples: list[Sample]) -> None:
        """Call a function for all samples at once, and send the outcomes."""
        function, metrics = self._functions[index], {}
        assert isinstance(function, RewardFunction)  # the reward of a task has another form
        with self._mark.mark_call(job, index):
            try:
                result = run_async(function.call_list(samples, metrics.__setitem__), self._loop)
                outcomes = [Outcome(*score) for score in read_results(result, len(samples))]
                list_metrics = read_result({"score": 0.0, **metrics}).metrics
                outcomes[0] = outcomes[0]._replace(metrics=outcomes[0].metrics | list_metrics)
            except BaseException as error:  # also SystemExit
                outcomes = [_build_failure(error)] * len(samples)
            self._send("outcomes", job, index, outcomes)

    async def _await_all(self, first: list[Any]) -> list[tuple[Any, ...]]:
        """Run an async call, and all async calls that arrive while any of them runs, concurrently.

        Return the messages of other kinds that arrived meanwhile.
        """
        running = {self._loop.create_task(self._await_one(*first))}
        others: list[tuple[Any, ...]] = []

        def receive() -> None:
            message = read_frame(self._connection)
            if message is None:
                os._exit(0)
            if message[0] == "await":
                running.add(self._loop.create_task(self._await_one(*message[1:])))
            else:
                others.append(message)

        self._loop.add_reader(self._connection, receive)
        touching = self._loop.create_task(self._touch())
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running -= done
        finally:
            touching.cancel()
            self._loop.remove_reader(self._connection)
        return others

    async def _touch(self) -> None:
        """Update the mark's time at short intervals, as long as nothing blocks the loop."""
        while True:
            self._mark.touch()
            await asyncio.sleep(_SECONDS_BETWEEN_TOUCHES)

    async def _await_one(self, job: int, index: int, sample: Sample) -> None:
        """Call an async function for one sample, and send the outcome."""
        timed = TimedCall(self._mark, self._busy, (job, index), self._call_async(index, sample))
        call = await finish_within(timed, self._timeout)
        if call is not None:
            outcome = call.result()
        else:
            outcome = Outcome(None, {}, Failure("timeout", f"took longer than {self._timeout:g} seconds"))
        self._send("outcomes", job, index, [outcome])

    async def _call_async(self, index: int, sample: Sample) -> Outcome:
        try:
            return Outcome(*read_result(await self._functions[index].call(sample)))
        except GeneratorExit:  # this coroutine is closed
            raise
        except BaseException as error:  # also SystemExit and asyncio.CancelledError, which would end the loop
            return _build_failure(error)

    def _send(self, *message: object) -> None:
        self._mark.end_forked_child()
        try:
            write_frame(self._connection, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError:  # the other end is gone, or a function closed the socket
            os._exit(1)


def _load_function(spec: FunctionSpec) -> RewardFunction | TaskReward:
    if spec.pickled is None:
        assert spec.target is not None  # one of the two is set
        return RewardFunction(load_object(spec.target, spec.where.partition("=")[0]), spec.label, spec.kwargs)
    value = pickle.loads(spec.pickled)
    return TaskReward(value, spec.label) if spec.is_task else RewardFunction(value, spec.label, spec.kwargs)


def _build_failure(error: BaseException) -> Outcome:
    if isinstance(error, BadResult):
        return Outcome(None, {}, Failure("error", str(error)))
    kind = "timeout" if isinstance(error, TimeoutError) else "error"
    return Outcome(None, {}, Failure(kind, f"raised {describe_with_place(error)}"))


def main(arguments: list[str]) -> None:
    """Serve the parent process, a `ChildProcess`."""
    serve_user_code(arguments, lambda connection, mark: Worker(connection, mark).serve())


if __name__ == "__main__":
    main(sys.argv[1:])
