"""Recorded experts give the same values and gradients in every layout, also when layers are recomputed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.certify.workload import NUM_SEQUENCES, build_batch_of_all_kinds
from rl_megatron.losses import NLLLoss
from rl_megatron.model.layers.router_replay import recording
from tests.parallel.layouts import EXPERTS, VOCAB_SIZE, build_policy, gradients, worst_relative_error

BALANCED = dataclasses.replace(EXPERTS, router_aux_loss=0.5)
WHOLE, PACKED = Batching("padded", NUM_SEQUENCES), Batching("packed", tokens=4096)
HALVES = Batching("padded", NUM_SEQUENCES // 2)


def recorded_batch():
    """Return a batch whose recorded experts are random, so that the routers themselves would choose others.

    Every third token has none.
    """
    batch = build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    generator = torch.Generator().manual_seed(3)
    shape = (*batch["input_ids"].shape, EXPERTS.num_layers, EXPERTS.num_experts)
    order = torch.rand(shape, generator=generator).argsort(dim=-1)
    experts = order[..., : EXPERTS.experts_per_token].to(torch.int16)
    experts[:, ::3] = -1
    return batch | {"routed_experts": experts}


def step_on(batch, parallel: dict, batching: Batching, recompute: str = "none"):
    """Return the metrics, the gradients, and the logprobs."""
    policy = build_policy(parallel, model=dataclasses.replace(BALANCED, recompute=recompute), batching=batching)
    report = policy.accumulate_gradients(batch, NLLLoss())
    return report, gradients(policy), policy.get_logprobs(batch)["logprobs"]


def replayed_step(parallel: dict, batching: Batching, recompute: str = "none"):
    return step_on(recorded_batch(), parallel, batching, recompute)


def assert_same(found, wanted):
    for metric in ("loss", "router_aux_loss", "mismatch_routing"):
        assert found[0][metric] == pytest.approx(wanted[0][metric], rel=1e-5), metric
    error, name = worst_relative_error(found[1], wanted[1])
    assert error <= 1e-4, name
    torch.testing.assert_close(found[2], wanted[2], atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, replayed_step, {}, WHOLE)[0]


@pytest.mark.parametrize(
    ("world_size", "parallel", "batching", "recompute"),
    [
        (2, {"context": 2, "expert": 2}, PACKED, "full"),
        (2, {"tensor": 2, "sequence": True}, PACKED, "full"),
        (2, {"tensor": 2, "sequence": True, "expert": 2}, WHOLE, "none"),
        (2, {"pipeline": 2}, WHOLE, "full"),
        (4, {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True}, WHOLE, "full"),
    ],
    ids=str,
)
def test_values_and_gradients_equal_those_of_one_process(ranks, one_process, world_size, parallel, batching, recompute):
    assert_same(ranks.run(world_size, replayed_step, parallel, batching, recompute)[0], one_process)


def test_several_microbatches_in_flight_replay_their_own_experts(ranks):
    """A pipeline runs other microbatches between a microbatch's forward pass and the recomputation of its layers."""
    single = Batching("padded", 1)
    wanted = ranks.run(1, replayed_step, {}, single)[0]
    assert_same(ranks.run(2, replayed_step, {"pipeline": 2}, single, "full")[0], wanted)


def test_data_parallel_ranks_replay_their_own_sequences(ranks):
    wanted = ranks.run(1, replayed_step, {}, HALVES)[0]
    assert_same(ranks.run(2, replayed_step, {"expert": 2}, HALVES)[0], wanted)


def recorded_then_replayed():
    """Return a step's results without replay, and with the experts that the routers themselves chose."""
    policy, batch = build_policy({}, model=BALANCED, batching=WHOLE), build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    num_sequences, width = batch["input_ids"].shape
    own = torch.full((num_sequences, width, EXPERTS.num_layers, EXPERTS.experts_per_token), -1, dtype=torch.int16)

    def keep(layer: int, experts: torch.Tensor) -> None:
        own[:, :, layer] = experts.view(width, num_sequences, -1).transpose(0, 1).short()

    with recording(policy.model.model_chunks, keep):
        policy.get_logprobs(batch)
    return step_on(batch, {}, WHOLE), step_on(batch | {"routed_experts": own}, {}, WHOLE)


def test_replaying_a_routers_own_choices_changes_nothing(ranks, one_process):
    without, replayed = ranks.run(1, recorded_then_replayed)[0]
    assert "mismatch_routing" not in without[0]
    assert replayed[0]["mismatch_routing"] == 0.0
    assert_same(replayed, ({**without[0], "mismatch_routing": 0.0}, *without[1:]))
    # Random experts change much. Of 6 pairs of 4 experts, a router chooses the recorded one in a sixth of the cases.
    assert (without[2] - one_process[2]).abs().mean() > 0.01
    assert one_process[0]["mismatch_routing"] == pytest.approx(5 / 6, abs=0.05)
