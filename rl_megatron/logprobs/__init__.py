"""Per-token statistics of vocab-parallel logits: logprobs, entropy and gathered logprobs.

Each operator reads the logits once and never gathers them:

- `vocab_parallel_logprobs` computes the statistics from logits.
- `linear_logprobs` computes them from hidden states, with the model's head inside the operator.
- `next_token_stats` calls one of these two for losses. It shifts the labels, undoes context parallelism and
  packing, and returns [B, S-1] on every rank.
- `vocab_parallel_soft_cross_entropy` and `vocab_parallel_kl` compare the logits of two models.
- `teacher_divergences` computes several divergences at once; the teacher's logits may be computed block by block.
- `vocab_parallel_top_k` finds the largest logits.
- `vocab_subset` maps the logits of a large vocabulary to a small one.

Annotations give shapes, which tests check (tests/shape_checks.py). Within one call or object, a name stands for one
size:

    *tokens         any leading dimensions of logits: [T], [B, S], [S, B]
    rows            the tokens, flattened; `places` are rows in the order of a `BlockPlan`
    batch sequence  [B, S]; results of `next_token_stats` are [B, S-1]
    vocab_local     this rank's columns of the vocabulary, V/tp, including padding
    hidden          the size of the hidden states, H
    ids             K more ids of each token
    targets         J columns of each row that have a gradient of their own
    *_local         this rank's part of a dimension that context or sequence parallelism splits
    {name}          the value of the argument `name`
    #name           that size, or 1

`Float` is any floating-point dtype, `Int` any signed integer, `Shaped` any dtype. A shape string that is also a
Python expression, such as a single name, starts with a space, because ruff would otherwise check it as code.
"""

from rl_megatron.logprobs.api import IGNORE_INDEX, LogprobStats, vocab_parallel_logprobs
from rl_megatron.logprobs.divergence import vocab_parallel_kl, vocab_parallel_soft_cross_entropy
from rl_megatron.logprobs.kernels.backends import BACKENDS
from rl_megatron.logprobs.linear import DeferredLogits, linear_logprobs
from rl_megatron.logprobs.next_token import Sharding, next_token_stats
from rl_megatron.logprobs.sampling_filter import SamplingFilter
from rl_megatron.logprobs.teacher_divergence import TeacherDivergences, teacher_divergences
from rl_megatron.logprobs.top_k import vocab_parallel_top_k
from rl_megatron.logprobs.vocab_subset import vocab_subset

__all__ = [
    "BACKENDS",
    "IGNORE_INDEX",
    "DeferredLogits",
    "LogprobStats",
    "SamplingFilter",
    "Sharding",
    "TeacherDivergences",
    "linear_logprobs",
    "next_token_stats",
    "teacher_divergences",
    "vocab_parallel_kl",
    "vocab_parallel_logprobs",
    "vocab_parallel_soft_cross_entropy",
    "vocab_parallel_top_k",
    "vocab_subset",
]
