"""The turns of a session as trees, which are searched for the turn that a request continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rl_megatron.data.conversations import Message
from rl_megatron.generation.interfaces import Completion
from rl_megatron.rollouts.gateway.messages import Answered, Key
from rl_megatron.rollouts.history import History
from rl_megatron.rollouts.trajectory import Segment

Prompt = str | Sequence[int]


@dataclass(eq=False)
class Branch:
    """A history of a session.

    Attributes:
        parent: The turn of another branch that it continues; None if it begins a conversation.
        is_busy: Whether a request that extends it waits for the engine.
    """

    history: History
    parent: AnsweredTurn | None = None
    turns: list[AnsweredTurn] = field(default_factory=list)
    is_busy: bool = False

    @property
    def heard(self) -> list[AnsweredTurn]:
        """Return the turns whose answers the agent received. They come first: nothing can follow an unheard turn."""
        return [turn for turn in self.turns if turn.is_heard]


@dataclass(eq=False)
class AnsweredTurn:
    """A completion that answered a request.

    Attributes:
        number: Its number in the history of its branch, from 1.
        order: Its number among all turns of the session.
        asked: The keys of the request's messages after those of the previous turn; none for /v1/completions.
        is_heard: Whether the agent received the answer.
        following: The turns that continue this one.
    """

    branch: Branch
    number: int
    order: int
    answered: Answered
    completion: Completion
    asked: Sequence[Key] = ()
    is_heard: bool = True
    following: list[AnsweredTurn] = field(default_factory=list)

    @property
    def can_grow(self) -> bool:
        """Return whether this turn's branch can be extended: nothing follows the turn, and the branch is not busy."""
        return not self.branch.is_busy and self.branch.history.is_last_turn(self.number)

    @property
    def messages(self) -> list[Message]:
        """Return the conversation up to and including this turn."""
        return self.branch.history.messages_until(self.number)


def find_longest_match(roots: Iterable[AnsweredTurn], keys: Sequence[Key]) -> tuple[AnsweredTurn | None, int]:
    """Return (latest turn that the messages `keys` continue, number of messages up to that turn), or (None, 0).

    Of several such turns, one that nothing follows yet is preferred. `roots` are the first turns of conversations.
    """
    best: tuple[AnsweredTurn | None, int] = None, 0
    waiting = [(turn, 0) for turn in roots]
    while waiting:
        turn, start = waiting.pop(0)
        end = start + len(turn.asked)
        is_known = turn.is_heard and len(keys) > end and tuple(keys[start:end]) == tuple(turn.asked)
        if not is_known or not turn.answered.is_meant_by(keys[end]):
            continue
        waiting += [(following, end + 1) for following in turn.following]
        best_turn, num_known = best
        is_preferred = turn.can_grow and best_turn is not None and not best_turn.can_grow
        if end + 1 > num_known or (end + 1 == num_known and is_preferred):
            best = turn, end + 1
    return best


def join_segments(branches: Sequence[Branch]) -> list[Segment]:
    """Return the segments of all branches, in the order of their last turns. Each completion is in one segment only."""
    segments: list[tuple[int, tuple[int, int], tuple[int, int] | None, Segment]] = []
    numbers = {id(branch): number for number, branch in enumerate(branches)}
    for number, branch in enumerate(branches):
        heard = branch.heard
        end = 0
        for index, segment in enumerate(branch.history.segments(len(heard)) if heard else ()):
            end += len(segment.turns)
            parent = None if segment.parent is None else (number, segment.parent)
            if parent is None and branch.parent is not None:
                other = branch.parent.branch
                parent = numbers[id(other)], other.history.find_segment(branch.parent.number)
            segments.append((heard[end - 1].order, (number, index), parent, segment))
    segments.sort(key=lambda entry: entry[0])
    positions = {name: position for position, (_, name, _, _) in enumerate(segments)}
    return [
        Segment(segment.ids, segment.turns, None if parent is None else positions[parent])
        for _, _, parent, segment in segments
    ]


@dataclass
class _TextTurn:
    """A turn of /v1/completions.

    Attributes:
        number: Its number among these turns.
        text: The text that its prompt and answer add to that of the turn before; None if its prompt was token ids.
        ids: The tokens that it adds.
        following: The turns that continue it.
    """

    turn: AnsweredTurn
    number: int
    text: str | None
    ids: list[int]
    following: list[_TextTurn] = field(default_factory=list)


class TextTurns:
    """The turns of a session that answered /v1/completions."""

    def __init__(self) -> None:
        self._roots: list[_TextTurn] = []
        self._turns: dict[AnsweredTurn, _TextTurn] = {}

    def add(self, turn: AnsweredTurn, previous: AnsweredTurn | None, rest: Prompt, ids: Sequence[int]) -> None:
        """Add a turn. `match` returned `previous` and `rest` for its prompt; `ids` are the tokens of `rest`."""
        text = rest + (turn.answered.content or "") if isinstance(rest, str) else None
        added = _TextTurn(turn, len(self._turns), text, [*ids, *turn.completion.ids])
        self._turns[turn] = added
        (self._roots if previous is None else self._turns[previous].following).append(added)

    def match(self, prompt: Prompt) -> tuple[AnsweredTurn | None, Prompt]:
        """Return (the turn with the longest history that a prompt continues, rest of the prompt), or (None, prompt).

        Of several such turns, one that nothing follows yet is preferred, and then the earliest.
        """
        matches = [(end, turn) for end, turn in self._find(prompt) if end < len(prompt) and turn.turn.is_heard]
        if not matches:
            return None, prompt
        longest = max(end for end, _ in matches)
        turns = [turn.turn for end, turn in sorted(matches, key=lambda pair: pair[1].number) if end == longest]
        return next((turn for turn in turns if turn.can_grow), turns[0]), prompt[longest:]

    def _find(self, prompt: Prompt) -> Iterator[tuple[int, _TextTurn]]:
        """Yield (the length of its history, the turn) for turns whose whole history is a prefix of the prompt."""
        waiting = [(0, root) for root in self._roots]
        while waiting:
            begin, turn = waiting.pop()
            added = turn.text if isinstance(prompt, str) else turn.ids
            if added is None:
                continue  # turns after it have no text either
            end = begin + len(added)
            if prompt[begin:end] == added:
                yield end, turn
                waiting += [(end, following) for following in turn.following]
