"""A rollout engine's own process: a Hugging Face model that gets all of its weights by refit, and draws from it.

Started by `worker_process`, asked over the socket that it inherits, and gone when the policy's process is. It imports
no Megatron: it has neither its parallelism nor its platform.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from rl_megatron import log
from rl_megatron.generation.completions import row_uniforms
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.transformers.model import build_model, checkpoint_tensors, complete
from rl_megatron.generation.transformers.process import die_with
from rl_megatron.weight_sync.ipc import WeightHandle, opened
from rl_megatron.weight_sync.plan import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.process_group import CollectiveFailed, StandaloneGroup
from rl_megatron.weight_sync.receiver import WeightReceiver


class TransformersWorker:
    """The methods that the policy asks for, each answered once."""

    def build(self, plan: RefitPlan, device: str, batch_size: int) -> None:
        self._plan, self._batch_size = plan, batch_size
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.model = build_model(plan, self._device)
        self.receiver = WeightReceiver(checkpoint_tensors(self.model), plan)

    def join(self, ip: str, port: int, rank: int, world_size: int, timeout_seconds: float, kind: str) -> None:
        """`kind` of device, and so of group, that the policy's ranks have."""
        device = self._device if kind == self._device.type else torch.device(kind)
        self._group = StandaloneGroup(ip, port, rank, world_size, device, timeout_seconds)

    def receive(self, version: int) -> dict[str, float]:
        """A refit over the group. Returns the seconds of its phases here."""
        try:
            self.receiver.receive(self._group, version)
        except WeightsRefused:  # after all of it was taken off the wire
            raise
        except Exception:
            self._group.close()  # the policy's ranks would wait for this one's part until the collective times out
            raise
        return self.receiver.seconds

    def begin(self, version: int) -> None:
        """A refit in shared memory: `begin`, `take` for each bucket, `finish`."""
        self.receiver.begin(version)

    def take(self, handle: WeightHandle) -> None:
        with opened(handle) as words:
            self.receiver.accept(handle.bucket_index, words)

    def finish(self) -> dict[str, float]:
        self.receiver.finish()
        return self.receiver.seconds

    def generate(
        self, prompts: list[list[int]], first_row: int, num_rows: int, sampling: Sampling, seed: int
    ) -> tuple[int | None, tuple[Any, ...]]:
        """(The version served, the parts of `Completions` as arrays), of `prompts`, which are rows `first_row` and on
        of `num_rows`."""
        uniforms = row_uniforms(num_rows, sampling, seed)[first_row : first_row + len(prompts)]
        batches = [slice(start, start + self._batch_size) for start in range(0, len(prompts), self._batch_size)]
        progress = DecodingProgress(len(prompts))
        drawn = [
            complete(self.model, prompts[rows], uniforms[rows], sampling, self._plan.vocab_size, progress).parts()
            for rows in batches
        ]
        return self.receiver.version, tuple(torch.cat(part).cpu().numpy() for part in zip(*drawn, strict=True))


def serve(connection: Connection, worker: TransformersWorker) -> None:
    """Answers questions until the line ends."""
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        answer: Callable[..., Any] = getattr(worker, method)
        try:
            result = ("answer", answer(*arguments))
        except WeightsRefused as error:
            result = ("refused", str(error))
        except CollectiveFailed as error:  # what somebody else's failure looks like from here
            result = ("broken", str(error))
        except Exception as error:  # whatever it is, the policy's process reports it and decides
            traceback.print_exc()
            result = ("failed", f"{type(error).__name__}: {error}")
        connection.send(result)


def main(arguments: list[str], worker: TransformersWorker) -> None:
    descriptor, parent = map(int, arguments)
    die_with(parent)
    connection = Connection(descriptor)
    log.watch_progress(lambda *progress: connection.send(("progress", progress)))
    serve(connection, worker)


if __name__ == "__main__":
    main(sys.argv[1:], TransformersWorker())
