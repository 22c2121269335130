"""The averages of the policy gradient loss and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.contract import Count
from rl_megatron.losses.streams import TokenStreams


@dataclass(frozen=True)
class Means:
    """Means of [B, S-1] streams over the global batch. Each method returns this batch's share of the mean, a scalar.

    Attributes:
        cfg: The loss's settings.
        streams: The batch.
        global_valid_seqs: The number of sequences that count in the global batch.
        global_valid_toks: The number of tokens that count in the global batch.
    """

    cfg: ClippedPGLossConfig
    streams: TokenStreams
    global_valid_seqs: Count
    global_valid_toks: Count

    def over_tokens(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the mean over tokens."""
        return F.masked_mean(values, self.streams.mask, global_normalization_factor=self.global_valid_toks)

    def over_sequences(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the mean over sequences of each sequence's mean over its tokens."""
        return F.sequence_mean(values, self.streams.mask, self.streams.sample_mask, self.global_valid_seqs)

    def of_loss(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the mean that the loss uses: over tokens, over sequences, or over sequences·fixed_sequence_length.

        Raises:
            TypeError: fixed_sequence_length is set, but global_valid_seqs is None.
        """
        if self.cfg.fixed_sequence_length is not None:
            if self.global_valid_seqs is None:
                raise TypeError(
                    f"fixed_sequence_length={self.cfg.fixed_sequence_length} needs global_valid_seqs, but got None"
                )
            count = self.global_valid_seqs * self.cfg.fixed_sequence_length
            return F.masked_mean(values, self.streams.mask, global_normalization_factor=count)
        return self.over_tokens(values) if self.cfg.token_level_loss else self.over_sequences(values)
