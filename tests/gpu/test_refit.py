"""Refit on a GPU: weights are sent to another process by CUDA IPC, and training memory is offloaded to the host."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle

import pytest
import torch

from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.weight_sync.ipc import open_handle
from rl_megatron.weight_sync.process_group import CollectiveFailed, StandaloneGroup
from rl_megatron.weight_sync.receiver import ParameterSink, WeightReceiver
from tests.parallel.refit_engines import digests
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# New processes are forks of one that has done the imports, which take longer than the tests.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["rl_megatron.training.megatron_policy", "tests.parallel.test_layouts"])


def in_a_fresh_process(function, *args):
    """Run a function in a new process, because other tests may have set up the test's own process for the CPU."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_answer, args=(theirs, function, args))
    process.start()
    theirs.close()
    answer = pickle.loads(ours.recv_bytes())
    process.join()
    return answer


def _answer(connection, function, args):
    # `send` would share the memory of tensors, and the sender ends before it is read.
    connection.send_bytes(pickle.dumps(function(*args)))


def build_policy(precision: str, distributed: bool, reference_placement: str = "resident"):
    from rl_megatron.topology import topology
    from rl_megatron.topology.device import start_device
    from rl_megatron.training.megatron_policy import MegatronPolicy
    from tests.parallel.layouts import MODEL, VOCAB_SIZE

    return MegatronPolicy(
        dataclasses.replace(MODEL, qk_norm=False, qkv_bias=False),
        topology.build(ParallelConfig(), start_device("cuda"), 0),
        vocab_size=VOCAB_SIZE,
        precision=precision,
        optimizer=OptimizerConfig(lr=1e-2, distributed=distributed),
        total_steps=10,
        reference_placement=reference_placement,
    )


def multiply() -> None:
    """Let cuBLAS allocate its workspace, which is 32 MiB on a Hopper GPU and stays."""
    for dtype in (torch.bfloat16, torch.float32):
        torch.ones(16, 16, dtype=dtype, device="cuda") @ torch.ones(16, 16, dtype=dtype, device="cuda")


def train(policy) -> None:
    from rl_megatron.losses import NLLLoss
    from tests.parallel.test_layouts import random_batch

    policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)


def weights(policy) -> dict:
    return digests((name, tensor.cpu()) for name, tensor in policy.weights.stream())


def engine(connection) -> None:
    """Receive a refit by CUDA IPC in a process of its own, and report the digests of the weights."""
    plan = connection.recv()
    parameters = {
        s.name: torch.zeros(s.shape, dtype=s.torch_dtype, device="cuda") for b in plan.buckets for s in b.tensors
    }
    receiver = WeightReceiver(ParameterSink(parameters), plan)
    receiver.begin(1)
    for handle in iter(connection.recv, None):
        with open_handle(handle) as words:
            receiver.accept(handle.bucket_index, words)
        del words
        connection.send("taken")
    receiver.finish()
    connection.send(digests((name, parameter.cpu()) for name, parameter in parameters.items()))


def send_weights() -> tuple[dict, dict, int]:
    """Send weights by CUDA IPC; return the engine's digests, the policy's, and the bytes that stay allocated."""
    policy = build_policy("bf16", distributed=True)
    groups = policy.prepare_weights_for_ipc(20_000)
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=engine, args=(theirs,))
    process.start()
    ours.send(policy.weights.plan)
    wanted = weights(policy)  # it also makes the tables of fingerprints, which stay
    multiply()
    before = torch.cuda.memory_allocated()
    for keys in groups:
        (handle,) = policy.get_weights_ipc_handles(keys).values()
        ours.send(handle)
        assert ours.recv() == "taken"
    ours.send(None)
    taken = ours.recv()
    process.join()
    policy.offload_before_refit()
    policy.weights.release()
    return taken, wanted, torch.cuda.memory_allocated() - before


def test_an_engine_gets_the_weights_by_ipc_and_the_memory_is_released():
    taken, wanted, kept = in_a_fresh_process(send_weights)
    assert taken == wanted
    assert kept <= 0


def cycles(precision: str, distributed: bool, offload: bool) -> tuple[dict, list[int], list[str]]:
    """Take twenty steps, each followed by offloading if `offload`.

    Returns:
        Digests of the weights, the allocated bytes after each step, and the devices of the moments while offloaded.
    """
    policy, allocated, moments = build_policy(precision, distributed), [], set()
    for _ in range(20):
        train(policy)
        if offload:
            policy.offload_before_refit()
            policy.offload_after_refit()
            for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
                moments |= {state["exp_avg"].device.type for state in part.optimizer.state.values()}
        allocated.append(torch.cuda.memory_allocated())
    return weights(policy), allocated, sorted(moments)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_twenty_offloads_change_no_weight_and_leak_no_memory(precision, distributed):
    wanted, resident, _ = in_a_fresh_process(cycles, precision, distributed, False)
    found, offloaded, moments = in_a_fresh_process(cycles, precision, distributed, True)
    assert found == wanted
    assert moments == ["cpu"]
    assert offloaded[2] == offloaded[-1] < resident[-1]


def offloaded_reference() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the logprobs before a step, those of the offloaded reference after it, and its bytes on the device."""
    from tests.parallel.test_layouts import random_batch

    policy, batch = build_policy("bf16", True, reference_placement="offload"), random_batch(4, 12, 0)
    multiply()
    before = torch.cuda.memory_allocated()
    start = policy.get_logprobs(batch)["logprobs"]
    policy.freeze_reference()
    held = torch.cuda.memory_allocated() - before
    train(policy)
    return start, policy.get_reference_policy_logprobs(batch)["reference_logprobs"], held


def test_an_offloaded_reference_takes_almost_no_device_memory():
    start, reference, held = in_a_fresh_process(offloaded_reference)
    assert torch.equal(start, reference)
    assert held < 20_000  # RoPE's tables are this large; the weights are ten times as large


def leave_without_a_word(port: int) -> None:
    """Join a group as rank 1, and die after the first sum."""
    group = StandaloneGroup("127.0.0.1", port, 1, 2, torch.device("cuda", 1), timeout_seconds=30)
    group.all_reduce(torch.ones(1, dtype=torch.int64, device="cuda:1")).wait()
    os._exit(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, because NCCL takes one process per GPU")
def test_a_peer_that_dies_raises_an_error_and_leaves_this_process_alive():
    port = free_port()
    peer = FORKS.Process(target=leave_without_a_word, args=(port,))
    peer.start()
    group = StandaloneGroup("127.0.0.1", port, 0, 2, torch.device("cuda", 0), timeout_seconds=30)
    words = torch.ones(1, dtype=torch.int64, device="cuda:0")
    group.all_reduce(words).wait()
    assert words.item() == 2
    peer.join()
    with pytest.raises(CollectiveFailed, match="a peer left the group or did not answer"):
        group.all_reduce(words).wait()
    assert torch.ones(2, device="cuda:0").sum().item() == 2
