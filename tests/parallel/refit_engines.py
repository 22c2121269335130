"""Engine processes for the tests of refit. They start fast because this module does not import megatron-core."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.ipc import open_handle
from rl_megatron.weight_sync.process_group import StandaloneGroup
from rl_megatron.weight_sync.receiver import ParameterSink, WeightReceiver

CPU = torch.device("cpu")


def digests(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple]:
    """Return name → (hash of the bits, shape), which is small enough to send between processes."""
    return {
        name: (hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(), tensor.shape)
        for name, tensor in named_tensors
    }


def empty_parameters(plan: RefitPlan) -> dict[str, torch.Tensor]:
    return {s.name: torch.zeros(s.shape, dtype=s.torch_dtype) for bucket in plan.buckets for s in bucket.tensors}


def engine_over_a_group(connection, port: int, world_size: int, lose_a_bucket: bool) -> None:
    """Receive two refits over a process group and report each: (version, digests), or (None, the refusal)."""
    plan = connection.recv()
    parameters = empty_parameters(plan)
    receiver = WeightReceiver(ParameterSink(parameters), plan)
    group = StandaloneGroup("127.0.0.1", port, world_size - 1, world_size, CPU, timeout_seconds=60)
    if lose_a_bucket:
        accept = receiver.accept
        receiver.accept = lambda index, buffer: None if index == 1 else accept(index, buffer)
    for version in (3, 4):
        try:
            receiver.receive(group, version)
        except WeightsRefused as error:
            connection.send((None, str(error)))
        else:
            connection.send((receiver.version, digests(parameters.items())))
    connection.recv()


def engine_that_dies(connection, port: int) -> None:
    """Take part in the first bucket of a refit, then exit with status 9."""
    plan = connection.recv()
    group = StandaloneGroup("127.0.0.1", port, 1, 2, CPU, timeout_seconds=60)
    group.all_reduce(torch.zeros(plan.buckets[0].num_words, dtype=torch.int64)).wait()
    os._exit(9)


def engine_of_shared_memory(connection) -> None:
    """Receive a refit through shared memory, report its digests, then wait to be killed with a bucket open."""
    plan = connection.recv()
    parameters = empty_parameters(plan)
    receiver = WeightReceiver(ParameterSink(parameters), plan)
    receiver.begin(1)
    while (handle := connection.recv()) is not None:
        with open_handle(handle) as words:
            receiver.accept(handle.bucket_index, words)
        connection.send("taken")
    receiver.finish()
    connection.send(digests(parameters.items()))
    handle = connection.recv()
    with open_handle(handle):
        connection.send("open")
        connection.recv()  # the test kills the process while it waits here
