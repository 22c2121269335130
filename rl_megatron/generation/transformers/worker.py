"""Run a rollout engine's process: a Hugging Face model that gets all of its weights by refit, and samples from it.

The module `process` starts it and sends requests over the socket that it inherits. It ends with the policy's process.
It does not import megatron-core.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from rl_megatron import log
from rl_megatron.generation.completions import sequence_uniforms
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.transformers.model import build_model, checkpoint_tensors, complete
from rl_megatron.topology.child_process import die_with
from rl_megatron.weight_sync.ipc import WeightHandle, opened
from rl_megatron.weight_sync.plan import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.process_group import CollectiveFailed, StandaloneGroup
from rl_megatron.weight_sync.receiver import WeightReceiver


class TransformersWorker:
    """The methods that the policy's process can call."""

    def build(self, plan: RefitPlan, device: str, batch_size: int) -> None:
        """Build the model without weights, on the device."""
        self._plan, self._batch_size = plan, batch_size
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.model = build_model(plan, self._device)
        self.receiver = WeightReceiver(checkpoint_tensors(self.model), plan)

    def join(self, ip: str, port: int, rank: int, world_size: int, timeout_seconds: float, kind: str) -> None:
        """Join the process group of the policy's ranks, whose type of device is `kind`."""
        device = self._device if kind == self._device.type else torch.device(kind)
        self._group = StandaloneGroup(ip, port, rank, world_size, device, timeout_seconds)

    def receive(self, version: int) -> dict[str, float]:
        """Receive the weights over the process group, and return the seconds of each phase."""
        try:
            self.receiver.receive(self._group, version)
        except WeightsRefused:  # all weights have been received by then
            raise
        except Exception:
            self._group.close()  # otherwise the policy's ranks would wait for this one until the collective times out
            raise
        return self.receiver.seconds

    def begin(self, version: int) -> None:
        """Begin a refit in shared memory: `begin`, then `take` for each bucket, then `finish`."""
        self.receiver.begin(version)

    def take(self, handle: WeightHandle) -> None:
        """Copy one bucket into the model."""
        with opened(handle) as words:
            self.receiver.accept(handle.bucket_index, words)

    def finish(self) -> dict[str, float]:
        """Check that all weights arrived, and return the seconds of each phase."""
        self.receiver.finish()
        return self.receiver.seconds

    def generate(
        self, prompts: list[list[int]], first_sequence: int, num_sequences: int, sampling: Sampling, seed: int
    ) -> tuple[int | None, tuple[Any, ...]]:
        """Return the version of the weights, and the parts of `Completions` as arrays.

        Args:
            prompts: Token ids of this engine's prompts.
            first_sequence: The number of the first of them among all prompts.
            num_sequences: The number of all prompts.
            sampling: How tokens are sampled.
            seed: The seed of the random numbers of all prompts.
        """
        uniforms = sequence_uniforms(num_sequences, sampling, seed)[first_sequence : first_sequence + len(prompts)]
        batches = [slice(start, start + self._batch_size) for start in range(0, len(prompts), self._batch_size)]
        progress = DecodingProgress(len(prompts))
        drawn = [
            complete(self.model, prompts[indices], uniforms[indices], sampling, self._plan.vocab_size, progress).parts()
            for indices in batches
        ]
        return self.receiver.version, tuple(torch.cat(part).cpu().numpy() for part in zip(*drawn, strict=True))


def serve(connection: Connection, worker: TransformersWorker) -> None:
    """Answer requests until the connection ends."""
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
        except CollectiveFailed as error:  # usually another process failed
            result = ("broken", str(error))
        except Exception as error:  # any failure: the policy's process reports it and decides
            traceback.print_exc()
            result = ("failed", f"{type(error).__name__}: {error}")
        connection.send(result)


def main(arguments: list[str], worker: TransformersWorker) -> None:
    """Serve the parent process. The arguments are the socket's descriptor and the parent's process id."""
    descriptor, parent = map(int, arguments)
    die_with(parent)
    connection = Connection(descriptor)
    log.watch_progress(lambda *progress: connection.send(("progress", progress)))
    serve(connection, worker)


if __name__ == "__main__":
    main(sys.argv[1:], TransformersWorker())
