"""Requests have random numbers of their own, and completions become a batch with the weights' version of each token."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import Completion, EngineFailed, Sampling, WeightSpan
from rl_megatron.generation.requests import derive_seed, draw_uniforms, make_requests
from rl_megatron.training.metrics import NonFiniteLoss

SAMPLING = Sampling(max_new_tokens=5, temperature=0.5, top_k=3)


def completion(
    request_id: str, ids: list[int], spans: list[tuple[int, int, int]], reason: Any = "length"
) -> Completion:
    logprobs = tuple(-float(number) - 0.5 for number in ids)
    return Completion(request_id, tuple(ids), logprobs, tuple(WeightSpan(*span) for span in spans), reason)


def batch_of(prompts: list[list[int]], completions: list[Completion]) -> Any:
    """Return the batch of prompts that an engine answers in this way."""
    engine: Any = SimpleNamespace(complete=lambda requests: completions)
    return generate(engine, prompts, SAMPLING, seed=0)


def test_a_requests_random_numbers_depend_on_its_seed_alone():
    few, many = make_requests([[1]], SAMPLING, seed=9), make_requests([[4, 5], [2], [3]], SAMPLING, seed=9)
    assert torch.equal(draw_uniforms(few, 4), draw_uniforms(many, 7)[:1, :4])
    assert torch.equal(draw_uniforms(many[::-1], 7), draw_uniforms(many, 7).flip(0))
    assert [request.request_id for request in many] == ["9-0", "9-1", "9-2"]
    seeds = {derive_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) == 10_000 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(-3, 0) != derive_seed(3, 0) and derive_seed(10**30, 1) < 1 << 63


def test_random_numbers_are_uniform_and_independent_along_requests_and_tokens():
    uniforms = draw_uniforms(make_requests([[1]] * 1000, SAMPLING, seed=0), 1000)
    assert uniforms.min() >= 0 and uniforms.max() < 1 and uniforms.unique().numel() == 1_000_000
    counts = torch.histc(uniforms, 100, 0, 1)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 99 + 5 * math.sqrt(2 * 99)
    for shifted in (uniforms.roll(1, 0), uniforms.roll(1, 1)):
        assert ((uniforms - 0.5) * (shifted - 0.5)).mean().abs() < 5 / 12 / 1000


def test_completions_become_a_right_padded_batch():
    completions = [
        completion("a", [7, 8, 9], [(4, 0, 1), (5, 1, 3)], "stop"),
        completion("b", [6], [(5, 0, 1)]),
        completion("c", [], [], "abort"),
    ]
    batch = batch_of([[1, 2], [3], [4, 4, 4, 4]], completions)
    assert batch["input_ids"].tolist() == [[1, 2, 7, 8, 9], [3, 6, 0, 0, 0], [4, 4, 4, 4, 0]]
    assert batch["input_lengths"].tolist() == [5, 2, 4] and batch["prompt_lengths"].tolist() == [2, 1, 4]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch["generation_logprobs"].tolist() == [[0, 0, -7.5, -8.5, -9.5], [0, -6.5, 0, 0, 0], [0] * 5]
    assert batch["token_weight_versions"].tolist() == [[-1, -1, 4, 5, 5], [-1, 5, -1, -1, -1], [-1] * 5]
    assert batch["weight_version"].tolist() == [4, 5, -1]
    assert batch["stopped"].tolist() == [True, False, False]
    assert batch["temperature"].tolist() == [0.5] * 3 and batch["top_k"].tolist() == [3] * 3
    assert batch["generation_logprobs"].dtype == batch["token_mask"].dtype == torch.float32


def test_a_nan_logprob_is_refused_with_the_number_of_its_token():
    good = completion("a", [7, 8, 9], [(4, 0, 3)])
    bad = Completion("b", (1, 2), (-1.0, math.nan), (WeightSpan(4, 0, 2),), "length")
    with pytest.raises(NonFiniteLoss, match="NaN or infinite at token 2 of a completion"):
        batch_of([[1], [2, 3]], [good, bad])


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans", "message"),
    [
        ((1, 2), (-1.0,), [(0, 0, 2)], "2 tokens came with 1 logprobs"),
        ((), (), [], "without any token"),
        ((1, 2), (-1.0, -1.0), [], "do not cover its 2 tokens"),
        ((1, 2), (-1.0, -1.0), [(0, 0, 1)], "do not cover its 2 tokens"),
        ((1, 2), (-1.0, -1.0), [(0, 0, 1), (1, 0, 2)], "do not cover its 2 tokens"),
        ((1, 2), (-1.0, -1.0), [(0, 0, 0), (1, 0, 2)], "do not cover its 2 tokens"),
    ],
)
def test_a_completion_whose_parts_do_not_fit_is_refused(ids, logprobs, spans, message):
    with pytest.raises(EngineFailed, match=f"request x: .*{message}"):
        Completion("x", ids, logprobs, tuple(WeightSpan(*span) for span in spans), "stop")


def test_routed_experts_become_a_key_with_minus_one_for_tokens_that_were_not_read():
    first, second = (torch.full((count, 2, 1), value, dtype=torch.int16) for count, value in ((4, 5), (1, 6)))
    answers = [
        replace(completion("a", [7, 8, 9], [(4, 0, 3)]), routed_experts=first),
        replace(completion("b", [6], [(4, 0, 1)]), routed_experts=second),
        completion("c", [], [], "abort"),
    ]
    experts = batch_of([[1, 2], [3], [4]], answers)["routed_experts"]
    assert experts.dtype == torch.int16 and experts.shape == (3, 5, 2, 1)
    assert experts[:, :, 0, 0].tolist() == [[5, 5, 5, 5, -1], [6, -1, -1, -1, -1], [-1] * 5]
    assert "routed_experts" not in batch_of([[4]], [completion("c", [5], [(4, 0, 1)])])


@pytest.mark.parametrize("experts", [None, torch.zeros(4, 2, 1), torch.zeros(5, 3, 1)])
def test_routed_experts_of_other_tokens_or_other_layers_are_refused(experts):
    answers = [
        replace(completion("a", [7], [(4, 0, 1)]), routed_experts=torch.zeros(1, 2, 1)),
        replace(completion("b", [7, 8, 9], [(4, 0, 3)]), routed_experts=experts),
    ]
    with pytest.raises(EngineFailed, match=r"request b: routed experts have shape .* need \(5, 2, 1\)"):
        batch_of([[1], [1, 2, 3]], answers)


def test_a_completion_with_routed_experts_survives_the_way_to_another_process():
    experts = torch.arange(8, dtype=torch.int16).view(4, 2, 1)
    sent = replace(completion("a", [7, 8], [(4, 0, 2)]), routed_experts=experts)
    received = pickle.loads(ForkingPickler.dumps(sent))
    assert received == sent and torch.equal(received.routed_experts, experts)
    assert pickle.loads(pickle.dumps(completion("a", [7], [(4, 0, 1)]))).routed_experts is None
