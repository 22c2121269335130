"""Weight sync: to engines that join a process group, and through shared memory; offloading around a refit."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import multiprocessing
import os
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_megatron.compat import nemo_rl
from rl_megatron.losses import NLLLoss
from rl_megatron.policy.interfaces import ColocatablePolicyInterface
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.ipc import open_handle
from rl_megatron.weight_sync.process_group import CollectiveFailed
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER
from tests.parallel.refit_engines import (
    digests,
    engine_of_shared_memory,
    engine_over_a_group,
    engine_that_dies,
)
from tests.parallel.test_layouts import random_batch
from tests.parallel.test_refit import LLAMA, MAX_BYTES, OVERLAPPED, CountedCollectives, llama
from tests.ports import free_port

# --- an engine in a process of its own ---


def broadcast_twice(parallel: dict, port: int, lose_a_bucket: bool = False):
    """Send weights to an engine twice, the second time after a step.

    Returns:
        For each refit on rank 0: (what the engine reports, digests of the policy's weights); for each refit the numbers
        of collectives and of handles; the number of buckets; the metrics of the last refit.
    """
    policy = llama(parallel, optimizer=OVERLAPPED)
    policy.prepare_weights_for_ipc(MAX_BYTES)
    plan, joint = policy.weights.plan, policy.topology.world_size + 1
    ours, engine = multiprocessing.get_context("spawn").Pipe()
    if policy.topology.rank == 0:
        arguments = (engine, port, joint, lose_a_bucket)
        process = multiprocessing.get_context("spawn").Process(target=engine_over_a_group, args=arguments)
        process.start()
        ours.send(plan)
    (joined,) = policy.init_collective("127.0.0.1", port, joint, timeout_seconds=60)
    joined.wait()
    results, counts = [], []
    for _ in range(2):
        with CountedCollectives() as collectives:
            handles = policy.broadcast_weights_for_collective()
            for handle in handles:
                handle.wait()
        counts.append((collectives.count, len(handles)))
        wanted = digests(policy.weights.stream())
        results.append((ours.recv(), wanted) if policy.topology.rank == 0 else None)
        metrics = policy.weights.timings.metrics()
        policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    if policy.topology.rank == 0:
        ours.send("done")
        process.join(20)
    policy.shutdown()
    return results, counts, len(plan.buckets), metrics


@pytest.mark.parametrize("layout", [(1, {}), (2, {"tensor": 2}), (2, {})], ids=str)
def test_an_engine_gets_the_weights_with_one_collective_per_bucket(ranks, layout):
    answers = ranks.run(layout[0], broadcast_twice, layout[1], free_port())
    (results, _, buckets, metrics) = answers[0]
    for version, ((served, found), wanted) in zip((3, 4), results, strict=True):
        assert served == version
        assert found == wanted
    assert results[0][1] != results[1][1]  # the step moved them
    for _, counts, _, _ in answers:
        assert counts == [(buckets, buckets)] * 2
    assert metrics["refit_bytes"] == sum(4 * s.numel() for _, s in shapes(results))
    phases = metrics["refit_fill_seconds"], metrics["refit_transfer_seconds"]
    assert 0 < max(phases) <= metrics["refit_seconds"]
    assert metrics["refit_gb_per_s"] == pytest.approx(metrics["refit_bytes"] / 1e9 / metrics["refit_seconds"])


def shapes(results) -> list:
    return [(name, shape) for name, (_, shape) in results[0][1].items()]


def test_an_engine_that_lost_a_bucket_refuses_the_weights_and_names_a_tensor(ranks):
    results = ranks.run(1, broadcast_twice, {}, free_port(), True)[0][0]
    for (version, message), wanted in results:
        assert version is None
        assert message.split()[0] in wanted and "is missing: bucket 1 never came" in message


def refit_to_engine_that_dies(port: int) -> tuple[str, float, str]:
    """Send weights twice to an engine that dies; return the first message, the seconds, and the second message."""
    policy = llama({})
    policy.prepare_weights_for_ipc(MAX_BYTES)
    ours, engine = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine_that_dies, args=(engine, port))
    process.start()
    ours.send(policy.weights.plan)
    began, messages = time.monotonic(), []
    for handle in policy.init_collective("127.0.0.1", port, 2, timeout_seconds=20):
        handle.wait()
    for _ in range(2):  # the second time fails at once
        with pytest.raises(CollectiveFailed) as error:
            for handle in policy.broadcast_weights_for_collective():
                handle.wait()
        messages.append(str(error.value))
    seconds = time.monotonic() - began
    process.join(20)
    policy.shutdown()
    return messages[0], seconds, messages[1]


def test_a_dead_engine_raises_within_the_timeout(ranks):
    message, seconds, again = ranks.run(1, refit_to_engine_that_dies, free_port())[0]
    assert "a peer left the group or did not answer within 20 s" in message
    assert "an earlier collective failed" in again
    assert seconds < 40  # most of this is the engine's start


# --- shared memory ---


def share(parallel: dict):
    """Send weights through shared memory to a process, then kill it while it has a bucket open.

    Returns:
        Digests of the weights of the process and of the policy, the numbers of collectives and of buckets, what is left
        of shared memory, and the bytes that were sent.
    """
    policy = llama(parallel)
    groups = policy.prepare_weights_for_ipc(MAX_BYTES)
    before = segments()
    ours, engine = multiprocessing.get_context("spawn").Pipe()
    rank = policy.topology.rank
    if rank == 0:
        process = multiprocessing.get_context("spawn").Process(target=engine_of_shared_memory, args=(engine,))
        process.start()
        ours.send(policy.weights.plan)
    with CountedCollectives() as collectives:
        for keys in groups:
            handles = policy.get_weights_ipc_handles(keys)
            if rank == 0:
                ours.send(handles["cpu"])
                assert ours.recv() == "taken"
            dist.barrier()
    metrics = policy.weights.timings.metrics()
    taken = None
    if rank == 0:
        ours.send(None)
        taken = ours.recv()
        ours.send(handles["cpu"])
        assert ours.recv() == "open"
        process.kill()
        process.join()
    policy.offload_after_refit()
    with pytest.raises(WeightsRefused, match="cannot be opened"), open_handle(handles["cpu"]):
        pass
    ends_at = time.monotonic() + 10
    while (left := segments() - before) and time.monotonic() < ends_at:
        time.sleep(0.05)  # gloo's threads release a tensor a moment after its collective has ended
    wanted = digests(policy.weights.stream())
    with pytest.raises(ValueError, match="not one of the groups"):
        policy.get_weights_ipc_handles(groups[0][:1])
    return taken, wanted, collectives.count, len(groups), left, metrics["refit_bytes"]


def segments() -> set[str]:
    """Return the names of the shared memory of weights that this process has open or mapped."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    opened_files = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()}
    return {name for name in mapped | opened_files if "rl_megatron" in name}


@pytest.mark.parametrize("layout", [(1, {}), (2, {"pipeline": 2})], ids=str)
def test_another_process_reads_the_weights_and_no_memory_is_left_when_it_is_killed(ranks, layout):
    answers = ranks.run(layout[0], share, layout[1])
    taken, wanted, _, buckets, _, num_bytes = answers[0]
    assert taken == wanted
    assert num_bytes == sum(4 * shape.numel() for _, shape in wanted.values())
    for _, _, collectives, _, left, _ in answers:
        assert collectives == (buckets if layout[0] > 1 else 0)
        assert left == set()


# --- offloading ---


def cycles(parallel: dict, offload: bool) -> tuple[dict, list[int], int]:
    """Take twenty steps, with a refit and offloading after each if `offload`.

    Returns:
        Digests of the weights at the end, the bytes of all tensors that are alive after the third and the last step,
        and the bytes of gradients while they are offloaded.
    """
    others = {id(tensor): weakref.ref(tensor) for tensor in living_tensors()}  # tensors of earlier tests on this rank
    policy = llama(parallel, dataclasses.replace(LLAMA, num_layers=2), optimizer=DISTRIBUTED_OPTIMIZER)
    batch, living, gradients = random_batch(4, 12, 0), [], 0
    for cycle in range(20):
        policy.train(batch, NLLLoss(), gbs=4)
        if offload:
            policy.offload_before_refit()
            for keys in policy.prepare_weights_for_ipc():
                policy.get_weights_ipc_handles(keys)
            policy.offload_after_refit()
            policy.get_logprobs(batch)
            buffers = [buffer for model_chunk in policy.model.model_chunks for buffer in model_chunk.buffers]
            gradients += sum(buffer.grad_data.untyped_storage().size() for buffer in buffers)
            if cycle in (2, 19):
                living.append(bytes_besides(others))
    return digests(policy.weights.stream()), living, gradients


def bytes_besides(others: dict[int, weakref.ref]) -> int:
    """Return the bytes of the living tensors that are not among `others`, weak references by id."""
    tensors = [tensor for tensor in living_tensors() if others.get(id(tensor), lambda: None)() is not tensor]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())


def living_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("layout", [(1, {}), (2, {})], ids=str)
def test_twenty_offloads_change_neither_memory_nor_training(ranks, layout):
    plain = ranks.run(layout[0], cycles, layout[1], False)
    offloaded = ranks.run(layout[0], cycles, layout[1], True)
    for (wanted, _, _), (found, living, gradients) in zip(plain, offloaded, strict=True):
        assert found == wanted
        assert gradients == 0
        assert living[0] == living[1] > 0


def versions(directory: str) -> list[int]:
    """Return the weight version at the start, after two updates, after calls without an update, and after a load."""
    policy = llama({})
    found, batch = [policy.weight_version], random_batch(8, 12, 0)
    policy.train(batch, NLLLoss(), gbs=4)  # two updates
    found.append(policy.weight_version)
    policy.train(batch, NLLLoss(), eval_mode=True)
    nothing = random_batch(4, 12, 0)
    nothing["token_mask"] = torch.zeros_like(nothing["token_mask"])
    policy.train(nothing, NLLLoss())
    path = policy.save_checkpoint(directory, 1)
    found.append(policy.weight_version)
    policy.load_checkpoint(path)
    return [*found, policy.weight_version]


def test_the_weight_version_changes_only_with_the_weights(ranks, tmp_path):
    assert ranks.run(1, versions, str(tmp_path))[0] == [0, 2, 2, 3]


# --- the interface ---


def conformance() -> dict[str, list[str]]:
    """Return the required parameters of each method of the interface, and check errors of its calls."""
    policy = llama({})
    assert isinstance(policy, nemo_rl.MODULES["nemo_rl.models.policy.interfaces"]["ColocatablePolicyInterface"])
    assert "ray" not in sys.modules
    assert list(policy.prepare_refit_info()) == [name for name, _ in policy.weights.stream()]
    needed = {}
    for name in ColocatablePolicyInterface.__abstractmethods__:
        parameters = inspect.signature(getattr(policy, name)).parameters.values()
        needed[name] = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    with pytest.raises(RuntimeError, match="call init_collective.. first"):
        policy.broadcast_weights_for_collective()
    with pytest.raises(ValueError, match="world_size=1 must include the policy's 1 ranks and at least one engine"):
        policy.init_collective("127.0.0.1", 1, world_size=1)
    with pytest.raises(RuntimeError, match="sending weights to an engine needs a model with head='lm'"):
        llama({}, head="score").prepare_refit_info()
    return needed


def test_the_policy_has_the_methods_of_the_colocatable_interface(ranks):
    wanted = {
        "broadcast_weights_for_collective": [],
        "finish_training": [],
        "get_logprobs": ["data"],
        "get_reference_policy_logprobs": ["data"],
        "get_weights_ipc_handles": ["keys"],
        "init_collective": ["ip", "port", "world_size"],
        "offload_after_refit": [],
        "offload_before_refit": [],
        "prepare_for_training": [],
        "prepare_refit_info": [],
        "prepare_weights_for_ipc": [],
        "save_checkpoint": ["directory", "step"],
        "shutdown": [],
        "train": ["data", "loss_fn"],
    }
    assert ranks.run(1, conformance)[0] == wanted
