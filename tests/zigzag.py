"""A context-parallel rank's part of a whole tensor, for tests that compare shards with one process."""

from __future__ import annotations

from torch import Tensor

from rl_megatron.topology.context_parallel import zigzag_positions


def zigzag_shard(x: Tensor, cp_rank: int, cp_size: int, dim: int) -> Tensor:
    """Return the zigzag slice of `cp_rank`, `[…, S, …]` → `[…, S/cp_size, …]`; x itself if cp_size is 1."""
    if cp_size == 1:
        return x
    return x.index_select(dim, zigzag_positions(x.size(dim), cp_rank, cp_size, x.device))
