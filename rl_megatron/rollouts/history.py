"""Histories: the growing token sequence of a trajectory, and the messages that the tokens come from.

The tokens of a completion stay as the engine sampled them, and are never encoded again from text. To get the text
between two completions, the whole conversation is rendered; this also shows if the template has changed the past.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.data.conversations import Conversation, Message, get_message_text
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Completion, Sampling
from rl_megatron.rollouts.tools.turns import ToolTurns
from rl_megatron.rollouts.trajectory import HistoryFull, Segment, Trajectory, Turn

OnRewrite = Literal["branch", "keep", "error"]
_PLACEHOLDER = "TURN-8d2f41"  # stands for the text of a turn
_INVISIBLE = "\u200b"  # a zero-width space


class PastRewritten(RuntimeError):
    """The chat template writes earlier messages differently than before, which the configuration does not allow."""


class Completes(Protocol):
    """The part of a `RolloutClient` that a history uses."""

    def fitting(self, num_tokens: int, sampling: Sampling | None = None) -> Sampling:
        """Return how to sample the completion that follows `num_tokens` tokens."""
        ...

    async def complete(self, ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Return the completion of token ids."""
        ...


@dataclass(frozen=True)
class _End:
    """The state of a history after a completion.

    Attributes:
        segment: The number of its segment.
        num_characters: The length of the segment's text up to the end of the completion.
        end_of_turn: The text of the token that ended the completion.
    """

    segment: int
    num_messages: int
    num_characters: int
    end_of_turn: str


def check_length(text: str, most_characters: int | None) -> None:
    """Raise HistoryFull if a text has too many characters to fit. This is checked before the text is encoded."""
    if most_characters is not None and len(text) > most_characters:
        raise HistoryFull(f"a text has {len(text)} characters, but the context holds at most {most_characters}")


def escape_special_tokens(message: Message, tokenizer: Tokenizer) -> dict[str, object]:
    """Return a message or tool that cannot produce special tokens when it is encoded; only the chat template can.

    An invisible character is inserted into the names of special tokens, everywhere but in `role`.
    """
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return {str(key): value if key == "role" else _break_special_tokens(value, names) for key, value in message.items()}


def _break_special_tokens(value: object, names: Sequence[str]) -> object:
    if isinstance(value, str):
        for name in names:
            value = value.replace(name, name[:1] + _INVISIBLE + name[1:])
        return value
    if isinstance(value, Mapping):
        return {_break_special_tokens(key, names): _break_special_tokens(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_break_special_tokens(item, names) for item in value]
    return value


class History(ABC):
    """The messages and the tokens of one trajectory. Environments and tools extend it, and the engine completes it.

    Attributes:
        messages: The conversation so far.
    """

    def __init__(
        self, client: Completes, ids: Sequence[int], messages: Sequence[Message], most_characters: int | None = None
    ):
        """Begin with tokens and their messages; a text of more than `most_characters` raises HistoryFull."""
        self.messages: list[Message] = list(messages)
        self._most_characters = most_characters
        self._client = client
        self._ids = list(ids)
        self._text, self._end_of_turn = "", ""  # the texts of all tokens and of the last stop token
        self._has_sampled = False  # whether the segment has sampled tokens
        self._closed: list[Segment] = []
        self._closed_texts: list[str] = []
        self._turns: list[Turn] = []
        self._ends: list[_End] = []  # after each completion of all segments
        self._parent: int | None = None

    @property
    def ids(self) -> list[int]:
        """Return the tokens that the next completion follows."""
        return list(self._ids)

    @property
    def num_turns(self) -> int:
        return len(self._turns) + sum(len(segment.turns) for segment in self._closed)

    async def complete(self, sampling: Sampling | None = None) -> Completion:
        """Append the engine's completion, and return it. Its text is the last message.

        Args:
            sampling: How it is sampled; None: as in the generation section.

        Raises:
            HistoryFull: No token fits.
        """
        used = self._client.fitting(len(self._ids), sampling)
        completion = await self._client.complete(self._ids, used)
        self.append_completion(completion, used)
        return completion

    def append_completion(self, completion: Completion, sampling: Sampling) -> None:
        """Append a completion that follows all tokens so far, with its sampling."""
        self._turns.append(Turn(len(self._ids), completion, sampling))
        self._has_sampled = True
        self._ids += completion.ids
        self._note(completion, sampling)
        self._ends.append(_End(len(self._closed), len(self.messages), len(self._text), self._end_of_turn))

    def copy(self) -> Self:
        """Return a copy that can be extended without changing this history."""
        copied = copy(self)
        for name in ("messages", "_ids", "_closed", "_closed_texts", "_turns", "_ends"):
            setattr(copied, name, list(getattr(self, name)))
        return copied

    @abstractmethod
    def extend(self, messages: Sequence[Message]) -> None:
        """Append messages that the policy did not write; its next turn follows them."""

    @abstractmethod
    def _note(self, completion: Completion, sampling: Sampling) -> None:
        """Append the message of a completion whose tokens are already appended."""

    def add_reward(self, reward: float) -> None:
        """Add `reward` to the environment's reward of the last completion."""
        last = self._turns[-1]
        self._turns[-1] = replace(last, reward=last.reward + reward)

    def trajectory(
        self,
        reward: float = 0.0,
        *,
        truncated: bool | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Trajectory:
        """Return the trajectory up to the last completion.

        Args:
            reward: The environment's reward for the whole trajectory, besides the rewards of turns.
            truncated: Whether the trajectory was cut off. None: True if its last completion was.
            metadata: What reward functions get as `metadata`.
        """
        segments = self.segments()
        if truncated is None:
            truncated = not segments or segments[-1].turns[-1].completion.reason != "stop"
        return Trajectory(tuple(segments), reward, truncated, tuple(self.messages), dict(metadata or {}))

    def segments(self, num_turns: int | None = None) -> list[Segment]:
        """Return the segments of the first `num_turns` completions; None: of all."""
        segments = [*self._closed]
        if self._turns:
            segments.append(Segment(self._ids[: self._turns[-1].end], tuple(self._turns), self._parent))
        if num_turns is None or num_turns >= self.num_turns:
            return segments
        shortened, num_earlier = [], 0
        for segment in segments:
            turns = segment.turns[: max(0, num_turns - num_earlier)]
            if turns:
                shortened.append(Segment(segment.ids[: turns[-1].end], turns, segment.parent))
            num_earlier += len(segment.turns)
        return shortened

    def find_segment(self, turn: int) -> int:
        """Return the number of the segment with completion `turn`; completions are numbered from 1."""
        return self._ends[turn - 1].segment

    def messages_until(self, turn: int) -> list[Message]:
        """Return the messages up to and including a completion; completions are numbered from 1."""
        return self.messages[: self._ends[turn - 1].num_messages]

    def is_last_turn(self, turn: int) -> bool:
        """Return whether nothing follows a completion yet; completions are numbered from 1."""
        return turn == self.num_turns and len(self.messages) == self._ends[turn - 1].num_messages

    def fork(self, turn: int) -> Self:
        """Return a history that continues after completion `turn` of this one, with the same tokens up to there.

        The completions so far are context of the new history, and not its own completions. Completions are numbered
        from 1.
        """
        end, forked = self._ends[turn - 1], copy(self)
        is_closed = end.segment < len(self._closed)
        ids = self._closed[end.segment].ids if is_closed else self._ids
        text = self._closed_texts[end.segment] if is_closed else self._text
        (*_, last) = self.segments(turn)
        forked.messages = self.messages_until(turn)
        forked._ids, forked._text = list(ids[: last.turns[-1].end]), text[: end.num_characters]
        forked._end_of_turn, forked._has_sampled = end.end_of_turn, True
        forked._closed, forked._closed_texts, forked._turns, forked._ends = [], [], [], []
        forked._parent = None
        return forked


class TextHistory(History):
    """A history of plain text, to which texts are appended as they are."""

    def __init__(self, client: Completes, tokenizer: Tokenizer, ids: Sequence[int], most_characters: int | None = None):
        super().__init__(client, ids, [{"role": "user", "content": tokenizer.decode(ids)}], most_characters)
        self._tokenizer = tokenizer

    def extend(self, messages: Sequence[Message]) -> None:
        text = "".join(get_message_text(message) for message in messages)
        check_length(text, self._most_characters)
        self.messages += messages
        self._ids += self._tokenizer.encode(text)

    def extend_ids(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.messages.append({"role": "user", "content": self._tokenizer.decode(ids)})
        self._ids += ids

    def _note(self, completion: Completion, sampling: Sampling) -> None:
        self.messages.append({"role": "assistant", "content": self._tokenizer.decode(completion.ids)})


class ChatHistory(History):
    """A conversation that a chat template renders."""

    def __init__(
        self,
        client: Completes,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        conversation: Conversation,
        on_rewrite: OnRewrite,
        ids: Sequence[int] | None = None,
        most_characters: int | None = None,
    ):
        """Begin with a conversation that the policy answers.

        Args:
            client: The client that completes the tokens.
            tokenizer: The tokenizer.
            template: The chat template.
            conversation: The first messages, with the tools.
            on_rewrite: What happens if the template writes earlier messages differently than before: "branch"
                begins a segment with the new text, "keep" continues after the old tokens, and "error" raises
                `PastRewritten`.
            ids: The tokens of the conversation, if they are known.
            most_characters: The most characters of a text that can fit; None: no limit.

        Raises:
            HistoryFull: The text has more characters.
        """
        text = template.prompt(conversation)
        check_length(text, most_characters)
        ids = tokenizer.encode_special(text).ids if ids is None else ids
        super().__init__(client, ids, conversation.messages, most_characters)
        self._tokenizer, self._template, self._on_rewrite = tokenizer, ToolTurns(template), on_rewrite
        self._conversation, self._text = conversation, text

    def extend(self, messages: Sequence[Message]) -> None:
        """Append messages, as the chat template writes them.

        No special token is encoded from the text of a message; see `escape_special_tokens`.

        Raises:
            PastRewritten: The template writes earlier messages differently, and `on_rewrite` is "error".
            ValueError: The template fails.
            HistoryFull: The text has more characters than can fit.
        """
        self.messages += [escape_special_tokens(message, self._tokenizer) for message in messages]
        rendered = self._template.prompt(self._build_conversation())
        check_length(rendered, self._most_characters)
        if not self._has_sampled:  # nothing was sampled in this segment, so its tokens may change
            self._text, self._ids = rendered, self._tokenizer.encode_special(rendered).ids
            return
        if rendered.startswith(self._text):
            self._append(rendered[len(self._text) :])
            return
        if self._on_rewrite == "keep":
            self._append(self._render_after_last_turn(len(messages)))
            return
        if self._on_rewrite == "error":
            start = next(
                (number for number, (one, other) in enumerate(zip(self._text, rendered, strict=False)) if one != other),
                min(len(self._text), len(rendered)),
            )
            raise PastRewritten(
                f"the chat template writes {rendered[start : start + 40]!r} where the conversation has "
                f"{self._text[start : start + 40]!r} (character {start + 1}); set rollout.on_rewrite=branch to learn "
                "from both histories, or keep to continue the first one"
            )
        self._branch(rendered)

    def _note(self, completion: Completion, sampling: Sampling) -> None:
        ids = completion.ids
        has_stop_token = completion.reason == "stop" and ids[-1] in sampling.stop_ids
        content = self._tokenizer.decode(ids[:-1] if has_stop_token else ids, skip_special_tokens=False)
        self._end_of_turn = self._tokenizer.decode_token(ids[-1]) if has_stop_token else ""
        self.messages.append({"role": "assistant", "content": content})
        # Decoded after another token, the first token may begin with a space that it lacks when decoded alone.
        previous = self._ids[-len(ids) - 1]
        alone = self._tokenizer.decode([previous], skip_special_tokens=False)
        self._text += self._tokenizer.decode([previous, *ids], skip_special_tokens=False)[len(alone) :]

    def _build_conversation(self) -> Conversation:
        return replace(self._conversation, messages=[dict(message) for message in self.messages])

    def _append(self, text: str) -> None:
        self._text += text
        self._ids += self._tokenizer.encode_special(text).ids

    def _branch(self, rendered: str) -> None:
        """Close the segment, and begin one with the newly rendered text."""
        if self._turns:  # without turns, this segment is only the context copied by `fork`, so it is not kept
            self._closed.append(Segment(self._ids[: self._turns[-1].end], tuple(self._turns), self._parent))
            self._closed_texts.append(self._text)
            self._parent = len(self._closed) - 1
        self._turns, self._text, self._has_sampled = [], rendered, False
        self._ids = self._tokenizer.encode_special(rendered).ids

    def _render_after_last_turn(self, num_new: int) -> str:
        """Return the template's text after the last completion, or raise PastRewritten if that text cannot be found."""
        conversation, last = self._build_conversation(), len(self.messages) - num_new - 1
        conversation.messages[last]["content"] = _PLACEHOLDER
        _, *rest = self._template.prompt(conversation).split(_PLACEHOLDER)
        if len(rest) != 1 or not rest[0].startswith(self._end_of_turn):
            raise PastRewritten(
                "rollout.on_rewrite=keep: the text that the chat template writes after the last turn cannot be found; "
                f"the turn ends with {self._text[-20:]!r}; set rollout.on_rewrite=branch"
            )
        return rest[0][len(self._end_of_turn) :]
