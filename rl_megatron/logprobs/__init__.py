"""Per-token statistics of vocab-parallel logits: logprobs, entropy and gathered logprobs, read once, never gathered.

`vocab_parallel_logprobs` is the operator, and `linear_logprobs` the same with a model's head inside it;
`next_token_stats` is either as losses need it: labels shifted, context parallelism and packing undone, `[B, S-1]` on
every rank. `vocab_parallel_soft_cross_entropy` and `vocab_parallel_kl` compare the logits of two models,
`vocab_parallel_top_k` finds the largest, and `vocab_subset` brings a large vocabulary's logits to a small one's.
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
