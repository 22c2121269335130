"""Records to rows of tokens: prompt and answer encoded apart, kept within a limit, collated with the answers marked."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, TypeVar, get_args

import torch

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.collate import Padding, span_mask
from rl_megatron.data.files import Record
from rl_megatron.data.templates import require_fields
from rl_megatron.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TooLong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class EncodedSequence:
    """The tokens of one prompt and of its answer, `<eos>` included."""

    prompt_ids: list[int]
    answer_ids: list[int]
    record: Record

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)

    def truncated(self, limit: int) -> EncodedSequence | None:
        """The first `limit` tokens, or None where no token of the answer remains to learn."""
        if max(1, len(self.prompt_ids)) >= limit:  # position 0 is never learned, even where the prompt is empty
            return None
        return replace(self, answer_ids=self.answer_ids[: limit - len(self.prompt_ids)])


class Limited(Protocol):
    """What `within_limit` keeps or leaves out as a whole: a row, or several that belong together."""

    @property
    def record(self) -> Record: ...

    @property
    def num_tokens(self) -> int: ...

    def truncated(self, limit: int) -> Self | None: ...


ItemT = TypeVar("ItemT", bound=Limited)


def encode_prompts(
    records: Sequence[Record], tokenizer: Tokenizer, template: str
) -> Iterator[tuple[list[int], Record]]:
    """Each record with its prompt's tokens, which begin as the tokenizer begins every text, but not twice."""
    require_fields(records, template)
    prefix = tokenizer.prefix_ids
    for record in records:
        ids = tokenizer.encode_template(template, record.values)
        yield (ids if ids[: len(prefix)] == prefix else prefix + ids), record


def encode_answer(record: Record, tokenizer: Tokenizer, template: str) -> list[int]:
    """The answer's tokens and `<eos>`."""
    return [*tokenizer.encode_template(template, record.values), tokenizer.eos_id]


def within_limit(items: list[ItemT], limit: int, policy: TooLong, noun: str = "row") -> list[ItemT]:
    """Return the items of at most `limit` tokens, the max_sequence_length; `policy` says what becomes of the others.

    Raises:
        ValueError: no items, a longer one under "error", an unknown policy, or no item left.
    """
    if policy not in get_args(TooLong):
        raise unknown_name("too_long policy", policy, get_args(TooLong))
    if not items:
        raise ValueError("the dataset has no records.")
    longer = [item for item in items if item.num_tokens > limit]
    if not longer:
        return items
    longest = max(item.num_tokens for item in longer)
    if policy == "error":
        raise ValueError(
            f"{longer[0].record.location}: {longer[0].num_tokens} tokens, max_sequence_length is {limit} "
            f"({len(longer)} of {len(items)} {noun}s are longer, the longest has {longest}): raise max_sequence_length,"
            " or choose too_long=drop or too_long=truncate."
        )
    kept = [fitting for item in items if (fitting := _fitting(item, limit, policy)) is not None]
    num_dropped = len(items) - len(kept)
    logger.warning(
        "%d of %d %ss exceed max_sequence_length = %d (the longest has %d tokens): dropped %d, truncated %d",
        *(len(longer), len(items), noun, limit, longest, num_dropped, len(longer) - num_dropped),
    )
    if not kept:
        raise ValueError(
            f"every {noun} exceeds max_sequence_length = {limit} (the longest has {longest} tokens): raise it."
        )
    return kept


def _fitting(item: ItemT, limit: int, policy: TooLong) -> ItemT | None:
    """The item within `limit`, or None where it is dropped: by choice, or because nothing would remain to learn."""
    if item.num_tokens <= limit:
        return item
    return None if policy == "drop" else item.truncated(limit)


def answer_batch(sequences: Sequence[EncodedSequence], padding: Padding) -> BatchedDataDict:
    """Prompt, answer and `<eos>` of `rows`; `token_mask` is 1 on the answer and its `<eos>`, never at position 0."""
    batch = padding.collate([sequence.prompt_ids + sequence.answer_ids for sequence in sequences])
    starts = torch.tensor([len(sequence.prompt_ids) for sequence in sequences], dtype=torch.long)
    # nothing stands before position 0 to predict it from, even where the prompt is empty
    batch["token_mask"] = span_mask(starts.clamp(min=1), batch["input_lengths"], batch["input_ids"].shape[1])
    return batch
