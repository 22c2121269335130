"""Run a rollout engine's process, which samples from a Hugging Face model that gets all its weights by refit.

The module `process` starts this process, calls its methods, and sends it single requests. This process ends with the
policy's process, and does not import megatron-core.
"""

from __future__ import annotations

import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch

from rl_megatron import log
from rl_megatron.config.errors import describe_error
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.decoding_progress import DecodingProgress
from rl_megatron.generation.interfaces import Completion, Request
from rl_megatron.generation.requests import PartialCompletion
from rl_megatron.generation.transformers.model import attach_adapter, build_model, checkpoint_tensors
from rl_megatron.generation.transformers.pending_requests import PendingRequests
from rl_megatron.generation.transformers.replica import RoutingRecorder, TransformersReplica
from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.ipc import WeightHandle, open_handle
from rl_megatron.weight_sync.process_group import CollectiveFailed, StandaloneGroup
from rl_megatron.weight_sync.receiver import ParameterSink, WeightReceiver
from rl_megatron.workers.child import connect
from rl_megatron.workers.frames import read_frame, write_frame


class TransformersWorker:
    """The methods that the policy's process can call."""

    def build(self, plan: RefitPlan, device: str, batch_size: int, records_routing: bool) -> None:
        """Build the model on the device, with arbitrary weights; `records_routing` makes it record routed experts."""
        self._batch_size = batch_size
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self.model = build_model(plan, self._device)
        self.receiver = WeightReceiver(ParameterSink(checkpoint_tensors(self.model)), plan)
        recorder = RoutingRecorder(self.model) if records_routing else None
        self._replica = TransformersReplica(self.model, plan.vocab_size, self._version, recorder)

    def add_adapter(self, plan: RefitPlan) -> None:
        """Add an adapter to the model, which has its base weights by now. Every later refit sends only the adapter."""
        self.receiver = WeightReceiver(ParameterSink(attach_adapter(self.model, plan)), plan)

    def join(self, ip: str, port: int, rank: int, world_size: int, timeout_seconds: float, kind: str) -> None:
        """Join the process group of the policy's ranks, whose device type is `kind`."""
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
        """Begin a refit through shared memory. Calls of `take`, one per bucket, and then of `finish` follow."""
        self.receiver.begin(version)

    def take(self, handle: WeightHandle) -> None:
        """Copy one bucket into the model."""
        with open_handle(handle) as words:
            self.receiver.accept(handle.bucket_index, words)

    def finish(self) -> dict[str, float]:
        """Check that all weights arrived, and return the seconds of each phase."""
        self.receiver.finish()
        return self.receiver.seconds

    def generate(self, requests: list[Request]) -> list[Completion]:
        decoder = self.make_decoder()
        decoder.add([PartialCompletion(request) for request in requests])
        progress = DecodingProgress(len(requests))
        completions: dict[str, Completion] = {}
        with decoder.active():
            while (ended := decoder.advance()) is not None:
                completions |= {completion.request_id: completion for completion in ended}
                progress.update(len(completions), decoder.sum_shares, len(decoder.running))
        progress.finish_batch(len(completions))
        return [completions[request.request_id] for request in requests]

    def make_decoder(self) -> Decoder:
        """Return a decoder without sequences. The model now uses its cache, not that of an earlier decoder."""
        if self.receiver.version is None:
            raise RuntimeError("no weights have arrived yet")
        return Decoder(self._replica, self._batch_size)

    def _version(self) -> int:
        assert self.receiver.version is not None, "make_decoder checks it"
        return self.receiver.version


def serve(connection: socket.socket, worker: TransformersWorker) -> None:
    """Answer the policy's calls, and decode single requests between them, until the connection ends."""

    def send(kind: str, value: object) -> None:
        write_frame(connection, pickle.dumps((kind, value)))

    log.watch_progress(lambda *progress: send("progress", progress))
    pending = PendingRequests(lambda *answer: send("completions", answer), worker.make_decoder)
    while True:
        if not wait([connection], 0 if pending.can_advance else None):
            pending.advance()
            continue
        message = read_frame(connection)
        if message is None:
            return
        kind, method, arguments = message
        if kind == "request":
            getattr(pending, method)(*arguments)
            continue
        pending.hold()
        answer: Callable[..., Any] = getattr(worker, method)
        try:
            result = ("answer", answer(*arguments))
        except WeightsRefused as error:
            result = ("refused", str(error))
        except CollectiveFailed as error:  # usually another process failed
            result = ("broken", str(error))
        except Exception as error:  # any failure: the policy's process reports it and decides
            traceback.print_exc()
            result = ("failed", describe_error(error))
        send(*result)


def main(arguments: list[str], worker: TransformersWorker) -> None:
    """Serve the parent process, which has started this one as a `ChildProcess`."""
    connection, _ = connect(arguments)
    with suppress(OSError):  # the other end has closed the socket
        serve(connection, worker)


if __name__ == "__main__":
    main(sys.argv[1:], TransformersWorker())
