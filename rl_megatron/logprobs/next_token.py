"""From a model's logits to the `[B, S-1]` streams losses work on, whatever the tensor and context parallel layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.logprobs.api import IGNORE_INDEX, LogprobStats, vocab_parallel_logprobs
from rl_megatron.topology.context_parallel import zigzag_gather, zigzag_shard


def next_token_stats(
    logits: Tensor,
    input_ids: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    *,
    valid_vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> LogprobStats:
    """Statistics of the next token: entry [b, t] speaks of token t+1 given tokens 0 … t, that is, of `logits[b, t]`.

        logprobs[b, t] = log softmax(logits[b, t] / T)[input_ids[b, t+1]]

    Labels are shifted on the whole sequence before it is cut for context parallelism, so no rank misses the token after
    its last position. Every rank returns the whole `[B, S-1]`; its backward pass takes this rank's slice of the
    gradient (see `zigzag_gather`: every rank of `cp_group` must compute the same loss from it).

    Shapes: logits [B, S', V/tp] with S' ≥ S (rows padded for sequence or context parallelism; what is past S is
        ignored), or with cp_group this rank's zigzag slice [B, S'/cp, V/tp], S' a multiple of 2·cp; input_ids [B, S];
        mask [B, S] aligned with input_ids; temperature a number, [B], [B, 1] or [B, S] aligned with input_ids (entry t
        is the temperature at which token t was sampled). Returns [B, S-1].
    Args: mask: tokens with mask 0 are not evaluated; their logprob, entropy and gradient are exactly 0.
    Raises: ValueError for shapes that do not fit, naming them.
    """
    cp_size = 1 if cp_group is None else dist.get_world_size(cp_group)
    cp_rank = 0 if cp_size == 1 else dist.get_rank(cp_group)
    batch, length = input_ids.shape
    padded = logits.shape[1] * cp_size
    if logits.shape[0] != batch or padded < length:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit input_ids {tuple(input_ids.shape)}: expected [{batch}, "
            f"≥ {length} / {cp_size}, V/tp] with {cp_size} context parallel rank(s)"
        )
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(f"mask {tuple(mask.shape)} must have the shape of input_ids {tuple(input_ids.shape)}")

    labels = input_ids[:, 1:]
    if mask is not None:
        labels = labels.masked_fill(mask[:, 1:] == 0, IGNORE_INDEX)
    labels = zigzag_shard(pad(labels, (0, padded - length + 1), value=IGNORE_INDEX), cp_rank, cp_size, dim=1)
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        per_token = temperature[:, None] if temperature.dim() == 1 else temperature
        per_token = per_token.expand(batch, length)[:, 1:]
        temperature = zigzag_shard(pad(per_token, (0, padded - length + 1), value=1.0), cp_rank, cp_size, dim=1)

    stats = vocab_parallel_logprobs(
        logits, labels, tp_group, valid_vocab_size=valid_vocab_size, temperature=temperature, entropy=entropy,
        backend=backend,
    )  # fmt: skip
    streams = [stats.logprobs] if stats.entropy is None else [stats.logprobs, stats.entropy]
    if cp_size > 1:  # both streams in one collective
        streams = zigzag_gather(torch.stack(streams, dim=-1), cp_group, dim=1).unbind(-1)
    streams = [stream[:, : length - 1] for stream in streams]
    return LogprobStats(streams[0], streams[1] if entropy else None)
