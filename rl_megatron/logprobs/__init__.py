"""Per-token statistics of vocab-parallel logits: logprobs, entropy and gathered logprobs, read once, never gathered.

`vocab_parallel_logprobs` is the operator, and `linear_logprobs` the same with a model's head inside it;
`next_token_stats` is either as losses need it: labels shifted, context parallelism and packing undone, `[B, S-1]` on
every rank. `vocab_parallel_soft_cross_entropy` and `vocab_parallel_kl` compare the logits of two models,
`vocab_parallel_top_k` finds the largest, and `vocab_subset` brings a large vocabulary's logits to a small one's.

Annotations give shapes, checked in tests (tests/shape_checks.py). One name is one size, within one call or one object:

    *tokens         any leading dimensions of logits: [T], [B, S], [S, B]
    rows            the tokens flattened; `places` are rows in the order of a `ChunkPlan`
    batch sequence  [B, S]; results of `next_token_stats` are [B, S-1]
    vocab_local     this rank's columns of the vocabulary, V/tp, its padding included
    hidden          the size of the hidden states, H
    ids, targets    K more ids of each token; J columns of each row that a gradient arrives at
    *_local         this rank's part of a dimension that context or sequence parallelism cuts
    {name}          the value of the argument `name`
    #name           that size, or 1

`Float` is any floating-point dtype, `Int` any signed integer, `Shaped` any dtype. A string that would be a Python
expression, such as a single name, starts with a blank: ruff reads it as one otherwise.
"""

from rl_megatron.logprobs.api import IGNORE_INDEX, LogprobStats, vocab_parallel_logprobs
from rl_megatron.logprobs.divergence import vocab_parallel_kl, vocab_parallel_soft_cross_entropy
from rl_megatron.logprobs.kernels.backends import BACKENDS
from rl_megatron.logprobs.linear import DeferredLogits, linear_logprobs
from rl_megatron.logprobs.next_token import Sharding, next_token_stats
from rl_megatron.logprobs.sampling_filter import SamplingFilter
from rl_megatron.logprobs.top_k import vocab_parallel_top_k
from rl_megatron.logprobs.vocab_subset import vocab_subset

__all__ = [
    "BACKENDS",
    "IGNORE_INDEX",
    "DeferredLogits",
    "LogprobStats",
    "SamplingFilter",
    "Sharding",
    "linear_logprobs",
    "next_token_stats",
    "vocab_parallel_kl",
    "vocab_parallel_logprobs",
    "vocab_parallel_soft_cross_entropy",
    "vocab_parallel_top_k",
    "vocab_subset",
]
