"""Datasets of preference pairs: one prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.collate import Padding
from rl_megatron.data.datasets import sequence_batch
from rl_megatron.data.encoding import Limit, TooLong, within_limit
from rl_megatron.data.preference_files import check_pair
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.token_cache import encoded_pairs


class PreferenceDataset:
    """Pairs of answers to one prompt. One item is one pair, which becomes two sequences of a batch.

    `token_mask` is 1 on the tokens of the answers, with the token that ends them, and 0 on the prompt.

    Args:
        records: Records from `load_preferences`.
        renderer: The renderer of the data section, which turns records into tokens.
        max_sequence_length: The most tokens of each of the two sequences.
        too_long: What to do with a pair with a longer sequence. "error" raises an error. "drop" leaves the pair out.
            "truncate" cuts the end of each longer sequence, and leaves the pair out if no token of an answer remains or
            the two sequences become the same. The last two log the number of pairs.

    Raises:
        ValueError: There are no records; `chosen` or `rejected` is missing, empty or malformed, or both are the same
            tokens; a record lacks a field of a template, or the answer template has no `{answer}`; a sequence is too
            long under "error", the policy is unknown, or no pair is left.
    """

    group_size = 2

    def __init__(
        self,
        records: Sequence[Record],
        renderer: Renderer,
        max_sequence_length: int,
        *,
        too_long: TooLong = "error",
    ) -> None:
        for record in records:
            check_pair(record)
        limit = Limit(max_sequence_length, too_long, noun="pair")
        self._pairs = within_limit(encoded_pairs(renderer, records), limit)
        self._padding = Padding(renderer.tokenizer.pad_id, multiple=1)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pairs)

    def item_lengths(self) -> list[tuple[int, int]]:
        """Return for each pair the numbers of tokens of its two sequences, prompt and answer together."""
        return [(pair.chosen.num_tokens, pair.rejected.num_tokens) for pair in self._pairs]

    def location(self, index: int) -> str:
        """Return the place of a pair's record, as file:line."""
        return self._pairs[index].record.location

    def batch(self, pairs: Sequence[int]) -> BatchedDataDict:
        """Return two sequences per pair: chosen ones at 0, 2, 4, … and rejected ones at 1, 3, 5, ….

        The keys are `input_ids` [2P, S], `input_lengths`, `token_mask` and `sample_mask`.
        """
        sequences = [
            sequence for number in pairs for sequence in (self._pairs[number].chosen, self._pairs[number].rejected)
        ]
        return sequence_batch(sequences, self._padding)
