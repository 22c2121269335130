"""Encode records as sequences of tokens: encode prompt and answer separately, enforce a length limit, and collate."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, TypeVar, get_args

import torch

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.collate import Padding, span_mask
from rl_megatron.data.records import Record
from rl_megatron.data.templates import require_fields
from rl_megatron.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TooLong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class EncodedSequence:
    """The tokens of one prompt and of its answer, which ends with `<eos>`."""

    prompt_ids: list[int]
    answer_ids: list[int]
    record: Record

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of prompt and answer together."""
        return len(self.prompt_ids) + len(self.answer_ids)

    def truncated(self, limit: int) -> EncodedSequence | None:
        """Return the first `limit` tokens, or None if no token of the answer remains to learn."""
        if max(1, len(self.prompt_ids)) >= limit:  # position 0 is never learned, even if the prompt is empty
            return None
        return replace(self, answer_ids=self.answer_ids[: limit - len(self.prompt_ids)])


class Limited(Protocol):
    """An item that `within_limit` keeps or leaves out as a whole: one sequence, or a pair."""

    @property
    def record(self) -> Record:
        """Return the record that the item was made from."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the item's longest sequence."""
        ...

    def truncated(self, limit: int) -> Self | None:
        """Return the item with sequences of at most `limit` tokens, or None if nothing remains to learn."""
        ...


ItemT = TypeVar("ItemT", bound=Limited)


def encode_prompts(
    records: Sequence[Record], tokenizer: Tokenizer, template: str
) -> Iterator[tuple[list[int], Record]]:
    """Yield each record with the tokens of its prompt, which start with the tokenizer's prefix (BOS) exactly once."""
    require_fields(records, template)
    prefix = tokenizer.prefix_ids
    for record in records:
        ids = tokenizer.encode_template(template, record.values)
        yield (ids if ids[: len(prefix)] == prefix else prefix + ids), record


def encode_answer(record: Record, tokenizer: Tokenizer, template: str) -> list[int]:
    """Return the tokens of the answer and `<eos>`."""
    return [*tokenizer.encode_template(template, record.values), tokenizer.eos_id]


def within_limit(items: list[ItemT], limit: int, policy: TooLong, noun: str = "sequence") -> list[ItemT]:
    """Return the items, none longer than `limit` tokens.

    Args:
        items: Sequences or pairs.
        limit: The max_sequence_length.
        policy: What to do with a longer item: raise an error, drop it, or truncate it.
        noun: What messages call an item.

    Raises:
        ValueError: There are no items, an item is longer under "error", the policy is unknown, or no item is left.
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
            f"{longer[0].record.location}: this {noun} has {longer[0].num_tokens} tokens, and max_sequence_length is "
            f"{limit} ({len(longer)} of {len(items)} {noun}s are longer, the longest has {longest}): raise "
            "model.max_sequence_length, or set data.too_long=drop or data.too_long=truncate."
        )
    kept = [fitting for item in items if (fitting := _fitting(item, limit, policy)) is not None]
    num_dropped = len(items) - len(kept)
    logger.warning(
        "%d of %d %ss exceed max_sequence_length = %d (the longest has %d tokens): dropped %d, truncated %d",
        *(len(longer), len(items), noun, limit, longest, num_dropped, len(longer) - num_dropped),
    )
    if not kept:
        raise ValueError(
            f"every {noun} exceeds max_sequence_length = {limit} (the longest has {longest} tokens): raise "
            "model.max_sequence_length."
        )
    return kept


def _fitting(item: ItemT, limit: int, policy: TooLong) -> ItemT | None:
    """Return the item within `limit`, or None if it is dropped by the policy or would have nothing left to learn."""
    if item.num_tokens <= limit:
        return item
    return None if policy == "drop" else item.truncated(limit)


def answer_batch(sequences: Sequence[EncodedSequence], padding: Padding) -> BatchedDataDict:
    """Return the batch of `sequences`; `token_mask` is 1 on the answer and its `<eos>`, but never at position 0."""
    batch = padding.collate([sequence.prompt_ids + sequence.answer_ids for sequence in sequences])
    starts = torch.tensor([len(sequence.prompt_ids) for sequence in sequences], dtype=torch.long)
    # no token is before position 0 to predict it from, even if the prompt is empty
    batch["token_mask"] = span_mask(starts.clamp(min=1), batch["input_lengths"], batch["input_ids"].shape[1])
    return batch
