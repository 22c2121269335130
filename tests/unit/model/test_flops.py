"""The closed forms of FLOPs equal what torch's FlopCounterMode counts while a `MegatronPolicy` computes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from rl_megatron.batching.config import Batching
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.nll import NLLLoss
from rl_megatron.losses.value import MSEValueLoss
from rl_megatron.model.flops import count_forward_flops, count_model_flops
from rl_megatron.model.layers import norms
from rl_megatron.model.microbatch_shape import MicrobatchShape
from rl_megatron.model.sharded_shape import Head, ShardedShape
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.runner import FusedHead
from tests.parallel.layouts import MODEL, build_policy
from tests.unit.model.test_sharded_shape import (
    DELTA,
    EXPERTS,
    GEMMA,
    GLM,
    LATENT,
    LATENT_QUERIES,
    SHARED,
    SINKS,
    UNTIED,
    VOCAB_SIZE,
)

PADDED, PACKED = Batching(sequences=2), Batching("packed", tokens=64)
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
BLOCK_TOKENS = 16
PROMPT_TOKENS = 5
SHARED_PREFIXES = Batching("packed", tokens=96, share_prefixes=True)
TREES = (24, 20, 24, 24, 13, 24, 20, 17)  # sequences whose batch has common beginnings
EQUAL, MIXED = (24,) * 8, (24, 9, 17, 12, 6, 24, 20, 11)
# torch has no formulas for these operators of the CPU.
CPU_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
    torch.ops.aten.linalg_solve_triangular: lambda lower, right, **_: math.prod(lower) * right[-1],
    torch.ops.aten.addmm_: lambda out, *shapes, **_: 2 * math.prod(shapes[0]) * shapes[1][1],  # adds in place
}

# (ranks, model, degrees, batching, lengths, head, whether the head is fused)
CASES: dict[str, tuple[int, ModelConfig, dict[str, Any], Batching, tuple[int, ...], Head, bool]] = {
    "one rank, padded": (1, UNTIED, {}, PADDED, EQUAL, "lm", False),
    "one rank, padded, mixed lengths, fused head": (1, UNTIED, {}, PADDED, MIXED, "lm", True),
    "one rank, packed, mixed lengths": (1, MODEL, {}, PACKED, MIXED, "lm", False),
    "one rank, packed, mixed lengths, fused head": (1, MODEL, {}, PACKED, MIXED, "lm", True),
    "full recomputation": (1, replace(MODEL, **FULL), {}, PACKED, EQUAL, "lm", True),
    "selective recomputation": (1, replace(MODEL, **SELECTIVE), {}, PADDED, EQUAL, "lm", False),
    "tensor 2": (2, MODEL, {"tensor": 2}, PACKED, EQUAL, "lm", True),
    "tensor 2, sequence, fused head": (2, MODEL, {"tensor": 2, "sequence": True}, PACKED, MIXED, "lm", True),
    "tensor 2, sequence, padded, fused head": (2, MODEL, {"tensor": 2, "sequence": True}, PADDED, EQUAL, "lm", True),
    "context 2, fused head": (2, MODEL, {"context": 2}, PACKED, MIXED, "lm", True),
    "context 2, padded": (2, UNTIED, {"context": 2}, PADDED, EQUAL, "lm", False),
    "context 2, windows": (4, GEMMA, {"context": 2, "tensor": 2}, PACKED, EQUAL, "lm", True),
    "pipeline 2, data 2": (4, GEMMA, {"pipeline": 2}, PACKED, EQUAL, "lm", False),
    "interleaved, full recomputation": (
        2, replace(MODEL, **FULL), {"pipeline": 2, "virtual_pipeline": 2}, PADDED, EQUAL, "lm", False,
    ),
    "matrices of experts split": (2, EXPERTS, {"expert_tensor": 2}, PACKED, EQUAL, "lm", False),
    "experts split": (2, EXPERTS, {"expert": 2}, PACKED, MIXED, "lm", True),
    "shared experts, tensor 2": (
        4, SHARED, {"tensor": 2, "sequence": True, "expert": 2}, PADDED, EQUAL, "lm", False,
    ),
    "biased experts, partial rotation": (2, GLM, {"expert": 2}, PACKED, EQUAL, "lm", True),
    "sinks and biases": (2, SINKS, {"tensor": 2, "sequence": True}, PACKED, MIXED, "lm", True),
    "latent attention": (2, LATENT, {"tensor": 2, "sequence": True}, PACKED, EQUAL, "lm", False),
    "latent attention, whole queries": (2, LATENT_QUERIES, {"tensor": 2}, PACKED, EQUAL, "lm", True),
    "delta rule, chunks": (1, DELTA, {}, Batching("packed", tokens=256), (150, 70, 24), "lm", False),
    "delta rule, tensor 2, selective recomputation": (
        2, replace(DELTA, **SELECTIVE), {"tensor": 2, "sequence": True}, PACKED, MIXED, "lm", True,
    ),
    "delta rule, context 2": (2, DELTA, {"context": 2}, PACKED, EQUAL, "lm", False),
    "shared prefixes": (1, MODEL, {}, SHARED_PREFIXES, TREES, "lm", True),
    "shared prefixes, windows, full recomputation": (
        1, replace(GEMMA, **FULL), {}, SHARED_PREFIXES, TREES, "lm", False,
    ),
    "shared prefixes, context 2, windows": (
        4, GEMMA, {"context": 2, "tensor": 2, "sequence": True}, SHARED_PREFIXES, TREES, "lm", True,
    ),
    "shared prefixes, delta rule, tensor 2": (
        2, DELTA, {"tensor": 2, "sequence": True}, replace(SHARED_PREFIXES, tokens=512), (99, 99, 90, 20), "lm", True,
    ),
    "shared prefixes, delta rule, context 2": (2, DELTA, {"context": 2}, SHARED_PREFIXES, TREES, "lm", False),
    "score head": (1, MODEL, {}, PADDED, EQUAL, "score", False),
}  # fmt: skip


def batch(lengths: tuple[int, ...], head: Head) -> BatchedDataDict:
    """Return sequences, of which the tokens after the first few are learned from. Four each may share tokens."""
    shape = len(lengths), max(lengths)
    positions = torch.arange(shape[1])
    within = positions < torch.tensor(lengths)[:, None]
    ids = torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(0))
    for number in range(1, len(lengths), 2):
        ids[number, : min(lengths) - 3] = ids[number - 1, : min(lengths) - 3]
        if number % 4 == 1 and number + 1 < len(lengths):
            ids[number + 1, : min(lengths) - 6] = ids[number, : min(lengths) - 6]
    data = {
        PREFIX_SET: torch.arange(len(lengths)) // 4,
        "input_ids": ids,
        "input_lengths": torch.tensor(lengths),
        "token_mask": (within & (positions >= PROMPT_TOKENS)).float(),
        "sample_mask": torch.ones(len(lengths)),
    }
    return BatchedDataDict(
        data | ({"values": torch.zeros(shape), "returns": torch.ones(shape)} if head == "score" else {})
    )


def counted_and_computed(case: str) -> tuple[list[int], list[int]]:
    """Return the FLOPs of training on a batch and of its logprobs: counted by torch, and by the formulas."""
    world_size, model, degrees, batching, lengths, head, fused = CASES[case]
    policy = build_policy(
        degrees, model, vocab_size=VOCAB_SIZE, head=head, batching=batching,
        fused_head=FusedHead(BLOCK_TOKENS) if fused else None,
    )  # fmt: skip
    loss = NLLLoss() if head == "lm" else MSEValueLoss()
    data, counts = batch(lengths, head), []
    for compute in (lambda: policy.accumulate_gradients(data, loss), lambda: infer(policy, data, head)):
        with (
            patch.object(norms, "apply_rms_norm", norm_of_gpus),
            FlopCounterMode(display=False, custom_mapping=CPU_FORMULAS) as counter,
        ):
            compute()
        counts.append(counter.get_total_flops())

    shape = ShardedShape(model, ParallelConfig(**degrees), world_size, VOCAB_SIZE, head)
    topology, formulas = policy.topology, [0, 0]
    for microbatch in policy.plan(data, loss).microbatches:
        if batching.share_prefixes:
            assert microbatch.tree is not None, "nothing is shared"
        planned = find_shape(microbatch, topology)
        for number, all_tokens in enumerate((False, True)):
            flops = count_forward_flops(
                shape, topology.pipeline_rank, planned, fused_head=fused, all_tokens=all_tokens,
                block_tokens=BLOCK_TOKENS, context_rank=topology.groups.cp.rank(),
            )  # fmt: skip
            formulas[number] += flops.total if all_tokens else flops.with_backward(model.recompute)
        if model.kv_lora_rank is not None:  # keys and values differ in size, so the CPU keeps scores, as no GPU does
            formulas[0] -= flops.attention_backward - 2 * flops.attention
    return counts, formulas


def find_shape(microbatch: Microbatch, topology: Topology) -> MicrobatchShape:
    width = microbatch.batch["input_ids"].size(1)
    if microbatch.tree is not None:
        return MicrobatchShape.from_tree(microbatch.tree, topology, width, PROMPT_TOKENS)
    return MicrobatchShape.from_lengths(
        microbatch.lengths or microbatch.batch["input_lengths"].tolist(), topology, prompt_tokens=PROMPT_TOKENS,
        is_packed=microbatch.lengths is not None, width=width,
    )  # fmt: skip


def infer(policy: MegatronPolicy, data: BatchedDataDict, head: Head) -> None:
    if head == "lm":
        policy.get_logprobs(data)
    else:
        policy.get_values(data)


def norm_of_gpus(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Return RMSNorm as GPUs compute it. The backward pass of our norm for CPUs has two small matrix products."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@pytest.mark.change
@pytest.mark.parametrize("case", CASES)
def test_the_closed_forms_equal_the_flops_that_torch_counts(ranks, case):
    world_size, model = CASES[case][:2]
    results = ranks.run(world_size, counted_and_computed, case)
    if model.num_experts is None:
        for counted, computed in results:
            assert counted == computed
    else:  # routers send ranks different numbers of tokens
        counted, computed = ([sum(each) for each in zip(*side, strict=True)] for side in zip(*results, strict=True))
        assert counted == computed


@pytest.mark.parametrize("window", [None, 5])
def test_needed_pairs_are_those_of_causal_attention_of_which_the_diagonal_counts_half(window):
    layout = SimpleNamespace(context=1, sequence_multiple=1, data=1)
    shape = MicrobatchShape.from_lengths([24, 9], layout, is_packed=True)
    spans = [(length, min(length, window or length)) for length in (24, 9)]
    attended = sum(min(position + 1, span) for length, span in spans for position in range(length))
    assert shape.needed_pairs(1, window) == attended - sum(span / 2 for _, span in spans)


@pytest.mark.parametrize("model", [MODEL, GEMMA, DELTA], ids=["dense", "windows", "delta rule"])
def test_shared_tokens_count_once_in_the_mfu(model):
    tree = PrefixTree.build([30, 21], [0, 14])
    both, prompt = (count_model_flops(model, VOCAB_SIZE, "lm", lengths) for lengths in ([30, 21], [14]))
    assert count_model_flops(model, VOCAB_SIZE, "lm", [30, 21], tree) == pytest.approx(both - prompt, rel=1e-12)


def test_attention_takes_as_long_under_context_as_under_tensor_parallelism():
    """torch counts causal attention as if it were whole, but only where a rank has whole sequences."""
    found = {}
    for name in ("tensor", "context"):
        parallel = ParallelConfig(**{name: 2})
        layout = SimpleNamespace(context=parallel.context, sequence_multiple=4, data=1)
        flops = count_forward_flops(
            ShardedShape(UNTIED, parallel, 2, VOCAB_SIZE), 0,
            MicrobatchShape.from_lengths([64], layout, is_packed=True), fused_head=True,
        )  # fmt: skip
        found[name] = flops.attention, flops.computed.attention
    assert found["tensor"][0] > found["context"][0]
    assert found["tensor"][1] == found["context"][1]
