"""`vocab_subset`: select the columns of some ids from a sharded vocabulary, as the shards of a smaller vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor


def vocab_subset(
    logits: Shaped[Tensor, "*tokens vocab_local"],
    ids: Int[Tensor, " ids"],
    num_local: int,
    tp_group: dist.ProcessGroup | None = None,
    *,
    valid_vocab_size: int | None = None,
) -> Shaped[Tensor, "*tokens {num_local}"]:
    """Return this rank's shard of `logits[..., ids]`.

    Column j has the logits of id `ids[rank·num_local + j]`; columns after the last id are zero. One all-to-all sends
    each column from the rank that has it to the rank that needs it. A rank receives as much as its result holds, and no
    rank ever has the whole vocabulary. The result has no gradient.

    Args:
        logits: This rank's columns, [..., V_local]. Shards are equal and in rank order.
        ids: [V'] with V' ≤ tp·num_local, on the CPU, so that computing the destinations does not wait for the device.
        num_local: The number of columns of each shard of the result.
        tp_group: The group over which both vocabularies are sharded; None: they are not sharded.
        valid_vocab_size: Ids from this one on are padding.

    Returns:
        [..., num_local].

    Raises:
        ValueError: There are more ids than columns, or ids are outside the vocabulary.
    """
    size, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    leading, width = logits.shape[:-1], logits.shape[-1]
    vocab_size = size * width if valid_vocab_size is None else valid_vocab_size
    if len(ids) > size * num_local:
        raise ValueError(f"{len(ids)} ids do not fit {size} shard(s) of {num_local} columns")
    if ((ids < 0) | (ids >= vocab_size)).any():
        raise ValueError(f"ids {ids.min()} … {ids.max()} must be in the vocabulary [0, {vocab_size})")
    owner, wanted_by = ids // width, torch.arange(len(ids)) // num_local
    outgoing = [ids[(owner == rank) & (wanted_by == other)] - rank * width for other in range(size)]
    incoming = [((owner == other) & (wanted_by == rank)).nonzero()[:, 0] - rank * num_local for other in range(size)]
    columns = logits.detach().flatten(0, -2)[:, torch.cat(outgoing).to(logits.device)].T.contiguous()
    if size > 1:
        received = columns.new_empty(sum(map(len, incoming)), columns.shape[1])
        dist.all_to_all_single(received, columns, [*map(len, incoming)], [*map(len, outgoing)], group=tp_group)
        columns = received
    result = logits.new_zeros(columns.shape[1], num_local)
    result[:, torch.cat(incoming).to(logits.device)] = columns.T
    return result.view(*leading, num_local)
