"""What a rank knows about one worker process: the jobs that it has, and which call it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rl_megatron.rewards.samples import Sample
from rl_megatron.workers.child_process import ChildProcess

_GRACE_SECONDS = 1.0  # an event loop that has not gone round for this time beyond the limit is taken to be blocked


@dataclass
class Job:
    """Functions to call for one sample, or one function to call for all samples.

    Attributes:
        number: Its number.
        kind: "call" (functions in order, for one sample), "await" (an async function) or "list" (all samples).
        functions: The indices of the functions that have not answered.
        samples: The indices of the samples.
        since: When it was sent, or the worker's last answer came, if this is the worker's oldest job.
        attempts: How many workers ended while they had it, and nothing says which call ended them.
    """

    number: int
    kind: str
    functions: list[int]
    samples: list[int]
    since: float = 0.0
    attempts: int = 0


@dataclass
class WorkerHandle:
    """A worker process and the jobs that it has, in the order in which they were sent."""

    process: ChildProcess
    started: float
    is_ready: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)

    @property
    def oldest(self) -> Job | None:
        """Return the job that the worker got first."""
        return next(iter(self.jobs.values()), None)

    def takes(self, kind: str, most: int) -> bool:
        """Return whether the worker takes another job of a kind, of which it may have `most`."""
        alike = all(job.kind == kind and not job.attempts for job in self.jobs.values())
        return self.is_ready and len(self.jobs) < most and alike

    def send(self, job: Job, samples: Sequence[Sample]) -> None:
        """Send a job to the worker.

        Args:
            job: The job.
            samples: The samples of all ranks.
        """
        job.since = time.monotonic()
        self.jobs[job.number] = job
        if job.kind == "list":
            self.process.send("list", job.number, job.functions[0], [samples[index] for index in job.samples])
        else:
            functions = job.functions[0] if job.kind == "await" else job.functions
            self.process.send(job.kind, job.number, functions, samples[job.samples[0]])

    def is_late(self, limit: float) -> bool:
        """Return whether the call that runs takes longer than a limit in seconds; queued ones have not begun.

        A worker ends late calls of async functions itself, unless one of them blocks its event loop.
        """
        oldest = self.oldest
        if oldest is None:
            return False
        begun = max(oldest.since, self.process.mark.touched)
        return time.monotonic() - begun > limit + (_GRACE_SECONDS if oldest.kind == "await" else 0.0)

    def call(self) -> tuple[Job, int] | None:
        """Return the call that the worker runs, or ran when it ended: its job and its function. None: no one knows."""
        number, function = self.process.mark.read() or (-1, -1)
        job = self.jobs.get(number)
        return None if job is None or function not in job.functions else (job, function)
