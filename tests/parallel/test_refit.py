"""Refit: what a sharded policy hands over is what one process would, and arrives whole or not at all."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_megatron.compat import nemo_rl
from rl_megatron.config.schema import ModelConfig
from rl_megatron.losses import NLLLoss
from rl_megatron.model.families import family_of_config
from rl_megatron.policy.interfaces import ColocatablePolicyInterface
from rl_megatron.policy.refit import WeightExporter
from rl_megatron.policy.weight_buckets import WeightsRefused
from rl_megatron.policy.weight_handles import opened
from rl_megatron.topology.standalone_group import CollectiveFailed, StandaloneGroup
from tests.parallel.family_cases import CASES, architecture, hf_model
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, MODEL, build_policy
from tests.parallel.refit_engines import (
    digests,
    engine_of_shared_memory,
    engine_over_a_group,
    engine_that_dies,
)
from tests.parallel.test_layouts import random_batch

CPU = torch.device("cpu")
LLAMA = dataclasses.replace(MODEL, qk_norm=False, qkv_bias=False)
UNTIED = dataclasses.replace(LLAMA, tie_embeddings=False, vocab_size=56)
MAX_BYTES = 20_000  # several buckets, and the embedding with others
OVERLAPPED = dataclasses.replace(DISTRIBUTED_OPTIMIZER, overlap=True)


def llama(parallel: dict, model: ModelConfig = LLAMA, **kwargs):
    return build_policy(parallel, model, **kwargs)


class CountedCollectives:
    """Every collective that is begun within the block, of torch.distributed and of standalone groups."""

    NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_object", "send", "gather")

    def __enter__(self):
        self.count = 0
        self._kept = [(dist, name, getattr(dist, name)) for name in self.NAMES]
        self._kept.append((StandaloneGroup, "all_reduce", StandaloneGroup.all_reduce))
        for owner, name, function in self._kept:
            setattr(owner, name, self._counting(function))
        return self

    def _counting(self, function):
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return counting

    def __exit__(self, *_):
        for owner, name, function in self._kept:
            setattr(owner, name, function)


def streamed(parallel: dict, model: ModelConfig, precision: str) -> tuple[dict, int, int]:
    """(What is exported, collectives, buckets)."""
    policy = llama(parallel, model, precision=precision)
    policy.prepare_weights_for_ipc(MAX_BYTES)
    with CountedCollectives() as collectives:
        found = digests(policy.stream_weights())
    return found, collectives.count, len(policy.refit_plan.buckets)


TIED_LAYOUTS = [
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
    (4, {"tensor": 2, "pipeline": 2}),
    (2, {}),
]


@pytest.fixture(scope="module")
def whole(ranks):
    """What one process exports."""
    known: dict = {}

    def of(model: ModelConfig, precision: str) -> dict:
        key = (repr(model), precision)
        if key not in known:
            known[key] = ranks.run(1, streamed, {}, model, precision)[0]
        return known[key]

    return of


@pytest.mark.parametrize("layout", TIED_LAYOUTS, ids=str)
@pytest.mark.parametrize(("model", "precision"), [(LLAMA, "fp32"), (UNTIED, "bf16")], ids=["tied-fp32", "untied-bf16"])
def test_a_sharded_export_is_one_processs_bitwise(ranks, whole, layout, model, precision):
    wanted, none, buckets = whole(model, precision)
    assert none == 0 and buckets > 2
    for found, collectives, _ in ranks.run(layout[0], streamed, layout[1], model, precision):
        assert found == wanted
        assert collectives == buckets


def model_of(case: str) -> ModelConfig:
    hf = hf_model(case).config.to_dict() | {"architectures": [architecture(case)]}
    return family_of_config(hf, case).read_config(hf)


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_exported_bitwise(ranks, whole, case):
    """Experts lie on ranks of their own, under tensor and sequence parallelism."""
    model = model_of(case)
    layout = {"tensor": 2, "sequence": True} | ({"expert": 2} if model.num_experts else {})
    for found, _, _ in ranks.run(2, streamed, layout, model, "bf16"):
        assert found == whole(model, "bf16")[0]


def after_a_step(parallel: dict, overlap: bool) -> dict:
    policy = llama(parallel, optimizer=dataclasses.replace(DISTRIBUTED_OPTIMIZER, overlap=overlap))
    policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    return digests(policy.stream_weights())


def test_weights_that_the_last_step_left_scattered_are_gathered_first(ranks):
    wanted = ranks.run(2, after_a_step, {}, False)[0]
    assert ranks.run(2, after_a_step, {}, True) == [wanted, wanted]


# --- what must not happen ---


def refusal(parallel: dict, change: str) -> str:
    from rl_megatron.policy import refit

    policy, pieces = llama(parallel), refit.pieces
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def changed(chunks):
        for piece in pieces(chunks):
            if piece.name == name and piece.is_first_replica and dist.get_rank() == dist.get_world_size() - 1:
                if change == "dropped":
                    continue
                if change == "doubled":
                    yield piece
                if change == "elsewhere":
                    piece = dataclasses.replace(piece, offset=(0, 0))
                if change == "unknown":
                    piece = dataclasses.replace(piece, name="decoder.layers.1.mlp.linear_fc3.weight")
                if change == "reshaped":
                    piece = dataclasses.replace(piece, global_shape=(32, 65))
            yield piece

    refit.pieces = changed
    try:
        WeightExporter(policy)
    except RuntimeError as error:
        return str(error)
    finally:
        refit.pieces = pieces
    return "nothing"


@pytest.mark.parametrize(("change", "held"), [("dropped", 1024), ("doubled", 3072), ("elsewhere", 2048)])
def test_a_piece_that_is_not_held_once_is_named_on_every_rank(ranks, change, held):
    for message in ranks.run(2, refusal, {"tensor": 2}, change):
        assert f"model.layers.1.mlp.down_proj.weight: ranks hold {held} elements of 2048" in message


@pytest.mark.parametrize("change", ["unknown", "reshaped"])
def test_a_tensor_that_the_table_does_not_know_is_refused_on_every_rank(ranks, change):
    first, last = ranks.run(2, refusal, {"tensor": 2}, change)
    assert first == "the family's weight table lacks what another rank holds"
    assert "lacks decoder.layers.1.mlp.linear_fc" in last


def altered_in_transit(parallel: dict) -> str:
    """A rank's rows change between being filled in and being added up."""
    policy = llama(parallel)
    exporter = WeightExporter(policy, MAX_BYTES)
    fill = exporter.fill

    def altering(index, buffer):
        filled = fill(index, buffer)
        position = [spec.name for spec in exporter.plan.buckets[index].tensors]
        if "model.layers.2.self_attn.k_proj.weight" in position and dist.get_rank() == 1:
            at = position.index("model.layers.2.self_attn.k_proj.weight")
            exporter.plan.buckets[index].tensor(filled, at)[-1, 3] += 1e-3
        return filled

    exporter.fill = altering
    with pytest.raises(WeightsRefused) as error:
        list(exporter.stream())
    return str(error.value)


def test_rows_that_change_in_transit_are_named(ranks):
    for message in ranks.run(2, altered_in_transit, {"tensor": 2}):
        assert message.startswith("model.layers.2.self_attn.k_proj.weight arrived altered")


# --- an engine in a process of its own ---


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def broadcast_twice(parallel: dict, port: int, lose_a_bucket: bool = False):
    """(What the engine has after each of two refits, of which the second follows a step; ours; allreduces, buckets)."""
    policy = llama(parallel, optimizer=OVERLAPPED)
    policy.prepare_weights_for_ipc(MAX_BYTES)
    plan, joint = policy.refit_plan, policy.topology.world_size + 1
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
        wanted = digests(policy.stream_weights())
        results.append((ours.recv(), wanted) if policy.topology.rank == 0 else None)
        metrics = policy.refit_metrics()
        policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    if policy.topology.rank == 0:
        ours.send("done")
        process.join(20)
    policy.shutdown()
    return results, counts, len(plan.buckets), metrics


@pytest.mark.parametrize("layout", [(1, {}), (2, {"tensor": 2}), (2, {})], ids=str)
def test_one_collective_a_bucket_brings_an_engine_the_weights(ranks, layout):
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


def test_an_engine_that_lost_a_bucket_serves_nothing_and_names_a_tensor(ranks):
    results = ranks.run(1, broadcast_twice, {}, free_port(), True)[0][0]
    for (version, message), wanted in results:
        assert version is None
        assert message.split()[0] in wanted and "is missing: bucket 1 never came" in message


def refit_to_one_that_dies(port: int) -> tuple[str, float, str]:
    policy = llama({})
    policy.prepare_weights_for_ipc(MAX_BYTES)
    ours, engine = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine_that_dies, args=(engine, port))
    process.start()
    ours.send(policy.refit_plan)
    began, messages = time.monotonic(), []
    for handle in policy.init_collective("127.0.0.1", port, 2, timeout_seconds=20):
        handle.wait()
    for _ in range(2):  # the second time nothing is tried any more
        with pytest.raises(CollectiveFailed) as error:
            for handle in policy.broadcast_weights_for_collective():
                handle.wait()
        messages.append(str(error.value))
    seconds = time.monotonic() - began
    process.join(20)
    policy.shutdown()
    return messages[0], seconds, messages[1]


def test_a_dead_engine_raises_within_the_timeout(ranks):
    message, seconds, again = ranks.run(1, refit_to_one_that_dies, free_port())[0]
    assert "a peer left, or did not answer within 20 s" in message
    assert "a collective failed before" in again
    assert seconds < 40  # of which most is the engine's start


# --- shared memory ---


def share(parallel: dict):
    policy = llama(parallel)
    groups = policy.prepare_weights_for_ipc(MAX_BYTES)
    before = segments()
    ours, engine = multiprocessing.get_context("spawn").Pipe()
    rank = policy.topology.rank
    if rank == 0:
        process = multiprocessing.get_context("spawn").Process(target=engine_of_shared_memory, args=(engine,))
        process.start()
        ours.send(policy.refit_plan)
    with CountedCollectives() as collectives:
        for keys in groups:
            handles = policy.get_weights_ipc_handles(keys)
            if rank == 0:
                ours.send(handles["cpu"])
                assert ours.recv() == "taken"
            dist.barrier()
    metrics = policy.refit_metrics()
    taken = None
    if rank == 0:
        ours.send(None)
        taken = ours.recv()
        ours.send(handles["cpu"])
        assert ours.recv() == "open"
        process.kill()
        process.join()
    policy.offload_after_refit()
    with pytest.raises(WeightsRefused, match="cannot be opened"), opened(handles["cpu"]):
        pass
    left = segments() - before
    wanted = digests(policy.stream_weights())
    with pytest.raises(ValueError, match="not one of the groups"):
        policy.get_weights_ipc_handles(groups[0][:1])
    return taken, wanted, collectives.count, len(groups), left, metrics["refit_bytes"]


def segments() -> set[str]:
    """Of shared memory: by name, and what this process has open or mapped."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "rl_megatron" in line}
    opened_files = {os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()}
    return set(os.listdir("/dev/shm")) | mapped | {f for f in opened_files if "rl_megatron" in f}


@pytest.mark.parametrize("layout", [(1, {}), (2, {"pipeline": 2})], ids=str)
def test_another_process_opens_the_weights_and_nothing_is_left_when_it_is_killed(ranks, layout):
    answers = ranks.run(layout[0], share, layout[1])
    taken, wanted, _, buckets, _, num_bytes = answers[0]
    assert taken == wanted
    assert num_bytes == sum(4 * shape.numel() for _, shape in wanted.values())
    for _, _, collectives, _, left, _ in answers:
        assert collectives == (buckets if layout[0] > 1 else 0)
        assert left == set()


# --- making room ---


def cycles(parallel: dict, offload: bool) -> tuple[dict, list[int], int]:
    """(Weights after twenty steps, bytes of living tensors after the third and the last, of gradients in between)."""
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
            gradients += sum(b.grad_data.untyped_storage().size() for chunk in policy.chunks for b in chunk.buffers)
            if cycle in (2, 19):
                living.append(bytes_of_tensors())
    return digests(policy.stream_weights()), living, gradients


def bytes_of_tensors() -> int:
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())


@pytest.mark.parametrize("layout", [(1, {}), (2, {})], ids=str)
def test_twenty_offloads_leave_memory_flat_and_training_as_it_was(ranks, layout):
    plain = ranks.run(layout[0], cycles, layout[1], False)
    offloaded = ranks.run(layout[0], cycles, layout[1], True)
    for (wanted, _, _), (found, living, gradients) in zip(plain, offloaded, strict=True):
        assert found == wanted
        assert gradients == 0
        assert living[0] == living[1] > 0


def versions(directory: str) -> list[int]:
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


def test_the_weight_version_changes_with_the_weights_alone(ranks, tmp_path):
    assert ranks.run(1, versions, str(tmp_path))[0] == [0, 2, 2, 3]


# --- the interface ---


def conformance() -> dict[str, list[str]]:
    """What each method of the interface has to be given."""
    policy = llama({})
    assert isinstance(policy, nemo_rl.MODULES["nemo_rl.models.policy.interfaces"]["ColocatablePolicyInterface"])
    assert "ray" not in sys.modules
    assert list(policy.prepare_refit_info()) == [name for name, _ in policy.stream_weights()]
    needed = {}
    for name in ColocatablePolicyInterface.__abstractmethods__:
        parameters = inspect.signature(getattr(policy, name)).parameters.values()
        needed[name] = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    with pytest.raises(RuntimeError, match="call init_collective.. first"):
        policy.broadcast_weights_for_collective()
    with pytest.raises(ValueError, match="world_size=1 must count the policy's 1 ranks and at least one engine's"):
        policy.init_collective("127.0.0.1", 1, world_size=1)
    with pytest.raises(RuntimeError, match="handing weights over is for a policy built with head='lm'"):
        llama({}, head="score").prepare_refit_info()
    return needed


def test_the_policy_is_one_that_engines_can_share_a_machine_with(ranks):
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
