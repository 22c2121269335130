"""Estimates follow their formulas, for a GPU and links whose numbers are round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.plan import PlanConfig, split_overrides
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import SECONDS_PER_LAUNCH, estimate_collective, estimate_phase
from rl_megatron.plan.phases import Bytes, Collective, PhaseUse
from rl_megatron.topology.gpus import GPUS

ROUND = PlanConfig(
    gpu_memory_gib=10, gpu_bf16_tflops=100, gpu_memory_gb_per_s=1000, link_gb_per_s=100, network_gb_per_s=10,
    compute_efficiency=0.5, memory_efficiency=0.5, link_efficiency=0.5,
)  # fmt: skip
CLUSTER = Cluster.from_config(ROUND, "mine", nodes=4, gpus_per_node=4)
SECOND = 50 * 10**12  # operations of a second


def seconds_of(use: PhaseUse, **degrees):
    return estimate_phase(use, CLUSTER, ParallelConfig(**degrees), "bf16", microbatches=4)


def test_operations_and_bytes_add_up_unless_the_host_is_slower():
    use = PhaseUse("train", Bytes(), flops=2 * SECOND, memory_bytes=500 * 10**9, kernels=10)
    assert seconds_of(use).total == pytest.approx(3.0)
    assert seconds_of(replace(use, kernels=10**6)).total == pytest.approx(10**6 * SECONDS_PER_LAUNCH)


def test_fp32_is_slower():
    use = PhaseUse("train", Bytes(), flops=SECOND)
    assert estimate_phase(use, CLUSTER, ParallelConfig(), "fp32", 1).total == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("phase", "degrees", "waiting"),
    [
        ("train", {"pipeline": 1}, 0.0),
        ("train", {"pipeline": 4}, 0.75),  # 3 others / 4 microbatches
        ("logprobs", {"pipeline": 4, "virtual_pipeline": 2}, 0.375),
        ("generate", {"pipeline": 4}, 3.0),  # a token passes all stages before the next
        ("refit", {"pipeline": 4}, 0.0),
    ],
)
def test_pipeline_stages_wait_for_each_other(phase, degrees, waiting):
    assert seconds_of(PhaseUse(phase, Bytes(), flops=SECOND), **degrees).waiting == pytest.approx(waiting)


def test_kernels_compute_a_share_of_the_operations_that_are_counted():
    use = PhaseUse("train", Bytes(), flops=SECOND)
    assert estimate_phase(use, CLUSTER, ParallelConfig(), "bf16", 1, computed_share=0.5).compute == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("collective", "degrees", "expected"),
    [
        (Collective("all_reduce", "tensor", 4, 10**9), {"tensor": 4}, 2 * 0.75 / 50),
        (Collective("all_gather", "tensor", 4, 10**9), {"tensor": 4}, 0.75 / 50),
        (Collective("all_gather", "tensor", 8, 10**9), {"tensor": 8}, 0.875 / 20),  # spans two nodes, 4 cards each
        (Collective("all_gather", "context", 2, 10**9), {"tensor": 4, "context": 2}, 0.5 / 5),
        (Collective("all_to_all", "expert", 4, 10**9), {"expert": 4}, 0.75 / 50),
        (Collective("reduce_scatter", "data", 4, 10**9), {"pipeline": 4}, 0.75 / 50),  # a stage is a node
        (Collective("all_to_all", "expert", 8, 10**9), {"expert": 8}, 0.5 / 5),  # half of it goes to the other node
        (Collective("reduce_scatter", "data", 16, 10**9), {}, 0.9375 / 20),
        (Collective("reduce_scatter", "data", 8, 10**9), {"tensor": 2}, 0.875 / 10),  # 2 of its ranks in each node
        (Collective("send", "pipeline", 2, 10**9), {"pipeline": 2}, 1 / 5),
        (Collective("all_reduce", "tensor", 1, 10**9), {}, 0.0),
    ],
)
def test_collectives_take_the_links_and_network_cards_that_their_group_has(collective, degrees, expected):
    found = estimate_collective(collective, CLUSTER, ParallelConfig(**degrees))
    assert found == pytest.approx(expected, abs=3e-5)  # and 20 µs each
    twice = estimate_collective(replace(collective, count=2), CLUSTER, ParallelConfig(**degrees))
    assert twice == pytest.approx(2 * found)


@pytest.mark.parametrize(
    ("section", "gpu", "message"),
    [
        (PlanConfig(), "h300", r"--gpu h300: .*h200.*plan.gpu_memory_gib=… plan.gpu_bf16_tflops=… plan.gpu_memory_gb_"),
        (PlanConfig(gpu_memory_gib=1.0), "h300", r"numbers: plan.gpu_bf16_tflops=… plan.gpu_memory_gb_per_s=…$"),
        (
            replace(ROUND, link_gb_per_s=None),
            "mine",
            r"--gpu mine: the link .* plan.link, one of nvlink3.*link_gb_per_s",
        ),
        (PlanConfig(link="nvlink9"), "h100", r"plan.link=nvlink9: .*nvlink5.*plan.link_gb_per_s=…"),
        (PlanConfig(), "H100", r"--gpu H100: .*did you mean 'h100'\?"),
        (PlanConfig(link="nvlnk4", link_gb_per_s=100.0), "h100", r"plan.link=nvlnk4: .*did you mean 'nvlink4'\?"),
        (replace(ROUND, link="nvlnk4"), "mine", r"plan.link=nvlnk4: .*did you mean 'nvlink4'\?"),
        (PlanConfig(network="carrier", network_gb_per_s=1.0), "h100", r"plan.network=carrier: .*infiniband_ndr"),
        (PlanConfig(network="carrier"), "h100", r"plan.network=carrier: .*infiniband_ndr.*plan.network_gb_per_s=…"),
    ],
)
def test_unknown_hardware_is_refused_with_the_list_and_the_keys_for_numbers(section, gpu, message):
    with pytest.raises(ConfigError, match=message):
        Cluster.from_config(section, gpu, 1, 8)


def test_numbers_replace_those_of_the_table():
    cluster = Cluster.from_config(PlanConfig(gpu_memory_gib=64.0, memory_margin=0.5), "h100", 2, 8)
    assert cluster.gpu == replace(GPUS["h100"], memory_gib=64.0)
    assert (cluster.world_size, cluster.usable_bytes) == (16, 2**35)


def test_overrides_of_the_section_are_split_from_those_of_the_run():
    section, rest = split_overrides(["plan.prompt_tokens=7", "model=nano", "+plan.link=pcie4"])
    assert (section.prompt_tokens, section.link, rest) == (7, "pcie4", ["model=nano"])
    for wrong, message in {
        "plan.promt_tokens=7": "unknown key 'plan.promt_tokens'; did you mean 'plan.prompt_tokens'",
        "plan.memory_efficiency=2": "plan.memory_efficiency=2: input should be less than or equal to 1",
        "plan.memory_margin=1": "plan.memory_margin=1: input should be less than 1",
        "plan.memory_margin=-0.1": "plan.memory_margin=-0.1: input should be greater than or equal to 0",
        "plan.link": "plan.link=VALUE",
    }.items():
        with pytest.raises(ConfigError, match=message):
            split_overrides([wrong])
