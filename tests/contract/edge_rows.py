"""The table of edges: a public callable, a degenerate input, and the one thing that has to come of it.

A row is (callable, input, call, expectation). The expectation is a value, compared exactly with NaN equal to NaN, or
`refused("…")`: an error with these words. Rows that need ranks are in tests/parallel/test_policy_edges.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import rl_megatron
from rl_megatron.algorithms import advantages as A
from rl_megatron.batching import packing, rank_plan
from rl_megatron.batching.config import Batching, DynamicPlanArgs, PackingPlanArgs
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch_plan import plan_dynamic_batching, plan_padded, plan_sequence_packing
from rl_megatron.compat.nemo_rl.batched_data_dict import BatchedDataDict as NemoBatch
from rl_megatron.compat.nemo_rl.errors import RangeError, RuleError
from rl_megatron.data.batch import BatchedDataDict, Padding, common_size, score_positions, span_mask
from rl_megatron.evaluation import statistics as E
from rl_megatron.generation.completion_batch import check_requests, make_completion_batch
from rl_megatron.generation.interfaces import Request, Sampling
from rl_megatron.generation.sampling import sample
from rl_megatron.logprobs import (
    SamplingFilter,
    linear_logprobs,
    vocab_parallel_kl,
    vocab_parallel_logprobs,
    vocab_parallel_soft_cross_entropy,
    vocab_parallel_top_k,
    vocab_subset,
)
from rl_megatron.losses import PPOLoss, build_loss
from rl_megatron.losses import functional as F
from rl_megatron.rollouts.statistics import informative_groups

T, nan, inf = torch.tensor, math.nan, math.inf
NONE, FLAT = torch.zeros(0), torch.zeros(2, 0)  # no sample, and two sequences without a token
ONE = torch.ones(1, 1)
ROW = T([[0.0, 1.0, 2.0, 3.0, 4.0]])  # logits of five tokens
LSE = torch.logsumexp(ROW, -1).item()


@dataclass(frozen=True)
class Refused:
    """An error of this kind, whose message has these words."""

    words: str
    kind: type[Exception] = ValueError


def refused(words: str, kind: type[Exception] = ValueError) -> Refused:
    return Refused(re.escape(words), kind)


class Row(NamedTuple):
    callable: str
    input: str
    call: Callable[[], Any]
    expected: Any

    def __str__(self) -> str:
        return f"{self.callable}-{self.input}"


class OneRank:
    """A layout of one rank."""

    data = context = sequence_multiple = 1


def batch_of(**values: Any) -> BatchedDataDict:
    return BatchedDataDict(values)


def nemo(**values: Any) -> NemoBatch:
    return NemoBatch(values)


def ids(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.long)


def planned(lengths: list[int], width: int = 3, kind: str = "padded", shards: int = 1, group_size: int = 1) -> Any:
    return rank_plan.plan_lengths(lengths, width, Batching(kind), OneRank, shards, group_size).plan.sequences


DYNAMIC = {"max_tokens_per_microbatch": 4}
LENGTHS = {"input_ids": ids(2, 2)}
GROUPS = "do not form groups of 3"
COUNT = "must be at least 1 and a whole number"
SHAPES = "must have the same shape"
POSITIVE = "must be above 0"
NEGATIVE = "must not be negative"
ALL_MASKED, MASK = torch.zeros(2, 3), torch.ones(2, 3)
TWO = T([1.0, 2.0])
PADS = Padding(pad_id=7, multiple=2)


def estimator_rows() -> list[Row]:
    """Every estimator that compares groups, with each group size that forms none."""
    turns = torch.zeros(2, 3, dtype=torch.long)
    estimators: dict[str, Callable[[Any], Any]] = {
        "group_relative": lambda size: A.group_relative(TWO, size),
        "informative_groups": lambda size: informative_groups(TWO, size),
        "optimal_baseline": lambda size: A.optimal_baseline(TWO, size, MASK),
        "reinforce_plus_plus_baseline": lambda size: A.reinforce_plus_plus_baseline(TWO, size, MASK),
        "group_decoupled": lambda size: A.group_decoupled(MASK, torch.ones(3), size),
        "group_relative_turns": lambda size: A.group_relative_turns(MASK, turns, size),
        "group_relative_steps": lambda size: A.group_relative_steps(MASK, turns, size),
    }
    sizes = {
        "group of 0": (0, COUNT),
        "group of -1": (-1, COUNT),
        "group of 2.0": (2.0, COUNT),
        "groups of 3": (3, GROUPS),
    }
    return [
        Row(name, what, lambda call=call, size=size: call(size), refused(words))
        for name, call in estimators.items()
        for what, (size, words) in sizes.items()
    ]


ADVANTAGES = [
    Row("group_relative", "empty", lambda: A.group_relative(NONE, 2), NONE),
    Row("group_relative", "one sequence", lambda: A.group_relative(T([3.0]), 1), T([0.0])),
    Row("group_relative", "one of each group, left out", lambda: A.group_relative(T([3.0]), 1, leave_one_out=True),
        T([0.0])),
    Row("group_relative", "zero variance", lambda: A.group_relative(T([0.1] * 4), 4), torch.zeros(4)),
    Row("group_relative", "all masked", lambda: A.group_relative(T([nan, 1.0]), 2, sample_mask=torch.zeros(2)),
        torch.zeros(2)),
    Row("group_relative", "NaN stays in its group",
        lambda: A.group_relative(T([1.0, nan, 0.0, 2.0]), 2, normalize_std=False), T([nan, nan, -1.0, 1.0])),
    Row("group_relative", "masked NaN", lambda: A.group_relative(T([1.0, nan]), 2, sample_mask=T([1, 0])),
        torch.zeros(2)),
    Row("group_relative", "mask of other samples", lambda: A.group_relative(TWO, 1, sample_mask=T([1])),
        refused("must have the same number of samples")),
    Row("group_relative", "rewards of tokens", lambda: A.group_relative(MASK, 2),
        refused("must be one reward per sample")),
    Row("informative_groups", "empty", lambda: informative_groups(NONE, 2), NONE.bool()),
    Row("informative_groups", "all masked", lambda: informative_groups(TWO, 2, torch.zeros(2)), T([False])),
    Row("optimal_baseline", "empty", lambda: A.optimal_baseline(NONE, 2, torch.zeros(0, 3)), NONE),
    Row("optimal_baseline", "all masked", lambda: A.optimal_baseline(TWO, 2, ALL_MASKED), torch.zeros(2)),
    Row("optimal_baseline", "mask of other samples", lambda: A.optimal_baseline(TWO, 2, torch.ones(3, 3)),
        refused("must have the same number of samples")),
    Row("reinforce_plus_plus_baseline", "empty", lambda: A.reinforce_plus_plus_baseline(NONE, 2, torch.zeros(0, 3)),
        torch.zeros(0, 3)),
    Row("reinforce_plus_plus_baseline", "mask of other samples",
        lambda: A.reinforce_plus_plus_baseline(TWO, 2, torch.ones(3, 3)),
        refused("must have the same number of samples")),
    Row("reinforce_plus_plus", "empty", lambda: A.reinforce_plus_plus(torch.zeros(0, 3), torch.zeros(0, 3)),
        torch.zeros(0, 3)),
    Row("reinforce_plus_plus", "no token", lambda: A.reinforce_plus_plus(FLAT, FLAT), FLAT),
    Row("reinforce_plus_plus", "one token", lambda: A.reinforce_plus_plus(ONE, ONE), torch.zeros(1, 1)),
    Row("generalized_advantages", "no token",
        lambda: A.generalized_advantages(FLAT, FLAT, FLAT, discount=1, gae_lambda=1), (FLAT, FLAT)),
    Row("generalized_advantages", "masked NaN",
        lambda: A.generalized_advantages(T([[nan, 1.0]]), T([[nan, 0.5]]), T([[0, 1]]), discount=1, gae_lambda=1),
        (T([[0.0, 0.5]]), T([[0.0, 1.0]]))),
    Row("whiten", "empty", lambda: A.whiten(NONE[:, None], NONE[:, None]), NONE[:, None]),
    Row("whiten", "one token", lambda: A.whiten(3 * ONE, ONE), torch.zeros(1, 1)),
    Row("whiten", "all masked", lambda: A.whiten(nan * MASK, ALL_MASKED), ALL_MASKED),
    Row("whiten", "NaN stays visible", lambda: A.whiten(T([[1.0, nan]]), torch.ones(1, 2)), T([[nan, nan]])),
    Row("whiten", "other width", lambda: A.whiten(MASK, torch.ones(2, 2)), refused("must have one shape")),
    Row("token_rewards", "all masked", lambda: A.token_rewards(T([nan, 1.0]), ALL_MASKED, None, 0.1), ALL_MASKED),
    Row("token_rewards", "no token", lambda: A.token_rewards(TWO, FLAT, None, 0.1), FLAT),
    Row("token_rewards", "masked NaN of the KL",
        lambda: A.token_rewards(T([1.0]), T([[0, 1]]), T([[nan, 0.0]]), 0.5), T([[0.0, 1.0]])),
    Row("group_decoupled", "empty", lambda: A.group_decoupled(torch.zeros(0, 2), torch.ones(2), 2), NONE),
    Row("group_decoupled", "no scores", lambda: A.group_decoupled(nan * MASK, torch.ones(3), 2), torch.zeros(2)),
    Row("group_decoupled", "equal but for a missing score",
        lambda: A.group_decoupled(T([[0.1]] * 7 + [[nan]] + [[0.0], [1.0]] * 4), torch.ones(1), 8)[:7], torch.zeros(7)),
    Row("group_decoupled", "infinite stays visible",
        lambda: A.group_decoupled(T([[inf], [0.0]]), torch.ones(1), 2), T([nan, nan])),
    Row("group_decoupled", "no function", lambda: A.group_decoupled(FLAT, NONE, 2), refused("with K ≥ 1")),
    Row("group_decoupled", "one weight for three", lambda: A.group_decoupled(MASK, torch.ones(1), 2),
        refused("must be [K], one for each function of scores (2, 3)")),
    Row("group_relative_turns", "empty", lambda: A.group_relative_turns(torch.zeros(0, 3), ids(0, 3), 2),
        torch.zeros(0, 3)),
    Row("group_relative_turns", "no token", lambda: A.group_relative_turns(FLAT, ids(2, 0), 2), FLAT),
    Row("group_relative_turns", "all masked", lambda: A.group_relative_turns(nan * MASK, -ids(2, 3), 2), ALL_MASKED),
    Row("group_relative_turns", "other width", lambda: A.group_relative_turns(MASK, ids(2, 2), 2),
        refused("must have one shape [B, S]")),
    Row("group_relative_steps", "empty", lambda: A.group_relative_steps(torch.zeros(0, 3), ids(0, 3), 2),
        torch.zeros(0, 3)),
    Row("group_relative_steps", "all masked", lambda: A.group_relative_steps(nan * MASK, -ids(2, 3), 2), ALL_MASKED),
    Row("check_groups", "other samples", lambda: A.check_groups(1, a=NONE, b=TWO),
        refused("must have the same number of samples")),
]  # fmt: skip

FUNCTIONAL = [
    Row("masked_sum", "empty", lambda: F.masked_sum(NONE, NONE), T(0.0)),
    Row("masked_sum", "other width", lambda: F.masked_sum(MASK, torch.ones(2, 1)), refused(SHAPES)),
    Row("masked_mean", "empty", lambda: F.masked_mean(NONE, NONE), T(0.0)),
    Row("masked_mean", "no token", lambda: F.masked_mean(FLAT, FLAT, dim=1), torch.zeros(2)),
    Row("masked_mean", "all masked", lambda: F.masked_mean(nan * MASK, ALL_MASKED), T(0.0)),
    Row("masked_mean", "masked NaN", lambda: F.masked_mean(T([nan, 2.0]), T([0.0, 1.0])), T(2.0)),
    Row("masked_mean", "NaN", lambda: F.masked_mean(T([nan, 2.0]), T([1.0, 1.0])), T(nan)),
    Row("masked_mean", "mask that broadcasts", lambda: F.masked_mean(MASK, torch.ones(2, 1)), refused(SHAPES)),
    Row("masked_mean", "global count 0", lambda: F.masked_mean(TWO, TWO, global_normalization_factor=0), T(0.0)),
    Row("masked_mean", "global count NaN", lambda: F.masked_mean(TWO, TWO, global_normalization_factor=nan),
        refused("global_normalization_factor=nan must be a count")),
    Row("masked_mean", "global count -1", lambda: F.masked_mean(TWO, TWO, global_normalization_factor=-1),
        refused("global_normalization_factor=-1 must be a count")),
    Row("masked_mean", "global count, a tensor, NaN stays visible",
        lambda: F.masked_mean(TWO, TWO, global_normalization_factor=T(nan)), T(nan)),
    Row("sequence_mean", "all masked", lambda: F.sequence_mean(nan * MASK, ALL_MASKED, torch.zeros(2), None), T(0.0)),
    Row("sequence_mean", "empty", lambda: F.sequence_mean(torch.zeros(0, 3), torch.zeros(0, 3), NONE, 0), T(0.0)),
    Row("masked_min", "empty", lambda: F.masked_min(NONE, NONE), T(inf)),
    Row("masked_min", "masked NaN", lambda: F.masked_min(T([nan, 2.0]), T([0, 1])), T(2.0)),
    Row("masked_max", "empty", lambda: F.masked_max(NONE, NONE), T(-inf)),
    Row("masked_max", "all masked", lambda: F.masked_max(nan * MASK, ALL_MASKED), T(-inf)),
    Row("bounded_exp", "−inf and inf", lambda: F.bounded_exp(T([-inf, inf])), T([-20.0, 20.0]).exp()),
    Row("kl_penalty", "empty", lambda: F.kl_penalty(NONE, NONE), NONE),
    Row("kl_penalty", "−inf", lambda: F.kl_penalty(T([-1.0]), T([-inf])), T([10.0])),
    Row("kl_penalty", "unknown kind", lambda: F.kl_penalty(NONE, NONE, "k9"), refused("kind='k9'")),
    Row("score_function_weight", "empty", lambda: F.score_function_weight(NONE), NONE),
    Row("importance_weight", "NaN, inf and −inf", lambda: F.importance_weight(T([nan, inf, -inf, 0.0])),
        T([0.0, 0.0, 0.0, 1.0])),
    Row("sequence_log_ratio", "all masked", lambda: F.sequence_log_ratio(nan * MASK, ALL_MASKED), ALL_MASKED),
    Row("clip_ratio", "empty", lambda: F.clip_ratio(NONE, 0.2, 0.2), NONE),
    Row("clipped_surrogate", "empty", lambda: F.clipped_surrogate(NONE, NONE, NONE), NONE),
    Row("dual_clip", "zero advantage", lambda: F.dual_clip(T([0.0]), T([0.0]), 3.0), T([0.0])),
    Row("cispo_surrogate", "empty", lambda: F.cispo_surrogate(NONE, NONE, NONE), NONE),
    Row("geometric_mean_surrogate", "all masked",
        lambda: F.geometric_mean_surrogate(MASK, MASK, MASK, ALL_MASKED), -MASK),
    Row("soft_surrogate", "temperature 0", lambda: F.soft_surrogate(TWO, TWO, 0.0, 1.0),
        refused(f"temperature_pos=0.0 {POSITIVE}")),
    Row("penalised_surrogate", "ratio 1", lambda: F.penalised_surrogate(ONE, ONE, ONE), -ONE),
    Row("geometric_mean_outside", "−inf", lambda: F.geometric_mean_outside(-inf * ONE, ONE, 0.5, 2.0), T([[True]])),
    Row("geometric_mean_outside", "all masked", lambda: F.geometric_mean_outside(nan * ONE, 0 * ONE, 0.5, 2.0),
        T([[False]])),
    Row("mean_k3_above", "NaN", lambda: F.mean_k3_above(nan * ONE, ONE, 0.1), T([[True]])),
    Row("any_token_below", "bound 0", lambda: F.any_token_below(ONE, ONE, 0.0), refused(f"low=0.0 {POSITIVE}")),
    Row("any_token_below", "all masked", lambda: F.any_token_below(nan * ONE, 0 * ONE, 0.5), T([[False]])),
    Row("truncated_weights", "empty", lambda: F.truncated_weights(NONE, 0.5, 2.0), (NONE, NONE.bool())),
    Row("icepop_weights", "inf", lambda: F.icepop_weights(T([inf]), 0.5, 2.0), (T([0.0]), T([True]))),
    Row("sequence_masked_weights", "−inf", lambda: F.sequence_masked_weights(ONE, -inf * ONE, ONE, 0.5, 2.0),
        (0 * ONE, T([[True]]))),
    Row("js_divergence", "the same", lambda: F.js_divergence(-ONE, -ONE), 0 * ONE),
    Row("squared_error", "empty", lambda: F.squared_error(NONE, NONE), NONE),
    Row("clipped_squared_error", "the same", lambda: F.clipped_squared_error(ONE, ONE, ONE, 0.2),
        (0 * ONE, T([[False]]))),
    Row("bradley_terry", "−inf", lambda: F.bradley_terry(T([-inf, inf])), T([inf, 0.0])),
    Row("log_odds", "probability 0 and 1", lambda: F.log_odds(T([-inf, 0.0])).isfinite(), T([False, True])),
    Row("identity_preference", "tau 0", lambda: F.identity_preference(ONE, 0.0), refused(f"tau=0.0 {POSITIVE}")),
    Row("PPOLoss", "default arguments, one token", lambda: PPOLoss()(*[ONE] * 6)[0], T(-1.0)),
    Row("PPOLoss", "all masked",
        lambda: PPOLoss()(*[nan * ONE] * 6, padding_masks=ONE < 0, value_padding_masks=ONE < 0), (T(0.0),) * 5),
    Row("PPOLoss", "other width", lambda: PPOLoss()(ONE, ONE, MASK, ONE, ONE, ONE), refused("differ in shape")),
    Row("build_loss", "unknown", lambda: build_loss("nlll"), refused("did you mean 'nll'")),
    Row("build_loss", "unknown key", lambda: build_loss("dpo", {"betta": 1}), refused("no key 'betta'", KeyError)),
]  # fmt: skip

BATCHING = [
    Row("Batching", "default arguments", lambda: (Batching().kind, Batching().sequences), ("padded", 8)),
    Row("Batching", "unknown kind", lambda: Batching("paded"), refused("did you mean 'padded'")),
    Row("Batching", "no sequence", lambda: Batching(sequences=0), refused(f"sequences {COUNT}")),
    Row("Batching", "a part of a sequence", lambda: Batching(sequences=1.5), refused(f"sequences {COUNT}")),
    Row("Batching", "no token", lambda: Batching(tokens=0), refused(f"tokens {COUNT}")),
    Row("Batching", "−1 tokens", lambda: Batching("packed", tokens=-1), refused(f"tokens {COUNT}")),
    Row("DynamicPlanArgs", "no token", lambda: DynamicPlanArgs(0), refused(f"max_tokens_per_microbatch {COUNT}")),
    Row("DynamicPlanArgs", "NaN", lambda: DynamicPlanArgs(nan), refused(f"max_tokens_per_microbatch {COUNT}")),
    Row("PackingPlanArgs", "half a token", lambda: PackingPlanArgs(2.5), refused(f"max_tokens_per_microbatch {COUNT}")),
    Row("PackingPlanArgs", "groups of 0", lambda: PackingPlanArgs(8, group_size=0), refused(f"group_size {COUNT}")),
    *(
        Row("plan_lengths", f"{what}, {kind}", lambda kind=kind, change=change: planned(**{"kind": kind} | change),
            result)
        for kind in ("padded", "dynamic", "packed")
        for what, change, result in (
            ("empty", {"lengths": []}, refused("there is no sequence to plan")),
            ("one token", {"lengths": [1]}, [[[0]]]),
            ("an empty sequence", {"lengths": [0]}, [[[0]]]),
            ("more ranks than sequences", {"lengths": [3], "shards": 2},
             [[[1]], [[0]]] if kind == "dynamic" else [[[0]], [[1]]]),
            ("longer than the width", {"lengths": [9]}, refused("sequence 0 has length 9")),
            ("negative", {"lengths": [-1]}, refused("sequence 0 has length -1")),
            ("no rank", {"lengths": [1], "shards": 0}, refused(f"num_shards {COUNT}")),
            ("groups of 0", {"lengths": [1], "group_size": 0}, refused(f"group_size {COUNT}")),
        )
    ),
    Row("plan_padded", "empty", lambda: plan_padded([], 3, 2, 1, SequenceCost()).sequences, [[], []]),
    Row("plan_padded", "empty, its efficiency", lambda: plan_padded([], 3, 2, 1, SequenceCost()).efficiency, 1.0),
    Row("plan_padded", "no rank", lambda: plan_padded([1], 3, 0, 1, SequenceCost()), refused("num_shards")),
    Row("plan_dynamic_batching", "empty", lambda: plan_dynamic_batching([], 3, 2, DynamicPlanArgs(8)).sequences,
        [[], []]),
    Row("plan_dynamic_batching", "no rank", lambda: plan_dynamic_batching([1], 3, 0, DynamicPlanArgs(8)),
        refused("num_shards")),
    Row("plan_dynamic_batching", "longer than the width",
        lambda: plan_dynamic_batching([4], 3, 1, DynamicPlanArgs(8)), refused("the batch is 3 tokens wide")),
    Row("plan_sequence_packing", "empty", lambda: plan_sequence_packing([], 2, PackingPlanArgs(8)).sequences,
        [[], []]),
    Row("plan_sequence_packing", "more ranks than sequences",
        lambda: plan_sequence_packing([1], 2, PackingPlanArgs(8)), refused("do not divide over 2 shards")),
    Row("plan_sequence_packing", "no rank", lambda: plan_sequence_packing([1], 0, PackingPlanArgs(8)),
        refused("num_shards")),
    Row("MicrobatchPlan", "empty, its imbalance",
        lambda: plan_dynamic_batching([], 3, 2, DynamicPlanArgs(8)).shard_imbalance, 0.0),
    Row("pack_sequences", "empty", lambda: packing.pack_sequences([], 8), []),
    Row("pack_sequences", "an empty sequence", lambda: packing.pack_sequences([0], 8), [[0]]),
    Row("pack_sequences", "negative", lambda: packing.pack_sequences([-1], 8), refused("has length -1")),
    Row("pack_sequences", "capacity NaN", lambda: packing.pack_sequences([1], nan), refused("a pack holds nan tokens")),
    Row("pack_sequences", "capacity 0", lambda: packing.pack_sequences([0], 0), refused("a pack holds 0 tokens")),
    Row("pack_sequences", "unknown algorithm", lambda: packing.pack_sequences([1], 8, "x"), refused("'x'")),
    Row("sequence_lengths", "empty", lambda: rank_plan.sequence_lengths({"input_ids": ids(0, 3)}),
        refused("the batch has no sequence")),
    Row("sequence_lengths", "no token", lambda: rank_plan.sequence_lengths({"input_ids": ids(2, 0)}),
        refused("the batch has no token")),
    Row("sequence_lengths", "one token", lambda: rank_plan.sequence_lengths({"input_ids": ids(1, 1)}), [1]),
    Row("sequence_lengths", "no ids", lambda: rank_plan.sequence_lengths({"input_id": ids(1, 1)}),
        refused("needs 'input_ids'; did you mean 'input_id'?", KeyError)),
    Row("sequence_lengths", "ids of one dimension", lambda: rank_plan.sequence_lengths({"input_ids": ids(3)}),
        refused("input_ids must be a tensor of integers [B, S]")),
    Row("sequence_lengths", "ids that are no integers", lambda: rank_plan.sequence_lengths({"input_ids": MASK}),
        refused("input_ids must be a tensor of integers [B, S]")),
    *(
        Row("sequence_lengths", what,
            lambda lengths=lengths: rank_plan.sequence_lengths(LENGTHS | {"input_lengths": lengths}), refused(words))
        for what, lengths, words in (
            ("lengths of other sequences", T([1]), "one for each of the 2 sequences"),
            ("lengths of tokens", T([[1], [2]]), "one for each of the 2 sequences"),
            ("NaN", T([nan, 1.0]), "must be a tensor of integers"),
            ("a list", [1, 2], "must be a tensor of integers"),
            ("larger than the width", T([3, 1]), "input_lengths[0]=3 does not fit"),
            ("negative", T([1, -1]), "input_lengths[1]=-1 does not fit"),
        )
    ),
    Row("sequence_lengths", "mask of another width",
        lambda: rank_plan.sequence_lengths(LENGTHS | {"token_mask": MASK}), refused("token_mask (2, 3) must have")),
]  # fmt: skip

SAMPLING = [
    Row("Sampling", "default arguments", lambda: (Sampling(1).temperature, Sampling(1).top_k, Sampling(1).top_p),
        (1.0, 0, 1.0)),
    *(
        Row("Sampling", f"{key} {value}", lambda key=key, value=value: Sampling(**{"max_new_tokens": 4} | {key: value}),
            refused(f"{key}={value} "))
        for key, values in {
            "max_new_tokens": (0, -1, 1.5),
            "temperature": (-1.0, nan, inf),
            "top_p": (0, 1.5, nan),
            "top_k": (-1, 1.5),
            "stop_ids": ((-1,),),
        }.items()
        for value in values
    ),
    Row("SamplingFilter", "top_k 0", lambda: SamplingFilter(0), refused("top_k=0")),
    Row("SamplingFilter", "top_k 1.5", lambda: SamplingFilter(1.5), refused("top_k=1.5")),
    Row("SamplingFilter", "top_p NaN", lambda: SamplingFilter(top_p=nan), refused("top_p=nan")),
    Row("sample", "empty", lambda: sample(ROW[:0], NONE, Sampling(1), None, 5), (NONE.long(), NONE)),
    Row("sample", "one token in the vocabulary", lambda: sample(ONE, T([0.9]), Sampling(1), None, 1),
        (T([0]), T([0.0]))),
    Row("sample", "top_k above the vocabulary", lambda: sample(ROW, T([0.999]), Sampling(1, top_k=99), None, 5)[0],
        T([4])),
    Row("sample", "greedy among equals", lambda: sample(0 * ROW, T([0.999]), Sampling(1, 0.0), None, 5)[0], T([0])),
    Row("sample", "−inf has no probability",
        lambda: sample(T([[-inf, 0.0, -inf]]), T([0.0]), Sampling(1), None, 3), (T([1]), T([0.0]))),
    Row("sample", "only −inf stays visible", lambda: sample(-inf * ONE, T([0.5]), Sampling(1), None, 1)[1], T([nan])),
    Row("make_completion_batch", "empty", lambda: make_completion_batch([]), refused("needs at least one prompt")),
    Row("check_requests", "an empty prompt", lambda: check_requests([Request("a", (), Sampling(1), 0)], 9, 5),
        refused("a prompt is empty")),
    Row("check_requests", "an id past the vocabulary",
        lambda: check_requests([Request("a", (1, 5), Sampling(1), 0)], 9, 5), refused("the token id 5")),
    Row("check_requests", "a negative id", lambda: check_requests([Request("a", (-1,), Sampling(1), 0)], 9, 5),
        refused("the token id -1")),
]  # fmt: skip

LOGPROBS = [
    *(
        row
        for name, call in {
            "vocab_parallel_logprobs": lambda targets, logits=ROW, **more: vocab_parallel_logprobs(
                logits, targets, **more
            ),
            "linear_logprobs": lambda targets, logits=ROW, **more: linear_logprobs(
                logits, torch.eye(5), targets, **more
            ),
        }.items()
        for row in (
            Row(name, "empty", lambda call=call: call(ids(0), ROW[:0]).logprobs, NONE),
            Row(name, "one token", lambda call=call: call(T([4])).logprobs.isclose(T([4 - LSE])), T([True])),
            Row(name, "ignored NaN", lambda call=call: call(T([-100]), nan * ROW, entropy=True)[:2],
                (T([0.0]), T([0.0]))),
            Row(name, "id past the vocabulary", lambda call=call: call(T([5])), refused("id 5 ")),
            Row(name, "negative id", lambda call=call: call(T([-1])), refused("id -1 ")),
            Row(name, "other number of targets", lambda call=call: call(ids(2)), refused("targets")),
            Row(name, "temperature 0", lambda call=call: call(T([1]), temperature=0), refused("temperature=0")),
            Row(name, "temperature NaN", lambda call=call: call(T([1]), temperature=T([nan])), refused("temperature")),
            Row(name, "no valid id", lambda call=call: call(T([1]), valid_vocab_size=0), refused("valid_vocab_size=0")),
        )
    ),
    Row("vocab_parallel_logprobs", "ids that are no integers", lambda: vocab_parallel_logprobs(ROW, T([1.0])),
        refused("targets must be integers")),
    Row("vocab_parallel_logprobs", "vocabulary of one", lambda: vocab_parallel_logprobs(ONE, ids(1) * 0)[0], T([0.0])),
    Row("vocab_parallel_logprobs", "only −inf",
        lambda: vocab_parallel_logprobs(torch.full((1, 5), -inf), T([1]), entropy=True)[:2], (T([-inf]), T([0.0]))),
    Row("vocab_parallel_logprobs", "no gather_ids",
        lambda: vocab_parallel_logprobs(ROW, T([1]), gather_ids=ids(1, 0)).gathered, torch.zeros(1, 0)),
    Row("linear_logprobs", "blocks of no token", lambda: linear_logprobs(ROW, torch.eye(5), T([1]), chunk_tokens=0),
        refused("block_tokens=0")),
    Row("vocab_parallel_kl", "empty", lambda: vocab_parallel_kl(ROW[:0], ROW[:0]), NONE),
    Row("vocab_parallel_kl", "the same", lambda: vocab_parallel_kl(ROW, ROW.clone()), T([0.0])),
    Row("vocab_parallel_kl", "other vocabulary", lambda: vocab_parallel_kl(ROW, ROW[:, :4]), refused("(1, 4)")),
    Row("vocab_parallel_soft_cross_entropy", "empty",
        lambda: vocab_parallel_soft_cross_entropy(ROW[:0], ROW[:0]), NONE),
    Row("vocab_parallel_top_k", "k 0", lambda: vocab_parallel_top_k(ROW, 0), refused("k=0")),
    Row("vocab_parallel_top_k", "k above the vocabulary", lambda: vocab_parallel_top_k(ROW, 6), refused("k=6")),
    Row("vocab_parallel_top_k", "empty", lambda: vocab_parallel_top_k(ROW[:0], 2)[1].shape, torch.Size([0, 2])),
    Row("vocab_subset", "no id", lambda: vocab_subset(ROW, ids(0), 1), torch.zeros(1, 1)),
    Row("vocab_subset", "id past the vocabulary", lambda: vocab_subset(ROW, T([5]), 1), refused("5")),
]  # fmt: skip

BATCHES = [
    Row("BatchedDataDict", "no key", lambda: BatchedDataDict().size, 0),
    Row("common_size", "keys disagree", lambda: common_size({"a": TWO, "b": NONE}), refused("keys disagree")),
    Row("BatchedDataDict.from_batches", "empty", lambda: BatchedDataDict.from_batches([]), refused("at least one")),
    Row("BatchedDataDict.from_batches", "no sequence", lambda: BatchedDataDict.from_batches([{"a": NONE}])["a"], NONE),
    Row("BatchedDataDict.slice", "past the end", lambda: batch_of(a=TWO).slice(0, 3), refused("0 to 3", IndexError)),
    Row("BatchedDataDict.slice", "empty", lambda: batch_of(a=TWO).slice(1, 1)["a"], NONE),
    Row("BatchedDataDict.select_indices", "empty", lambda: batch_of(a=TWO).select_indices([])["a"], NONE),
    Row("BatchedDataDict.select_indices", "past the end", lambda: batch_of(a=TWO).select_indices([2]),
        refused("sequence 2 of a batch with 2", IndexError)),
    Row("BatchedDataDict.select_indices", "too few booleans", lambda: batch_of(a=TWO).select_indices(T([True])),
        refused("booleans of shape (1,)", IndexError)),
    Row("BatchedDataDict.pad_to_multiple", "empty", lambda: batch_of(a=NONE).pad_to_multiple(2),
        refused("0 sequences")),
    Row("BatchedDataDict.pad_to_multiple", "multiple 0", lambda: batch_of(a=TWO).pad_to_multiple(0),
        refused("multiple of 0")),
    Row("nemo.from_batches", "empty", lambda: dict(NemoBatch.from_batches([])), {}),
    Row("nemo.shard_by_batch_size", "no shard", lambda: nemo(a=TWO).shard_by_batch_size(0),
        refused("shards=0", RuleError)),
    Row("nemo.shard_by_batch_size", "more shards than sequences", lambda: nemo(a=TWO).shard_by_batch_size(3),
        refused("not a multiple of shards (3)", RuleError)),
    Row("nemo.shard_by_batch_size", "more shards than sequences, uneven",
        lambda: [len(part["a"]) for part in nemo(a=TWO).shard_by_batch_size(3, allow_uneven_shards=True)], [1, 1, 0]),
    *(
        Row("nemo.shard_by_batch_size", f"lengths {lengths}",
            lambda lengths=lengths: nemo(input_ids=ids(2, 2), input_lengths=T(lengths)).shard_by_batch_size(
                1, dynamic_batching_args=DYNAMIC), refused(words, RuleError))
        for lengths, words in (
            ([1.5, 1.0], "whole numbers"), ([-1, 1], "≥ 0"), ([3, 1], "the batch is 2 tokens wide"),
        )
    ),
    Row("nemo.chunk", "no chunk", lambda: nemo(a=TWO).chunk(0, 0), refused("chunks=0", RangeError)),
    Row("nemo.repeat_interleave", "0 times", lambda: nemo(a=TWO).repeat_interleave(0)["a"], NONE),
    Row("nemo.repeat_interleave", "−1 times", lambda: nemo(a=TWO).repeat_interleave(-1), refused(NEGATIVE, RuleError)),
    Row("nemo.truncate_tensors", "to −1", lambda: nemo(a=MASK).truncate_tensors(1, -1), refused(NEGATIVE, RuleError)),
    Row("nemo.truncate_tensors", "to 0", lambda: nemo(a=MASK).truncate_tensors(1, 0)["a"], FLAT),
    Row("nemo.make_microbatch_iterator", "0 at a time", lambda: nemo(a=TWO).make_microbatch_iterator(0),
        refused("microbatch size (0)", RuleError)),
    Row("nemo.get_batch", "negative", lambda: nemo(a=TWO).get_batch(-1, 1), refused("slice(-1, 0)", RangeError)),
    Row("nemo.reorder_data", "too short", lambda: nemo(a=TWO).reorder_data([0]), refused("order must", RuleError)),
    Row("Padding.collate", "empty", lambda: PADS.collate([]), refused("at least one sequence")),
    Row("Padding.collate", "one token", lambda: PADS.collate([[3]])["input_ids"], T([[3, 7]])),
    Row("Padding.collate", "an empty sequence", lambda: PADS.collate([[]])["input_ids"], T([[7, 7]])),
    Row("Padding", "multiple 0", lambda: Padding(0, 0), refused("at least 1")),
    Row("span_mask", "empty span", lambda: span_mask(T([1]), T([1]), 2), torch.zeros(1, 2)),
    Row("score_positions", "an empty answer", lambda: score_positions({"token_mask": ALL_MASKED}), T([0, 0])),
    Row("score_positions", "length 0", lambda: score_positions({"input_lengths": T([0, 2])}), T([0, 1])),
    Row("score_positions", "no token", lambda: score_positions({"token_mask": FLAT}), refused("at least one token")),
    Row("score_positions", "neither key", lambda: score_positions({"input_ids": ids(1, 1)}),
        refused("'input_lengths' or 'token_mask'", KeyError)),
]  # fmt: skip


def problem(rewards: list[float]) -> E.ProblemSamples:
    return E.ProblemSamples(rewards, [1] * len(rewards), [False] * len(rewards))


EVALUATIONS = [
    Row("pass_at_k", "no sample", lambda: E.pass_at_k(0, 0, 1), refused("k must be in 1 … 0")),
    Row("pass_at_k", "one sample", lambda: E.pass_at_k(1, 1, 1), 1.0),
    Row("majority", "empty", lambda: E.majority([], []), 0.0),
    Row("majority", "no answer", lambda: E.majority([None], [1.0]), 0.0),
    Row(
        "compute_problem_values",
        "no sample",
        lambda: E.compute_problem_values(problem([]), 1.0),
        refused("at least one sample"),
    ),  # fmt: skip
    Row("compute_problem_values", "one sample", lambda: E.compute_problem_values(problem([1.0]), 1.0)["pass@1"], 1.0),
    Row("estimate", "empty", lambda: E.estimate([]), refused("at least one problem")),
    Row("estimate", "one value", lambda: E.estimate([2.0]), E.Estimate(2.0, None)),
    Row("paired_change", "zero variance", lambda: E.paired_change([1.0, 1.0], [1.0, 1.0]), E.Change(0.0, 0.0, 1.0)),
    Row("paired_change", "one problem", lambda: E.paired_change([1.0], [0.0]), None),
    Row("compute_set_metrics", "empty", lambda: E.compute_set_metrics([]), refused("at least one problem")),
    Row("two_sided_p_value", "no difference", lambda: E.two_sided_p_value(0.0, 1), 1.0),
]

PACKAGE = [
    Row("rl_megatron.masked_mean", "all masked", lambda: rl_megatron.masked_mean(nan * MASK, ALL_MASKED), T(0.0)),
    Row("rl_megatron.masked_max", "empty", lambda: rl_megatron.masked_max(NONE, NONE), T(-inf)),
    Row("rl_megatron.build_loss", "default arguments", lambda: type(rl_megatron.build_loss("nll")),
        rl_megatron.NLLLoss),
    Row("rl_megatron.linear_logprobs", "empty",
        lambda: rl_megatron.linear_logprobs(ROW[:0], torch.eye(5), ids(0)).logprobs, NONE),
    Row("rl_megatron.vocab_parallel_logprobs", "empty",
        lambda: rl_megatron.vocab_parallel_logprobs(ROW[:0], ids(0)).logprobs, NONE),
    Row("rl_megatron.BatchedDataDict", "no key", lambda: rl_megatron.BatchedDataDict().size, 0),
    Row("rl_megatron.Sampling", "max_new_tokens 0", lambda: rl_megatron.Sampling(0), refused("max_new_tokens=0 ")),
]  # fmt: skip

ROWS = [*estimator_rows(), *ADVANTAGES, *FUNCTIONAL, *BATCHING, *SAMPLING, *LOGPROBS, *BATCHES, *EVALUATIONS, *PACKAGE]
