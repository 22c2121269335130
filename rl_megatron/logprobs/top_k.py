"""`vocab_parallel_top_k`: the k largest logits of each token and their ids, from sharded logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.logprobs.flatten import from_rows, memory_order, to_rows
from rl_megatron.logprobs.kernels.float_order import from_ordered_bits, ordered_bits
from rl_megatron.logprobs.kernels.tiles import row_blocks
from rl_megatron.topology.collectives import gather_from_ranks

_COPIES = 4  # a block of rows needs this many times its fp32 size, for int64 keys and their computation
_ID_BITS = 0xFFFFFFFF
_NOTHING = torch.iinfo(torch.int64).min  # a key without an id; it is below the keys of all logits, even of −inf


@torch.no_grad()
def vocab_parallel_top_k(
    logits: Float[Tensor, "*tokens vocab_local"],
    k: int,
    tp_group: dist.ProcessGroup | None = None,
    *,
    valid_vocab_size: int | None = None,
) -> tuple[Float[Tensor, "*tokens {k}"], Int[Tensor, "*tokens {k}"]]:
    """Return (values, ids) of the k largest logits of each token over the whole vocabulary, largest first.

        key(v) = (order(x_v), −v)        ids = the k largest keys, in descending order

    order(x) is the order of fp32 numbers. Equal logits are sorted by ascending ids, so that the result has the same
    bits on every rank and for every sharding. The vocabulary is sharded equally and in rank order.

    Cost: one read of the logits in blocks of rows, and one all-gather of 8·k bytes per token and rank. No buffer of the
    logits' size is allocated. The result has no gradient.

    −inf is a logit like any other: if a row has fewer than k finite logits, the lowest ids with −inf follow. NaN counts
    as the largest value, as in `torch.topk`.

    Args:
        logits: This rank's columns, [..., V_local].
        k: The number of ids per token.
        tp_group: The group over which the vocabulary is sharded; None: it is not sharded.
        valid_vocab_size: Ids from this one on are padding and are never returned.

    Returns:
        values, [..., k] in fp32 (fp64 logits are rounded first), and global ids, [..., k] in int64.

    Raises:
        ValueError: k is not in [1, the vocabulary's size].
    """
    rank, size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    width, start = logits.shape[-1], rank * logits.shape[-1]
    vocab_size = size * width if valid_vocab_size is None else min(valid_vocab_size, size * width)
    if not 1 <= k <= vocab_size:
        raise ValueError(
            f"k={k} must be at least 1 and at most {vocab_size}, the vocabulary's size; choose a smaller k"
        )
    order = memory_order(logits)
    keys = _largest_keys(to_rows(logits.detach(), order), k, start, min(width, max(0, vocab_size - start)))
    if size > 1:
        keys = gather_from_ranks(keys, tp_group).movedim(0, 1).flatten(1).topk(k, dim=-1).values
    values, ids = from_ordered_bits(keys >> 32, torch.float32), _ID_BITS - (keys & _ID_BITS)
    leading = logits.shape[:-1]
    return from_rows(values, leading, order), from_rows(ids, leading, order)


def _largest_keys(
    rows: Float[Tensor, "rows vocab_local"], k: int, start: int, num_columns: int
) -> Int[Tensor, "rows kept"]:
    """Return the keys of this rank's min(k, V_local) largest logits in descending order, padded with `_NOTHING`."""
    largest = torch.full((rows.shape[0], min(k, rows.shape[1])), _NOTHING, device=rows.device)
    here = min(largest.shape[1], num_columns)
    if here == 0 or rows.shape[0] == 0:
        return largest
    ids = torch.arange(start, start + num_columns, device=rows.device)
    everything = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
    for block, _ in row_blocks(everything, num_columns * _COPIES):
        largest[block, :here] = _keys(rows[block, :num_columns], ids).topk(here, dim=-1).values
    return largest


def _keys(logits: Float[Tensor, "rows columns"], ids: Int[Tensor, " columns"]) -> Int[Tensor, "rows columns"]:
    """Return one int64 for each logit and its id, ordered like (logit, −id).

    The upper 32 bits are the `ordered_bits` of the logit, and the lower 32 bits decrease with the id.
    """
    x = logits.float()
    bits = ordered_bits(x.masked_fill(x.isnan(), torch.nan))  # every NaN becomes the positive one, which is the largest
    return bits.long().bitwise_left_shift_(32).add_(_ID_BITS - ids)
