"""What a policy and its embedded engine do with empty, tiny, masked and contradictory batches, on two ranks.

Every rank has to refuse a batch, or none: ranks that fail alone leave the others waiting. One call on the ranks of a
layout runs the whole table, because starting a policy takes longer than a row.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.losses import NLLLoss
from tests.parallel.layouts import MODEL, VOCAB_SIZE, build_policy, weights
from tests.parallel.test_layouts import random_batch

WIDTH = 16
DATA, TENSOR, PIPELINE = {}, {"tensor": 2}, {"pipeline": 2}
KINDS = {"padded": Batching("padded", 2)} | {kind: Batching(kind, tokens=64) for kind in ("dynamic", "packed")}


def batch(sequences: int = 4, **changes: Any) -> BatchedDataDict:
    """Return a batch with other values under some keys, and without those that are None."""
    whole = random_batch(4, WIDTH, 0).slice(0, sequences) | changes
    return BatchedDataDict({key: value for key, value in whole.items() if value is not None})


def first_tokens(width: int) -> BatchedDataDict:
    cut = {key: value[:, :width] if value.dim() > 1 else value for key, value in batch().items()}
    return BatchedDataDict(cut | {"input_lengths": torch.full((4,), width)})


def with_id(token: int) -> BatchedDataDict:
    """Return a batch with an id in its second sequence, which the second data-parallel rank has."""
    ids = batch()["input_ids"].clone()
    ids[2, 1] = token
    return batch(input_ids=ids)


NO_TOKEN = torch.zeros(4, WIDTH)
UNCHANGED, TRAINS = "unchanged weights, and a loss of 0", "other weights"
OUTSIDE = "is not a token of the vocabulary, 0 … 49"


class Row(NamedTuple):
    """An input of a policy's method, and the words of the error, or what becomes of the weights, or a value."""

    callable: str
    input: str
    call: Callable[..., Any]
    expected: Any


def train(data: Callable[[], BatchedDataDict], **options: Any) -> Callable[..., Any]:
    return lambda policy, score, engine: policy.train(data(), NLLLoss(), **options)


def logprobs(data: Callable[[], BatchedDataDict], *arguments: Any) -> Callable[..., Any]:
    return lambda policy, score, engine: policy.get_logprobs(data(), *arguments)["logprobs"]


def scores(data: Callable[[], BatchedDataDict]) -> Callable[..., Any]:
    return lambda policy, score, engine: score.score(data())["scores"]


def generating(prompts: list[list[int]], **sampling: Any) -> Callable[..., Any]:
    settings = {"max_new_tokens": 2} | sampling
    return lambda policy, score, engine: generate(engine, prompts, Sampling(**settings), 0)


def of_kind(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def on(policy: Any, score: Any, engine: Any) -> Any:
        whole, policy.batching = policy.batching, KINDS[kind]
        try:
            return call(policy, score, engine)
        finally:
            policy.batching = whole

    return on


ROWS = [
    *(
        Row(name, f"{what}, {kind}", of_kind(kind, call), expected)
        for kind in KINDS
        for name, what, call, expected in (
            ("train", "one sequence, fewer than ranks", train(lambda: batch(1)), TRAINS),
            ("train", "one token", train(lambda: first_tokens(1)), UNCHANGED),
            ("train", "all tokens masked", train(lambda: batch(token_mask=NO_TOKEN)), UNCHANGED),
            ("train", "all samples masked", train(lambda: batch(sample_mask=torch.zeros(4))), UNCHANGED),
            ("train", "no token", train(lambda: first_tokens(0)), "the batch has no token"),
            ("get_logprobs", "one token", logprobs(lambda: first_tokens(1)), torch.zeros(4, 1)),
            ("get_logprobs", "no token", logprobs(lambda: first_tokens(0)), "the batch has no token"),
        )
    ),
    Row("train", "empty", train(lambda: batch(0)), "the batch has no sequence"),
    Row("train", "a token past the vocabulary", train(lambda: with_id(VOCAB_SIZE)), f"input_ids[2, 1]=50 {OUTSIDE}"),
    Row("train", "a negative token", train(lambda: with_id(-1)), f"input_ids[2, 1]=-1 {OUTSIDE}"),
    Row("train", "a key per sequence as wide as the tokens", train(lambda: batch(features=torch.ones(4, WIDTH))),
        TRAINS),
    Row("train", "a mask of another width", train(lambda: batch(token_mask=torch.ones(4, 9))),
        "token_mask (4, 9) must have the shape of input_ids, (4, 16)"),
    Row("train", "a key of other sequences", train(lambda: batch(rewards=torch.ones(3))), "keys disagree"),
    Row("train", "lengths above the width", train(lambda: batch(input_lengths=torch.full((4,), 17))),
        "input_lengths[0]=17 does not fit sequences of 16 tokens"),
    Row("train", "negative lengths", train(lambda: batch(input_lengths=torch.full((4,), -1))), "input_lengths[0]=-1"),
    Row("train", "lengths that are no integers", train(lambda: batch(input_lengths=torch.ones(4))),
        "input_lengths must be a tensor of integers"),
    Row("train", "ids that are no integers", train(lambda: batch(input_ids=torch.ones(4, WIDTH))),
        "input_ids must be a tensor of integers"),
    Row("train", "a longer batch than the model takes", train(lambda: BatchedDataDict(random_batch(4, 65, 0))),
        "model.max_sequence_length=64"),
    *(
        Row("train", f"no {key}", train(lambda key=key: batch(**{key: None, f"{key}s": torch.ones(4, WIDTH)})),
            f"the batch needs '{key}'; did you mean '{key}s'?")
        for key in ("input_ids", "token_mask", "sample_mask")
    ),
    Row("train", "a plain dict", train(lambda: dict(batch())), TRAINS),
    *(
        Row("train", f"{options}", train(batch, **options), words)
        for options, words in (
            ({"gbs": 0}, "gbs must be at least 1 and a whole number, got 0"),
            ({"gbs": -1}, "gbs must be at least 1 and a whole number, got -1"),
            ({"mbs": 0}, "mbs must be at least 1 and a whole number, got 0"),
            ({"sizes": []}, "sizes [] must add up to the batch, which has 4 sequences"),
            ({"sizes": [2]}, "sizes [2] must add up to the batch, which has 4 sequences"),
            ({"sizes": [0, 4]}, "sizes[0] must be at least 1 and a whole number, got 0"),
            ({"gbs": 100, "mbs": 100}, TRAINS),
        )
    ),
    Row("accumulate_gradients", "empty",
        lambda policy, score, engine: policy.accumulate_gradients(batch(0), NLLLoss()), "the batch has no sequence"),
    Row("plan", "empty", lambda policy, score, engine: policy.plan(batch(0), NLLLoss()), "the batch has no sequence"),
    Row("get_logprobs", "empty", logprobs(lambda: batch(0)), "the batch has no sequence"),
    Row("get_logprobs", "a token past the vocabulary", logprobs(lambda: with_id(VOCAB_SIZE)), OUTSIDE),
    Row("get_logprobs", "a negative token", logprobs(lambda: with_id(-1)), OUTSIDE),
    Row("get_logprobs", "no ids", logprobs(lambda: batch(input_ids=None)), "the batch needs 'input_ids'"),
    Row("get_logprobs", "mbs 0", logprobs(batch, 0), "mbs must be at least 1"),
    Row("get_logprobs", "temperature 0", logprobs(lambda: batch(temperature=torch.zeros(4))), "positive and finite"),
    Row("get_topk_logits", "k 0", lambda policy, score, engine: policy.get_topk_logits(batch(), 0), "k=0 must be"),
    Row("get_reference_policy_logprobs", "no reference",
        lambda policy, score, engine: policy.get_reference_policy_logprobs(batch()), "call freeze_reference() first"),
    Row("get_values", "one token", lambda policy, score, engine: score.get_values(first_tokens(1))["values"],
        torch.zeros(4, 1)),
    Row("score", "empty", scores(lambda: batch(0)), "the batch has no sequence"),
    Row("score", "an empty answer reads the first token",
        lambda policy, score, engine: (
            score.score(batch(token_mask=NO_TOKEN, input_lengths=None))["scores"]
            - score.score(batch(token_mask=NO_TOKEN, input_lengths=torch.ones(4, dtype=torch.long)))["scores"]
        ), torch.zeros(4)),
    Row("score", "length 0", lambda policy, score, engine: score.score(
        batch(token_mask=NO_TOKEN, input_lengths=torch.tensor([0, 1, 2, 3])))["scores"][:1], torch.zeros(1)),
    Row("score", "neither mask nor lengths", scores(lambda: batch(token_mask=None, input_lengths=None)),
        "'input_lengths' or 'token_mask'"),
    Row("score", "of a language model", lambda policy, score, engine: policy.score(batch()), "head='score'"),
    Row("generate", "empty", generating([]), "needs at least one prompt"),
    Row("generate", "an empty prompt", generating([[1], []]), "a prompt is empty"),
    Row("generate", "a token past the vocabulary", generating([[1], [VOCAB_SIZE]]), "the token id 50"),
    Row("generate", "a negative token", generating([[1], [-1]]), "the token id -1"),
    Row("generate", "a prompt that leaves no space", generating([[1] * MODEL.max_sequence_length]), "max_new_tokens=2"),
    Row("generate", "one token of one prompt, fewer than ranks",
        lambda *all_: generating([[1]], max_new_tokens=1)(*all_)["input_lengths"], torch.tensor([2])),
    Row("generate", "top_k above the vocabulary",
        lambda *all_: generating([[1]], max_new_tokens=1, top_k=1000)(*all_)["input_lengths"], torch.tensor([2])),
]  # fmt: skip


def outcomes(parallel: dict[str, int]) -> list[Any]:
    """Return, for each row, the error's message, or what became of the weights, or the value."""
    policy, score = build_policy(parallel), build_policy(parallel, head="score")
    policy.batching, engine = KINDS["padded"], EmbeddedEngine(policy)
    found: list[Any] = []
    for row in ROWS:
        stays, moves = (isinstance(row.expected, str) and row.expected == what for what in (UNCHANGED, TRAINS))
        version, before = policy.weight_version, copy.deepcopy(weights(policy)) if stays else {}
        try:
            value = row.call(policy, score, engine)
        except (ValueError, KeyError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        if stays:  # only rank 0 has whole weights
            kept = all(torch.equal(weight, before[name]) for name, weight in weights(policy).items())
            value = UNCHANGED if kept and value["loss"] == value["num_updates"] == 0 else value
        elif moves:
            value = TRAINS if policy.weight_version != version and value["num_updates"] == 1 else value
        found.append(value)
    return found


@pytest.mark.parametrize("parallel", [pytest.param(DATA, marks=pytest.mark.fast), TENSOR, PIPELINE], ids=str)
def test_an_edge_has_the_outcome_of_its_row_on_every_rank(ranks, parallel):
    wrong = []
    for rank, found in enumerate(ranks.run(2, outcomes, parallel)):
        for row, value in zip(ROWS, found, strict=True):
            if isinstance(row.expected, torch.Tensor):
                matches = isinstance(value, torch.Tensor) and torch.allclose(value.double(), row.expected.double())
            else:
                matches = isinstance(value, str) and re.search(re.escape(row.expected), value) is not None
            if not matches:
                wrong.append(f"rank {rank}, {row.callable}, {row.input}: {value!r}, not {row.expected!r}")
    assert not wrong, "\n".join(wrong)
