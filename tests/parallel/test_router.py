"""The balancing loss of experts: its gradient is correct, and equal in all layouts with the same microbatches.

With the scope "global", it is equal in all layouts with any microbatches.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.certify.workload import NUM_SEQUENCES, build_batch_of_all_kinds
from rl_megatron.losses import NLLLoss
from tests.parallel.layouts import MODEL, VOCAB_SIZE, build_policy, gradients, worst_relative_error

EXPERTS = dataclasses.replace(MODEL, num_experts=4, expert_ffn_hidden_size=32, router_aux_loss=0.5)
GLOBAL = dataclasses.replace(EXPERTS, router_aux_loss_scope="global")
WHOLE = Batching("padded", NUM_SEQUENCES)


def one_step(parallel: dict, batching: Batching, model=EXPERTS, num_padding: int = 0):
    policy = build_policy(parallel, model=model, batching=batching)
    batch = build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    if num_padding:
        batch = batch.pad_to_multiple(batch.size + num_padding)
    report = policy.accumulate_gradients(batch, NLLLoss())
    return report, gradients(policy)


def assert_same(found, wanted):
    assert found[0]["router_aux_loss"] == pytest.approx(wanted[0]["router_aux_loss"], rel=1e-5)
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-6)
    error, name = worst_relative_error(found[1], wanted[1])
    assert error <= 1e-4, name


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, one_step, {}, WHOLE)[0]


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        ({"context": 2}, "none"),
        ({"context": 2, "expert": 2}, "full"),
        ({"tensor": 2, "sequence": True}, "none"),
        ({"tensor": 2, "sequence": True, "expert": 2}, "full"),
        ({"pipeline": 2}, "full"),
        ({"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True}, "none"),
    ],
    ids=str,
)
def test_layouts_with_the_same_microbatches_agree(ranks, one_process, parallel, recompute):
    world_size = parallel.get("tensor", 1) * parallel.get("context", 1) * parallel.get("pipeline", 1)
    model = dataclasses.replace(EXPERTS, recompute=recompute)
    assert_same(ranks.run(world_size, one_step, parallel, WHOLE, model)[0], one_process)


def test_padding_and_sequences_with_zero_loss_weight_do_not_count(ranks, one_process):
    assert_same(ranks.run(1, one_step, {}, Batching("packed", tokens=4096))[0], one_process)
    assert_same(ranks.run(1, one_step, {}, Batching("padded", NUM_SEQUENCES + 5), EXPERTS, 5)[0], one_process)


def test_data_parallel_ranks_balance_their_microbatches_like_one_process(ranks):
    halves = Batching("padded", NUM_SEQUENCES // 2)
    assert_same(ranks.run(2, one_step, {"expert": 2}, halves)[0], ranks.run(1, one_step, {}, halves)[0])


def test_microbatches_without_a_token_are_finite(ranks):
    """Interleaved stages pad the number of microbatches with empty ones: 3 microbatches of 4 sequences become 4."""
    thirds = Batching("padded", NUM_SEQUENCES // 3)
    wanted = ranks.run(1, one_step, {}, thirds)[0]
    assert_same(ranks.run(2, one_step, {"pipeline": 2, "virtual_pipeline": 2}, thirds)[0], wanted)


@pytest.mark.parametrize(
    ("parallel", "world_size", "batching", "recompute"),
    [
        ({}, 1, Batching("padded", 1), "none"),
        ({}, 2, Batching("packed", tokens=48), "full"),
        ({"pipeline": 2}, 4, Batching("padded", 2), "none"),
        ({"pipeline": 2, "virtual_pipeline": 2}, 2, Batching("padded", NUM_SEQUENCES // 3), "full"),
        ({"tensor": 2, "sequence": True, "context": 2, "expert": 2}, 4, Batching("packed", tokens=64), "none"),
    ],
    ids=str,
)
def test_the_global_scope_depends_on_no_microbatches(ranks, one_process, parallel, world_size, batching, recompute):
    """One microbatch of the whole batch is the definition of both scopes."""
    model = dataclasses.replace(GLOBAL, recompute=recompute)
    assert_same(ranks.run(world_size, one_step, parallel, batching, model)[0], one_process)


def second_batch(batches: int):
    """Return the report and the gradients of the last of some batches."""
    policy = build_policy({}, model=GLOBAL, batching=Batching("padded", 4))
    for seed in range(2 - batches, 2):
        report = policy.accumulate_gradients(build_batch_of_all_kinds(VOCAB_SIZE, seed), NLLLoss())
    return report, gradients(policy)


def test_the_global_scope_is_that_of_its_own_batch(ranks):
    assert_same(ranks.run(1, second_batch, 2)[0], ranks.run(1, second_batch, 1)[0])


def slope_and_gradient() -> tuple[float, float]:
    """Return d(loss + balancing loss)/dε along the routers' gradient, by central differences and by the gradient."""
    policy = build_policy({}, model=EXPERTS, batching=WHOLE)
    batch = build_batch_of_all_kinds(VOCAB_SIZE, seed=1)
    policy.accumulate_gradients(batch, NLLLoss())
    routers = {name: p for name, p in policy.model.model_chunks[0].named_parameters() if name.endswith("router.weight")}
    direction = {name: p.main_grad.clone() for name, p in routers.items()}
    norm = sum(d.square().sum() for d in direction.values()).sqrt().item()

    def objective(step: float) -> float:
        with torch.no_grad():
            for name, parameter in routers.items():
                parameter += step * direction[name] / norm
        report = policy.accumulate_gradients(batch, NLLLoss())
        return report["loss"] + report["router_aux_loss"]

    step = 5e-4  # with a longer step, tokens would change experts
    ahead = objective(step)
    behind = objective(-2 * step)
    return (ahead - behind) / (2 * step), norm


def test_the_gradient_is_that_of_loss_and_balancing_loss_together(ranks):
    slope, gradient = ranks.run(1, slope_and_gradient)[0]
    assert slope == pytest.approx(gradient, rel=1e-2)


def reported(coefficient: float) -> dict[str, float]:
    return one_step({}, WHOLE, dataclasses.replace(EXPERTS, router_aux_loss=coefficient))[0]


def test_the_balancing_loss_is_off_by_default_and_proportional_to_its_coefficient(ranks):
    off, half, one = (ranks.run(1, reported, coefficient)[0] for coefficient in (0.0, 0.5, 1.0))
    assert "router_aux_loss" not in off
    assert one["router_aux_loss"] == pytest.approx(2 * half["router_aux_loss"], rel=1e-6)
    # A layer's loss is 1 if all experts get as many tokens, and up to E / k if all tokens go to the same k experts.
    assert MODEL.num_layers <= one["router_aux_loss"] < 2 * MODEL.num_layers
