"""`vocab_parallel_top_k`: the k largest logits of each token and their ids, out of logits that stay sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.logprobs.flatten import from_rows, memory_order, to_rows
from rl_megatron.logprobs.kernels.float_order import from_ordered_bits, ordered_bits
from rl_megatron.logprobs.kernels.tiles import row_blocks

_COPIES = 4  # of a tile's size in fp32 that a block of rows is worked on with: int64 keys and their making
_ID_BITS = 0xFFFFFFFF
_NOTHING = torch.iinfo(torch.int64).min  # the key of what is no id: below every logit's, −inf included


@torch.no_grad()
def vocab_parallel_top_k(
    logits: Float[Tensor, "*tokens vocab_local"],
    k: int,
    tp_group: dist.ProcessGroup | None = None,
    *,
    valid_vocab_size: int | None = None,
) -> tuple[Float[Tensor, "*tokens {k}"], Int[Tensor, "*tokens {k}"]]:
    """Return (values, ids) of the k largest logits of each token, largest first, over a vocabulary whose columns are
    sharded over `tp_group`, equally and in rank order:

        key(v) = (order(x_v), −v)        ids = the k largest keys, in descending order

    `order` being the order of fp32: equal logits come in ascending order of their ids, so the result is the same bits
    on every rank, whatever the sharding. One read of the logits in blocks of rows, one all-gather of 8·k bytes per
    token and rank; nothing of the logits' size is allocated. Takes part in no gradient.

    −inf is a logit like another: a row with fewer than k finite ones ends in −inf and the lowest ids that have it. NaN
    counts as the largest, as in `torch.topk`.

    Shapes: logits [..., V_local]; values [..., k] fp32 (fp64 logits are rounded first), ids [..., k] int64, global.
    Units: nats.
    Args: valid_vocab_size: ids from here on are padding and never among the k.
    Raises: ValueError for a k that is not in [1, the vocabulary's size].
    """
    rank, size = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
    width, start = logits.shape[-1], rank * logits.shape[-1]
    vocab_size = size * width if valid_vocab_size is None else min(valid_vocab_size, size * width)
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k={k} must be at least 1 and at most the vocabulary's {vocab_size} ids; ask for fewer")
    order = memory_order(logits)
    keys = _largest_keys(to_rows(logits.detach(), order), k, start, min(width, max(0, vocab_size - start)))
    if size > 1:
        parts = keys.new_empty(size, *keys.shape)
        dist.all_gather(list(parts.unbind(0)), keys, group=tp_group)
        keys = parts.movedim(0, 1).flatten(1).topk(k, dim=-1).values
    values, ids = from_ordered_bits(keys >> 32, torch.float32), _ID_BITS - (keys & _ID_BITS)
    leading = logits.shape[:-1]
    return from_rows(values, leading, order), from_rows(ids, leading, order)


def _largest_keys(
    rows: Float[Tensor, "rows vocab_local"], k: int, start: int, num_columns: int
) -> Int[Tensor, "rows kept"]:
    """Return the keys of this rank's min(k, V_local) largest logits, descending; `_NOTHING` if it has too few ids."""
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
    """Return one int64 for each logit and its id, in the order of (logit, −id): the bits of an fp32 as an integer that
    grows with it, above the id counted downwards."""
    x = logits.float()
    bits = ordered_bits(x.masked_fill(x.isnan(), torch.nan))  # one NaN, the positive one
    return bits.long().bitwise_left_shift_(32).add_(_ID_BITS - ids)
