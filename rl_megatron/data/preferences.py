"""Datasets of preference pairs: one prompt with a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.collate import Padding
from rl_megatron.data.encoding import (
    EncodedSequence,
    TooLong,
    answer_batch,
    encode_answer,
    encode_prompts,
    within_limit,
)
from rl_megatron.data.preference_files import answer_records, check_pair
from rl_megatron.data.records import Record
from rl_megatron.data.templates import require_fields, template_fields
from rl_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Pair:
    chosen: EncodedSequence
    rejected: EncodedSequence

    @property
    def record(self) -> Record:
        return self.chosen.record

    @property
    def num_tokens(self) -> int:
        return max(self.chosen.num_tokens, self.rejected.num_tokens)

    def truncated(self, limit: int) -> _Pair | None:
        """Return both sequences within `limit`, or None if an answer is gone or the two answers are now the same."""
        chosen, rejected = self.chosen.truncated(limit), self.rejected.truncated(limit)
        if chosen is None or rejected is None or chosen.answer_ids == rejected.answer_ids:
            return None
        return _Pair(chosen, rejected)


class PreferenceDataset:
    """Pairs of answers to one prompt. One item is one pair, which becomes two sequences of a batch.

    `token_mask` is 1 on the answer and its `<eos>`, and 0 on the prompt, which is encoded separately from the answers.

    Args:
        records: Records from `pairs_of`, with the fields of the prompt, `chosen` and `rejected`.
        tokenizer: As for `PromptAnswerDataset`.
        max_sequence_length: The most tokens of prompt, answer and `<eos>` together, in each of the two sequences.
        prompt_template: As for `PromptAnswerDataset`.
        answer_template: A `str.format` template. `{answer}` is the text of `chosen` in one sequence and the text of
            `rejected` in the other; other fields are those of the record.
        too_long: What to do with a pair with a longer sequence. "error" raises an error. "drop" leaves the pair out.
            "truncate" cuts the end of each longer sequence, and leaves the pair out if no token of an answer remains or
            the two sequences become the same. The last two log the number of pairs.

    Raises:
        ValueError: There are no records; `chosen` or `rejected` is missing, empty or not a string, or both are the same
            tokens; a record lacks a field of a template, or `answer_template` has no `{answer}`; a sequence is too long
            under "error", the policy is unknown, or no pair is left.
    """

    group_size = 2

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        max_sequence_length: int,
        *,
        prompt_template: str = "{question}\n",
        answer_template: str = "{answer}",
        too_long: TooLong = "error",
    ) -> None:
        if "answer" not in template_fields(answer_template):
            raise ValueError(
                f"answer_template {answer_template!r} has no {{answer}}, the place of the chosen or the rejected text: "
                "add it."
            )
        for record in records:
            check_pair(record)
        answers = [answer_records(record) for record in records]
        require_fields([chosen for chosen, _ in answers], answer_template)
        pairs = [
            _Pair(
                *(
                    EncodedSequence(prompt_ids, encode_answer(side, tokenizer, answer_template), record)
                    for side in sides
                )
            )
            for (prompt_ids, record), sides in zip(
                encode_prompts(records, tokenizer, prompt_template), answers, strict=True
            )
        ]
        for pair in pairs:
            if pair.chosen.answer_ids == pair.rejected.answer_ids:
                raise ValueError(
                    f"{pair.record.location}: 'chosen' and 'rejected' are the same tokens: remove the pair."
                )
        self._pairs = within_limit(pairs, max_sequence_length, too_long, noun="pair")
        self._padding = Padding(tokenizer.pad_id, multiple=1)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pairs)

    def item_lengths(self) -> list[tuple[int, int]]:
        """Return for each pair the numbers of tokens of its two sequences, prompt and answer together."""
        return [(pair.chosen.num_tokens, pair.rejected.num_tokens) for pair in self._pairs]

    def batch(self, pairs: Sequence[int]) -> BatchedDataDict:
        """Return two sequences per pair: chosen ones at 0, 2, 4, … and rejected ones at 1, 3, 5, ….

        The keys are `input_ids` [2P, S], `input_lengths`, `token_mask` and `sample_mask`.
        """
        sequences = [
            sequence for number in pairs for sequence in (self._pairs[number].chosen, self._pairs[number].rejected)
        ]
        return answer_batch(sequences, self._padding)
