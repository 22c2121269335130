"""Ranks that should hold the same batch and weights: a difference of one bit is found, and its rank is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from rl_megatron.batching.batch import Batch
from rl_megatron.losses import NLLLoss
from rl_megatron.runs.desync import DesyncCheck, RanksDiffer
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, EXPERTS, MODEL, build_policy
from tests.parallel.test_layouts import random_batch

OVERLAP = dataclasses.replace(DISTRIBUTED_OPTIMIZER, overlap=True)


def flip_a_bit(policy, name: str) -> None:
    """Flip the lowest bit of one element of the first weight with `name` in its name, on rank 1 alone."""
    if dist.get_rank() == 1:
        weight = next(
            parameter
            for chunk in policy.model.model_chunks
            for own, parameter in chunk.named_parameters()
            if name in own
        )
        with torch.no_grad():
            weight.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def refusal(check: DesyncCheck, step: int, batch, policy) -> str:
    """Return the message of the check, or "" if the ranks agree."""
    try:
        check.check(step, Batch.from_whole(batch), {"policy": policy})
    except RanksDiffer as error:
        return str(error)
    return ""


def agreement(parallel: dict, has_experts: bool) -> list[str]:
    policy = build_policy(parallel, model=EXPERTS if has_experts else MODEL, optimizer=OVERLAP)
    check, batch = DesyncCheck(1), random_batch(8, 16, 0)
    found = [refusal(check, 1, batch, policy)]
    policy.train(batch, NLLLoss(), gbs=8)
    return [*found, refusal(check, 2, batch, policy)]


@pytest.mark.parametrize(
    ("parallel", "has_experts"),
    [({}, False), ({"tensor": 2, "sequence": True}, False), ({"pipeline": 2}, False), ({"context": 2}, True),
     ({"expert": 2}, True), ({"expert_tensor": 2}, True)],
    ids=str,
)  # fmt: skip
def test_ranks_that_train_together_agree(ranks, parallel, has_experts):
    assert ranks.run(2, agreement, parallel, has_experts) == [["", ""]] * 2


def flipped(parallel: dict, name: str, has_experts: bool) -> str:
    policy = build_policy(parallel, model=EXPERTS if has_experts else MODEL)
    flip_a_bit(policy, name)
    return refusal(DesyncCheck(0), 1, random_batch(8, 16, 0), policy)


@pytest.mark.parametrize(
    ("parallel", "name", "has_experts", "tensor"),
    [
        ({}, "linear_proj.weight", False, "decoder.layers.0.self_attention.linear_proj.weight"),
        ({"tensor": 2}, "final_layernorm.weight", False, "decoder.final_layernorm.weight"),
        ({"context": 2}, "linear_qkv.weight", False, "decoder.layers.0.self_attention.linear_qkv.weight"),
        ({}, ".experts.", True, ".experts."),
    ],
    ids=["data", "tensor", "context", "experts"],
)
def test_a_flipped_bit_is_found_with_its_rank_and_tensor(ranks, parallel, name, has_experts, tensor):
    for message in ranks.run(2, flipped, parallel, name, has_experts):
        assert message.startswith("ranks do not have the same weights of the policy: ")
        assert tensor in message and "of rank 1 differs from that of rank 0" in message


def other_batches(key: str) -> str:
    policy, batch = build_policy({}), random_batch(8, 16, 0)
    batch["rewards"] = torch.zeros(8)
    if dist.get_rank() == 1:
        batch[key] = batch[key].clone()
        batch[key].view(-1)[5] += 1
    return refusal(DesyncCheck(0), 1, batch, policy)


@pytest.mark.parametrize("key", ["input_ids", "rewards"])
def test_another_batch_is_found_with_its_rank(ranks, key):
    for message in ranks.run(2, other_batches, key):
        assert f"the same batch: {key} of rank 1 differs from that of rank 0" in message


def steps_of_checks(every: int) -> list[int]:
    """Return the steps before which a flipped bit is found, when training begins with step 4."""
    policy, batch, check, found = build_policy({}), random_batch(8, 16, 0), DesyncCheck(every), []
    assert refusal(check, 4, batch, policy) == ""
    flip_a_bit(policy, "linear_proj.weight")
    for step in range(4, 10):
        found += [step] if refusal(check, step, batch, policy) else []
    return found


@pytest.mark.parametrize(("every", "steps"), [(0, []), (3, [6, 9])])
def test_the_check_comes_before_the_first_step_and_every_so_many(ranks, every, steps):
    assert ranks.run(2, steps_of_checks, every)[0] == steps
