"""The training service computes in every layout what it computes in one process: losses, gradients and steps."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_megatron.certify.workload import SMALL_FUSED_HEAD, VOCAB_SIZE, build_small_batching
from rl_megatron.config.peft import LoraConfig
from rl_megatron.service.losses import LOSSES, choose_loss
from rl_megatron.service.run_states import RunStates
from rl_megatron.service.trainer import ServiceTrainer
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.adapter_runs import AdamParams, AdapterSlot
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.metrics import NonFiniteLoss
from tests.parallel.grid import Factors, Layout
from tests.parallel.test_grid import QUICK_OF_FEW
from tests.unit.service.cases import random_datums

KINDS = {"cross_entropy": ["next tokens", "several targets"]}
STEP = AdamParams(learning_rate=1e-3, grad_clip_norm=0.5)


def without_sharding(factors: Factors) -> Factors:
    return factors._replace(
        tensor=1, sequence=False, pipeline=1, virtual_pipeline=1, context=1, expert=min(factors.expert, 1),
        expert_tensor=1, data=1, uneven=False, recompute="none", fused_head=False,
    )  # fmt: skip


ALONE = without_sharding(QUICK_OF_FEW[0].values[0].factors)
TENSOR_AND_PIPELINE = ALONE._replace(tensor=2, sequence=True, pipeline=2)


def build_trainer(layout: Layout, precision: str = "fp32") -> ServiceTrainer:
    workload, factors = layout.workload(), layout.factors
    where = topology.build(layout.parallel, start_device("cpu"), workload.seed)
    batching = build_small_batching(factors.batching, factors.sequences, 1, layout.parallel)
    policy = MegatronPolicy(
        workload.model, where, vocab_size=VOCAB_SIZE, seed=workload.seed, batching=batching, precision=precision,
        fused_head=SMALL_FUSED_HEAD if factors.fused_head else None,
    )  # fmt: skip
    return ServiceTrainer(policy)


def gather_whole(run, tensors) -> dict[str, torch.Tensor]:
    """Return whole tensors of an adapter, by peft's names, from the parts of all ranks."""
    parts = [
        (entry.key, entry.global_shape, entry.global_offset, tensor.clone())
        for entry, tensor in zip(run.slot.entries, tensors, strict=True)
    ]
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, parts)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, tensor in sum(everywhere, []):
        target = whole.setdefault(key, torch.full(shape, torch.nan))
        target[tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))] = tensor
    return whole


def measure(layout: Layout):
    """Return what each loss gives, its gradients, and what two steps make of an adapter."""
    trainer = build_trainer(layout)
    config = LoraConfig(r=3, lora_alpha=5.0, init_lora_weights=False)
    results = {}
    for name in LOSSES:
        for kind in KINDS.get(name, ["other targets"]):
            run = trainer.create(config, seed=5)
            result = trainer.compute(run, random_datums(7, name, kind, 2, VOCAB_SIZE, 20), choose_loss(name), True)
            run.reduce()
            results[f"{name}, {kind}"] = (result.metrics, result.logprobs, gather_whole(run, run.gradients))
    run, norms = trainer.create(config, seed=6), []
    for number in range(2):
        for part in range(2):  # gradients add up until the step
            data = random_datums(4, "cross_entropy", "next tokens", 10 * number + part, VOCAB_SIZE, 20)
            trainer.compute(run, data, choose_loss("cross_entropy"), backward=True)
        norms.append(run.step(STEP))
    results["steps"] = ({"first": norms[0], "second": norms[1]}, [], gather_whole(run, run.weights))
    return results


@pytest.mark.parametrize("layout", QUICK_OF_FEW)
def test_a_layout_gives_what_one_process_gives(ranks, layout):
    """Metrics and logprobs agree to 1e-5, gradients to 1e-4 of the largest, and the weights after two steps."""
    alone = Layout(without_sharding(layout.factors))
    wanted, found = ranks.run(1, measure, alone)[0], ranks.run(layout.factors.ranks, measure, layout)[0]
    assert wanted.keys() == found.keys()
    for name, (metrics, logprobs, tensors) in wanted.items():
        assert found[name][0] == pytest.approx(metrics, rel=1e-5, abs=1e-5), name
        for ours, theirs in zip(found[name][1], logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert found[name][2].keys() == tensors.keys()
        for key, tensor in tensors.items():
            scale = tensor.abs().max().item()
            assert scale > 0, f"{name}: {key} is 0, so nothing is compared"
            torch.testing.assert_close(found[name][2][key], tensor, rtol=0, atol=1e-4 * scale, msg=f"{name}: {key}")


def count_bytes(precision: str):
    """Return the bytes of all tensors that a run has after a step, of its optimizer too; and its parameters."""
    trainer = build_trainer(Layout(ALONE), precision)
    run = trainer.create(LoraConfig(r=3), seed=0)
    data = random_datums(2, "cross_entropy", "next tokens", 0, VOCAB_SIZE, 12)
    trainer.compute(run, data, choose_loss("cross_entropy"), backward=True)
    run.step(STEP)
    gc.collect()
    reachable, seen = [run], {}
    while reachable:
        one = reachable.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType, AdapterSlot)):
            continue  # the slot belongs to all runs of its kind
        seen[id(one)] = one
        reachable += gc.get_referents(one)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in seen.values()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values()), sum(weight.numel() for weight in run.weights), len(run.weights)


@pytest.mark.parametrize(("precision", "bytes_of_a_parameter"), [("fp32", 16), ("bf16", 18)])
def test_a_run_takes_the_memory_that_the_page_says(ranks, precision, bytes_of_a_parameter):
    ((num_bytes, num_parameters, num_tensors),) = ranks.run(1, count_bytes, precision)
    assert num_bytes == num_parameters * bytes_of_a_parameter + 4 * num_tensors, "and the step of each tensor"


@dataclass(frozen=True)
class Tenancy:
    """A random order of the operations of several tenants."""

    factors: Factors
    num_tenants: int
    num_operations: int


def train_tenants(tenancy: Tenancy, directory: Path, tenants: Sequence[int]):
    """Return the whole weights of some of the tenants after their operations. Only two of them are in memory."""
    layout = Layout(tenancy.factors)
    trainer, rng = build_trainer(layout), random.Random(0)
    runs = RunStates(trainer.policy.topology.ranks, directory / "idle", 2)
    configs = [
        LoraConfig(r=1 + tenant % 5, lora_alpha=5.0, init_lora_weights=False) for tenant in range(tenancy.num_tenants)
    ]
    for tenant in tenants:
        runs.add(str(tenant), trainer.create(configs[tenant], seed=tenant))
    kinds = ["step", "cross_entropy", "importance_sampling", "overflow"]
    for number in range(tenancy.num_operations):
        tenant, kind = rng.randrange(tenancy.num_tenants), rng.choice(kinds)
        if number == tenancy.num_operations // 2 and len(tenants) > 1:  # the server is stopped and started again
            assert runs.keep(directory / "kept") is None
            assert not list((directory / "idle").rglob("*.safetensors")), "no state is on the disk twice"
            runs = RunStates(trainer.policy.topology.ranks, directory / "idle", 2)
            for other in tenants:
                runs.restore(str(other), trainer.find_slot(configs[other]), directory / "kept" / str(other))
        if tenant not in tenants:
            continue
        run = runs.get(str(tenant))
        if kind == "step":
            run.step(STEP)
        elif kind == "overflow":
            (datum,) = random_datums(1, "importance_sampling", "other targets", number, VOCAB_SIZE, 12)
            datum.inputs["logprobs"][:] = -1000.0
            with pytest.raises(NonFiniteLoss):
                trainer.compute(run, [datum], choose_loss("importance_sampling"), backward=True)
        else:
            data = random_datums(2, kind, "other targets", number, VOCAB_SIZE, 12)
            trainer.compute(run, data, choose_loss(kind), backward=True)
    return {tenant: gather_whole(runs.get(str(tenant)), runs.get(str(tenant)).weights) for tenant in tenants}


@pytest.mark.parametrize(
    "tenancy",
    [
        pytest.param(Tenancy(ALONE, 3, 48), id="three tenants"),
        pytest.param(Tenancy(ALONE, 8, 200), marks=pytest.mark.nightly, id="eight tenants"),
        pytest.param(
            Tenancy(TENSOR_AND_PIPELINE, 8, 200), marks=pytest.mark.nightly, id="eight tenants, tensor 2, pipeline 2"
        ),
    ],
)
def test_tenants_have_bitwise_the_weights_that_each_has_alone(ranks, tenancy, tmp_path):
    """Also if most of them are on the disk, and after a new start."""
    size, tenants = tenancy.factors.ranks, range(tenancy.num_tenants)
    together = ranks.run(size, train_tenants, tenancy, tmp_path, tenants)
    for tenant in tenants:
        alone = ranks.run(size, train_tenants, tenancy, tmp_path, [tenant])
        assert alone[0][tenant].keys() == together[0][tenant].keys()
        for key, tensor in alone[0][tenant].items():
            assert torch.equal(tensor, together[0][tenant][key]), f"tenant {tenant}: {key}"
