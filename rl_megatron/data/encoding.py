"""Encoded records: sequences, pairs and prompts as token ids, and the limit on their length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self, TypeVar, get_args

from rl_megatron.config.errors import ConfigError, unknown_name
from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.data.conversations import Conversation
from rl_megatron.data.records import NothingLeft, Record
from rl_megatron.data.tasks.task import Problem

logger = logging.getLogger(__name__)

TooLong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class EncodedSequence:
    """The tokens of one sequence, and which of them are learned.

    Attributes:
        trained: One byte per token, 1 if the token is learned and 0 otherwise. The first token is never learned,
            because no token before it could predict it.
    """

    ids: list[int]
    trained: bytes
    record: Record

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @property
    def trained_ids(self) -> list[int]:
        """Return the tokens that are learned."""
        return [id_ for id_, is_trained in zip(self.ids, self.trained, strict=True) if is_trained]

    def truncate(self, limit: int) -> EncodedSequence | None:
        """Return the first `limit` tokens, or None if none of them is learned."""
        if 1 not in self.trained[:limit]:
            return None
        return replace(self, ids=self.ids[:limit], trained=self.trained[:limit])


@dataclass(frozen=True)
class EncodedPair:
    """The sequences with the chosen and with the rejected answer to one prompt."""

    chosen: EncodedSequence
    rejected: EncodedSequence

    @property
    def record(self) -> Record:
        """Return the record of the pair."""
        return self.chosen.record

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the longer sequence."""
        return max(self.chosen.num_tokens, self.rejected.num_tokens)

    def truncate(self, limit: int) -> EncodedPair | None:
        """Cut both sequences to `limit` tokens; return None if an answer has no token left or the answers are equal."""
        chosen, rejected = self.chosen.truncate(limit), self.rejected.truncate(limit)
        if chosen is None or rejected is None or chosen.trained_ids == rejected.trained_ids:
            return None
        return EncodedPair(chosen, rejected)


class RendersChats(Protocol):
    """An object with the method `chat` of `Renderer`."""

    def chat(self, record: Record) -> tuple[ChatTemplate, Conversation] | None:
        """Return the chat template and the conversation of a record's prompt, or None for plain text."""
        ...


@dataclass(frozen=True)
class EncodedPrompt:
    """The tokens of a problem's prompt.

    Attributes:
        num_prefix: The number of tokens that the tokenizer puts before every text (BOS). Truncation keeps them.
        data_set: The name of the data set that the prompt comes from.
    """

    ids: list[int]
    problem: Problem
    record: Record
    num_prefix: int = 0
    renderer: RendersChats | None = field(default=None, compare=False, repr=False)
    data_set: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def truncate(self, limit: int) -> EncodedPrompt | None:
        """Keep the prefix and the last `limit - num_prefix` tokens; return None if the latter are 0 or fewer."""
        ids = truncate_prompt(self.ids, self.num_prefix, limit)
        return None if ids is None else replace(self, ids=ids)

    def chat(self) -> tuple[ChatTemplate, Conversation] | None:
        """Return the chat template and the conversation of the prompt, or None if it is plain text."""
        return None if self.renderer is None else self.renderer.chat(self.record)


def truncate_prompt(ids: list[int], num_prefix: int, limit: int) -> list[int] | None:
    """Return the first `num_prefix` and the last `limit - num_prefix` ids, or None if the latter are 0 or fewer."""
    num_last = limit - num_prefix
    return ids[:num_prefix] + ids[-num_last:] if num_last > 0 else None


class Limited(Protocol):
    """An item that `apply_limit` keeps, truncates or drops: a sequence, a pair or a prompt."""

    @property
    def record(self) -> Record:
        """Return the record that the item was made from."""
        ...

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the item's longest sequence."""
        ...

    def truncate(self, limit: int) -> Self | None:
        """Return the item with sequences of at most `limit` tokens, or None if nothing useful remains."""
        ...


ItemT = TypeVar("ItemT", bound=Limited)


@dataclass(frozen=True)
class Limit:
    """The maximum number of tokens of an item, and the words for it in messages.

    Attributes:
        policy: What to do with a longer item: raise an error, drop it, or truncate it.
        noun: The name of an item in messages.
        name: The name of the limit in messages.
        remedy: What to change for longer items.
    """

    tokens: int
    policy: TooLong
    noun: str = "sequence"
    name: str = "max_sequence_length"
    remedy: str = "raise model.max_sequence_length"

    def __post_init__(self) -> None:
        if self.policy not in get_args(TooLong):
            raise unknown_name("too_long policy", self.policy, get_args(TooLong))

    @classmethod
    def for_prompts(cls, max_sequence_length: int, max_new_tokens: int, policy: TooLong) -> Limit:
        """Return the limit for prompts, which leaves space for a completion."""
        if max_new_tokens >= max_sequence_length:
            raise ConfigError(
                f"generation.max_new_tokens={max_new_tokens} leaves no space for a prompt in "
                f"model.max_sequence_length={max_sequence_length}; lower the one or raise the other"
            )
        return cls(
            max_sequence_length - max_new_tokens,
            policy,
            noun="prompt",
            name=f"model.max_sequence_length={max_sequence_length} without generation.max_new_tokens={max_new_tokens}",
            remedy="lower generation.max_new_tokens or raise model.max_sequence_length",
        )


def apply_limit(items: Sequence[ItemT], limit: Limit) -> list[ItemT]:
    """Return the items within the limit, and apply its policy to longer ones. Raise NothingLeft if none is left."""
    if not items:
        raise NothingLeft("the dataset has no records.")
    longer = [item for item in items if item.num_tokens > limit.tokens]
    if not longer:
        return list(items)
    longest, noun = max(item.num_tokens for item in longer), limit.noun
    if limit.policy == "error":
        raise ValueError(
            f"{longer[0].record.location}: this {noun} has {longer[0].num_tokens} tokens, but {limit.name} is "
            f"{limit.tokens} ({len(longer)} of {len(items)} {noun}s are longer, the longest has {longest}): "
            f"{limit.remedy}, or set data.too_long=drop or data.too_long=truncate."
        )
    fitting = [fitted for item in items if (fitted := _fit(item, limit)) is not None]
    num_dropped = len(items) - len(fitting)
    logger.warning(
        "%d of %d %ss exceed %s = %d (the longest has %d tokens): dropped %d, truncated %d",
        *(len(longer), len(items), noun, limit.name, limit.tokens, longest, num_dropped, len(longer) - num_dropped),
    )
    if not fitting:
        raise NothingLeft(
            f"every {noun} exceeds {limit.name} = {limit.tokens} (the longest has {longest} tokens): {limit.remedy}."
        )
    return fitting


def _fit(item: ItemT, limit: Limit) -> ItemT | None:
    """Return the item, truncated if it is too long, or None if the policy drops it or nothing useful would remain."""
    if item.num_tokens <= limit.tokens:
        return item
    return None if limit.policy == "drop" else item.truncate(limit.tokens)
