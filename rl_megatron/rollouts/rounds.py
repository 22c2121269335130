"""`Rounds`: runs rollout workers at the same time, and gives their requests to the rollout engine in rounds.

A round has the requests of all trajectories that still run: it begins when each of them waits for the engine. What an
engine computes together therefore does not depend on how long environments and tools take, and equal runs get equal
numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.generation.interfaces import Completion, Request
from rl_megatron.rollouts.client import Answer
from rl_megatron.rollouts.trajectory import Trajectory


@dataclass(frozen=True)
class RolloutTask:
    """A prompt that a worker makes trajectories for.

    Attributes:
        name: The name of the task; no other one of the same draw has it.
        prompt: The prompt.
        seed: The seed of its first request.
    """

    name: str
    prompt: EncodedPrompt
    seed: int


@dataclass(frozen=True)
class TaskResult:
    """What became of a task.

    Attributes:
        task: The task.
        trajectory: What the worker returned, or None if it failed.
        failure: Why it failed, or None.
        attempts: How often it was tried.
    """

    task: RolloutTask
    trajectory: Trajectory | None
    failure: str | None = None
    attempts: int = 1


class Rounds:
    """The tasks of one draw on an asyncio loop, and their requests that wait. All methods run on that loop."""

    def __init__(self, run: Callable[[RolloutTask, Answer], Coroutine[Any, Any, TaskResult]], most: int):
        """Start without tasks.

        Args:
            run: Runs a task, and returns its result. It asks for completions with its second argument.
            most: The most tasks that run at the same time.
        """
        self._run, self._most = run, most
        self._running: dict[int, int] = {}  # the number of each task that runs, and how many of its requests wait
        self._waiting: dict[str, tuple[int, Request, asyncio.Future[Completion]]] = {}
        self._work: list[asyncio.Task[TaskResult]] = []
        self._num_unstarted = 0
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def begin(self, tasks: Sequence[RolloutTask]) -> None:
        """Start the tasks."""
        places = asyncio.Semaphore(self._most)
        self._num_unstarted = len(tasks)
        self._work = [
            asyncio.get_running_loop().create_task(self._in_a_place(places, number, task))
            for number, task in enumerate(tasks)
        ]

    async def requests(self) -> list[Request]:
        """Wait for a round, and return its requests in the order of their tasks; none if all tasks have ended.

        Raises:
            Exception: What a task raised that is no failure of its own.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if all(work.done() for work in self._work):
                return []
            if self._all_wait():
                ordered = sorted(self._waiting.values(), key=lambda each: each[0])
                return [request for _, request, _ in ordered]
            self._changed.clear()
            await self._changed.wait()

    def answer(self, completions: Sequence[Completion]) -> None:
        """Give the tasks the completions of a round."""
        for completion in completions:
            waiting = self._waiting.get(completion.request_id)
            if waiting is not None and not waiting[2].done():  # otherwise its task has ended meanwhile
                waiting[2].set_result(completion)

    def results(self) -> list[TaskResult]:
        """Return the results of all tasks, in their order.

        Raises:
            Exception: What a task raised that is no failure of its own.
        """
        return [work.result() for work in self._work]

    def cancel(self) -> None:
        """End all tasks."""
        for work in self._work:
            work.cancel()

    def _all_wait(self) -> bool:
        """Return whether every task that can run has a request that waits."""
        is_full = self._num_unstarted == 0 or len(self._running) == self._most
        return is_full and bool(self._running) and all(self._running.values())

    async def _in_a_place(self, places: asyncio.Semaphore, number: int, task: RolloutTask) -> TaskResult:
        async with places:
            self._running[number], self._num_unstarted = 0, self._num_unstarted - 1
            try:
                return await self._run(task, partial(self._ask, number))
            except Exception as error:  # it ends the run, and other tasks need not go on
                self._failure = self._failure or error
                raise
            finally:
                del self._running[number]
                self._changed.set()

    def _ask(self, number: int, request: Request) -> asyncio.Future[Completion]:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._running[number] += 1  # first, because it raises if the task has ended
        self._waiting[request.request_id] = number, request, future
        future.add_done_callback(partial(self._waits_no_longer, number, request.request_id))
        self._changed.set()
        return future

    def _waits_no_longer(self, number: int, request_id: str, _: asyncio.Future[Completion]) -> None:
        del self._waiting[request_id]
        if number in self._running:  # otherwise its task has ended
            self._running[number] -= 1
