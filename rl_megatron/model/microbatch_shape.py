"""The shape of a microbatch, on which the operations of its passes depend, and the pairs of tokens that attend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rl_megatron.batching.microbatch import padded_lengths
from rl_megatron.batching.packing import round_up
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape
from rl_megatron.model.delta_flops import DeltaFlops, delta_rule_flops
from rl_megatron.topology.degrees import SequenceLayout


@dataclass(frozen=True)
class MicrobatchShape:
    """The sequences of one microbatch, over all ranks that share it.

    Attributes:
        lengths: The tokens of each sequence.
        padded_lengths: The tokens of each sequence, padding included.
        width: The columns of the batch of these sequences, at least as many as the longest has tokens.
        prompt_tokens: The tokens at the beginning of each sequence that are not learned from.
        is_packed: Whether the sequences are one after the other. Otherwise they are side by side, and all padded to
            the width.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    width: int
    prompt_tokens: int
    is_packed: bool

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        layout: SequenceLayout,
        *,
        is_packed: bool,
        width: int | None = None,
        prompt_tokens: int = 0,
    ) -> Self:
        """Return the shape of a microbatch of sequences with these lengths in a layout."""
        width = width or max(lengths)
        if is_packed:
            padded = padded_lengths(lengths, layout)
        else:
            padded = [round_up(width, layout.sequence_multiple)] * len(lengths)
        return cls(tuple(lengths), tuple(padded), width, prompt_tokens, is_packed)

    @property
    def tokens(self) -> int:
        """Return the tokens, padding included."""
        return sum(self.padded_lengths)

    def pairs(self, context: int, window: int | None) -> int:
        """Return how many pairs of a query and a key attention computes on one rank, padding included.

        Sequences of a pack attend together if their lengths have the same number of binary digits, and each is then as
        long as the longest of these. A context-parallel rank has two slices of each sequence, of which each attends to
        the keys up to its end, if no window or other length among those that attend together needs a mask.

        Args:
            context: The context-parallel degree.
            window: The tokens that a token attends to, or None for all before it.
        """
        total, slices = 0, 2 * context
        for lengths, longest, has_mask in self._attending_together(window):
            if context == 1 or has_mask:
                total += len(lengths) * longest**2 // context
            else:
                total += len(lengths) * (longest // slices) ** 2 * (slices + 1)
        return total

    def computed_pairs(self, context: int, window: int | None) -> float:
        """Return how many of these pairs kernels compute: all under a mask, and otherwise those of causal attention."""
        return sum(
            len(lengths) * (longest**2 if has_mask else causal_pairs(longest, window)) / context
            for lengths, longest, has_mask in self._attending_together(window)
        )

    def needed_pairs(self, context: int, window: int | None) -> float:
        """Return the mean number of pairs on a rank whose scores the result depends on."""
        return sum(causal_pairs(length, window) for length in self.padded_lengths) / context

    def _attending_together(self, window: int | None) -> list[tuple[list[int], int, bool]]:
        """Return the lengths of sequences that attend together, the longest of them, and whether they need a mask."""
        together: dict[int, list[int]] = defaultdict(list)
        for length in self.padded_lengths:
            together[length.bit_length() if self.is_packed else 0].append(length)
        found = []
        for lengths in together.values():
            longest = max(lengths)
            found.append((lengths, longest, len(set(lengths)) > 1 or (window is not None and window < longest)))
        return found

    def delta_rule(self, model: ModelConfig, shards: int) -> DeltaFlops:
        """Return the operations of a layer's gated delta rule on a rank.

        Args:
            model: The model section.
            shards: The ranks that split its groups.
        """
        shape = DeltaShape.of(model)
        forward = backward = needed = 0
        for lengths, longest, _ in self._attending_together(None):
            of_sequence = delta_rule_flops(shape, longest)
            forward += len(lengths) * of_sequence.forward
            backward += len(lengths) * of_sequence.backward
            needed += sum(delta_rule_flops(shape, length).needed for length in lengths)
        return DeltaFlops(forward // shards, backward // shards, needed // shards)

    def predicting(self, *, all_tokens: bool) -> list[tuple[int, int]]:
        """Return the tokens of each sequence that predict a token which is read, as (first, last + 1).

        Args:
            all_tokens: Whether all tokens are read, and not only those that are learned from. The padding after a
                shorter sequence is then read too.
        """
        if all_tokens:
            return [(0, min(length, self.width - 1) if self.is_packed else self.width - 1) for length in self.lengths]
        return [(max(0, self.prompt_tokens - 1), length - 1) for length in self.lengths]


def causal_pairs(length: int, window: int | None) -> float:
    """Return the pairs of a token and one that it attends to, in a sequence; the diagonal counts half."""
    if window is None or window >= length:
        return length**2 / 2
    return length * window - window**2 / 2
