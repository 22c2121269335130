"""Per-token statistics of vocab-parallel logits: logprobs, entropy and gathered logprobs, read once, never gathered.

`vocab_parallel_logprobs` is the operator; `next_token_stats` is the operator as losses need it: labels shifted, context
parallelism and packing undone, `[B, S-1]` on every rank.
"""

from rl_megatron.logprobs.api import BACKENDS, IGNORE_INDEX, LogprobStats, vocab_parallel_logprobs
from rl_megatron.logprobs.next_token import Sharding, next_token_stats

__all__ = [
    "BACKENDS",
    "IGNORE_INDEX",
    "LogprobStats",
    "Sharding",
    "next_token_stats",
    "vocab_parallel_logprobs",
]
