"""Compute, from sharded, padded or packed logits, the per-token values [B, S-1] that losses need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.logprobs.api import IGNORE_INDEX, LogprobStats, vocab_parallel_logprobs
from rl_megatron.logprobs.linear import DeferredLogits, linear_logprobs
from rl_megatron.logprobs.vocab_parallel import check
from rl_megatron.topology.token_layout import TokenLayout


@dataclass(frozen=True)
class Sharding:
    """The distribution of a model's output over ranks, and the layout of tokens in its rows.

    Attributes:
        tp_group: The last dimension is cut over these ranks; None: it is whole.
        cp_group: Sequences are cut zigzag over these ranks; None: they are whole.
        valid_vocab_size: Ids from this one on are padding; None: no id is.
        cu_seqlens: [B+1], the cumulative lengths of sequences that are packed in one row (see `TokenLayout.from_pack`).
            None: each sequence has its own row.
        cu_seqlens_padded: [B+1], the cumulative padded lengths of these sequences; None: they are not padded.
        most_counted: The largest number of unmasked tokens (by the batch's token_mask·sample_mask) on any
            sequence-parallel rank; None: the host does not know it.
        shared_index: [B, S], the `TokenLayout.index` of packed sequences that share the tokens of their common
            beginnings; None: each has its own.
        most_sharing: The largest number of sequences that share a token and in which its next token is unmasked; None:
            the host does not know it.
    """

    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    valid_vocab_size: int | None = None
    cu_seqlens: Int[Tensor, " boundaries"] | None = None
    cu_seqlens_padded: Int[Tensor, " boundaries"] | None = None
    most_counted: int | None = None
    shared_index: Int[Tensor, "batch sequence"] | None = None
    most_sharing: int | None = None

    def layout(self, output: Tensor | DeferredLogits, batch: tuple[int, int]) -> TokenLayout:
        """Return where the tokens of a [B, S] batch lie in `output` [R, L, …]."""
        num_rows, length = output.shape[:2]
        cp_size = 1 if self.cp_group is None else self.cp_group.size()
        if self.shared_index is not None:
            return TokenLayout(self.shared_index.to(output.device), (1, length), self.cp_group, is_shared=True)
        if self.cu_seqlens is None:
            if num_rows != batch[0] or length * cp_size < batch[1]:
                raise ValueError(
                    f"scores or logits {tuple(output.shape)} do not fit input_ids {tuple(batch)}: expected "
                    f"[{batch[0]}, ≥ {batch[1]} / {cp_size}, …] with {cp_size} context parallel rank(s)"
                )
            return TokenLayout.from_padded_batch(batch, length, self.cp_group, output.device)
        padded = self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded
        _check_packing(output, batch, self.cu_seqlens, padded, cp_size)
        return TokenLayout.from_pack(
            self.cu_seqlens.to(output.device), padded.to(output.device), batch[1], length, self.cp_group
        )


def next_token_stats(
    logits: Float[Tensor, "rows length vocab_local"] | DeferredLogits,
    input_ids: Int[Tensor, "batch sequence"],
    sharding: Sharding = Sharding(),
    *,
    temperature: float | Float[Tensor, ""] | Float[Tensor, " batch"] | Float[Tensor, " batch #sequence"] = 1.0,
    entropy: bool = False,
    gather_ids: Int[Tensor, "batch sequence-1 ids"] | None = None,
    mask: Shaped[Tensor, "batch sequence"] | None = None,
    most_counted: int | None = None,
    backend: str = "auto",
) -> LogprobStats:
    """Return statistics of the next token: entry [b, t] corresponds to token t+1 given tokens 0 … t (`logits[b, t]`).

        logprobs[b, t] = log softmax(logits[b, t] / T)[input_ids[b, t+1]]

    Labels are shifted before sequences are cut or packed. So each rank has the label at the end of its slice, and the
    first token of the next sequence in a pack never becomes a label. There is one pass over the logits, whatever the
    layout.

    Every rank returns the whole [B, S-1]. Backward uses only this rank's part of the gradient, so every rank of the
    context-parallel group must compute the same loss from the result: see `TokenLayout.gather`.

    Args:
        logits: [B, S', V/tp] with S' ≥ S; positions from S on are ignored. Under context parallelism they are this
            rank's zigzag slice [B, S'/cp, V/tp], with S' a multiple of 2·cp. Packed logits are [1, T/cp, V/tp].
            `DeferredLogits` are read by `linear_logprobs`.
        input_ids: [B, S].
        sharding: How the logits are distributed over ranks, and whether they are packed.
        temperature: A number, [B], [B, 1] or [B, S] aligned with input_ids: entry t is the temperature at which token t
            was sampled.
        entropy: Whether to return the entropy.
        gather_ids: [B, S-1, K] ids whose logprobs to return. Entry t is for `logits[b, t]`.
        mask: [B, S] aligned with input_ids. Tokens with mask 0 are not evaluated: their logprob, entropy and gradient
            are exactly 0.
        most_counted: The largest number of evaluated tokens on any sequence-parallel rank: `Sharding.most_counted` if
            `mask` is the batch's token_mask·sample_mask. None: `linear_logprobs` waits for the device to count them; so
            does `gather_ids` if sequences share tokens.
        backend: See `vocab_parallel_logprobs`.

    Raises:
        ValueError: Shapes do not fit, or more tokens count than `most_counted` or `Sharding.most_sharing` says (on a
            GPU, see `check`). The message names them.
    """
    batch, length = input_ids.shape
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(f"mask {tuple(mask.shape)} must have the shape of input_ids {tuple(input_ids.shape)}")
    layout = sharding.layout(logits, (batch, length))

    labels = input_ids[:, 1:]
    counts = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask[:, 1:] != 0
    if mask is not None:
        check(
            ~(counts & (labels == IGNORE_INDEX)).any(),
            lambda: f"input_ids has {IGNORE_INDEX} at a token that is not masked; mask the token, or give its id",
        )
        labels = labels.masked_fill(~counts, IGNORE_INDEX)
    labels = layout.scatter(pad(labels, (0, 1), value=IGNORE_INDEX), IGNORE_INDEX)
    temperature = next_token_temperature(temperature, layout, (batch, length))
    layout_of_ids, num_ids = layout, 0
    if gather_ids is not None:
        num_ids = gather_ids.shape[-1]
        if layout.is_shared:  # sequences may have different ids at a token that they share
            most_sharing = None if most_counted is None else sharding.most_sharing
            chosen = pad(counts, (0, 1))
            layout_of_ids = layout.separate(chosen, most_sharing)
            if most_sharing is not None:
                check(
                    (layout_of_ids.index // most_sharing == layout.index.masked_fill(~chosen, -1)).all(),
                    lambda: (
                        f"most_sharing={most_sharing} is too small: more sequences share an unmasked token; give "
                        "most_counted=None if `mask` is not the batch's token_mask·sample_mask"
                    ),
                )
        gather_ids = layout_of_ids.scatter(pad(gather_ids, (0, 0, 0, 1)), 0)
        gather_ids = gather_ids.unflatten(1, (layout.local_shape[1], -1)).flatten(2)

    options = {"valid_vocab_size": sharding.valid_vocab_size, "entropy": entropy, "backend": backend}
    if isinstance(logits, DeferredLogits):
        stats = _compute_from_hidden(logits, labels, sharding.tp_group, temperature, gather_ids, most_counted, options)
    else:
        stats = vocab_parallel_logprobs(
            logits, labels, sharding.tp_group, temperature=temperature, gather_ids=gather_ids, **options
        )
    streams = [stats.logprobs[..., None]]
    streams += [] if stats.entropy is None else [stats.entropy[..., None]]
    gathered = None
    if stats.gathered is not None and layout_of_ids is layout:
        streams.append(stats.gathered)  # all streams in one collective
    elif stats.gathered is not None:
        gathered = stats.gathered.unflatten(-1, (-1, num_ids)).flatten(1, 2)
        gathered = layout_of_ids.gather(gathered)[:, : length - 1]
    whole = layout.gather(torch.cat(streams, dim=-1))[:, : length - 1]
    if layout.is_shared:  # a token may be masked in some of the sequences that share it
        whole = whole.masked_fill(~counts[..., None], 0.0)
    if stats.gathered is not None and gathered is None:
        gathered = whole[..., 1 + entropy :]
    return LogprobStats(whole[..., 0], whole[..., 1] if entropy else None, gathered)


def next_token_temperature(
    temperature: float | Tensor, layout: TokenLayout, batch: tuple[int, int]
) -> float | Float[Tensor, ""] | Float[Tensor, "rows length"]:
    """Return the temperature for each of this rank's logits, [R, L]: the one at which the next token was sampled.

    A number is returned unchanged. A tensor is [B], [B, 1] or [B, S], aligned with input_ids; `batch` is (B, S).
    """
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return temperature
    per_token = temperature[:, None] if temperature.dim() == 1 else temperature
    try:
        per_token = per_token.expand(batch)[:, 1:]
    except RuntimeError as error:
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must be a number, [B], [B, 1] or [B, S] for input_ids {batch}"
        ) from error
    return layout.scatter(pad(per_token, (0, 1), value=1.0), 1.0)


def _compute_from_hidden(
    logits: DeferredLogits,
    labels: Int[Tensor, "rows length"],
    tp_group: dist.ProcessGroup | None,
    temperature: float | Float[Tensor, ""] | Float[Tensor, "rows length"],
    gather_ids: Int[Tensor, "rows length ids"] | None,
    most_counted: int | None,
    options: dict,
) -> LogprobStats:
    """Return the `linear_logprobs` of hidden states [L, R, H] as [R, L, …]."""
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        temperature = temperature.transpose(0, 1)
    stats = linear_logprobs(
        logits.hidden,
        logits.weight,
        labels.transpose(0, 1),
        tp_group,
        temperature=temperature,
        gather_ids=None if gather_ids is None else gather_ids.transpose(0, 1),
        block_tokens=logits.block_tokens,
        sequence_parallel=logits.sequence_shards > 1,
        most_counted=most_counted,
        **options,
    )
    return stats.map(lambda stream: stream.transpose(0, 1))


def _check_packing(
    output: Tensor | DeferredLogits,
    batch: tuple[int, int],
    lengths: Int[Tensor, " boundaries"],
    padded: Int[Tensor, " boundaries"],
    cp_size: int,
) -> None:
    """Raise ValueError unless cu_seqlens and cu_seqlens_padded fit the batch and the packed output.

    Their values are checked only if they are on the CPU.
    """
    if lengths.shape != (batch[0] + 1,) or padded.shape != lengths.shape:
        raise ValueError(
            f"cu_seqlens {tuple(lengths.shape)} and cu_seqlens_padded {tuple(padded.shape)} must be [B+1] for "
            f"input_ids {tuple(batch)}"
        )
    if output.shape[0] != 1:
        raise ValueError(f"packed logits must have one row, but got {tuple(output.shape)}")
    if lengths.device.type != "cpu" or padded.device.type != "cpu":
        return  # reading the values would wait for the device
    spans, padded_lengths = lengths.diff(), padded.diff()
    if (spans < 0).any() or (spans > padded_lengths).any() or (spans > batch[1]).any():
        raise ValueError(
            f"cu_seqlens {lengths.tolist()} must not decrease, and no sequence may be longer than its padded "
            f"length in cu_seqlens_padded {padded.tolist()} or than the batch's width {batch[1]}"
        )
    if cp_size > 1 and (padded_lengths % (2 * cp_size)).any():
        raise ValueError(
            f"cu_seqlens_padded {padded.tolist()}: over {cp_size} context parallel ranks every sequence's padded "
            f"length must be a multiple of {2 * cp_size}"
        )
    if padded[-1] > output.shape[1] * cp_size:
        raise ValueError(
            f"cu_seqlens_padded ends at {padded[-1].item()}, but packed logits {tuple(output.shape)} have "
            f"{output.shape[1] * cp_size} positions over {cp_size} context parallel rank(s)"
        )
