"""The turns of a session as a tree, in which a request finds the history that it goes on with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rl_megatron.data.conversations import Message
from rl_megatron.generation.interfaces import Completion
from rl_megatron.rollouts.gateway.messages import Answered, Key
from rl_megatron.rollouts.history import History
from rl_megatron.rollouts.trajectory import Segment


@dataclass(eq=False)
class Branch:
    """A history of a session.

    Attributes:
        history: The history.
        parent: The turn of another branch that it goes on behind, or None.
        turns: Its turns.
        is_busy: Whether a request of it waits for the engine.
    """

    history: History
    parent: AnsweredTurn | None = None
    turns: list[AnsweredTurn] = field(default_factory=list)
    is_busy: bool = False

    @property
    def heard(self) -> list[AnsweredTurn]:
        """Return the turns whose answers the agent has got. Others are at the end, because nothing can follow them."""
        return [turn for turn in self.turns if turn.is_heard]


@dataclass(eq=False)
class AnsweredTurn:
    """A completion that answered a request.

    Attributes:
        branch: Its branch.
        number: Its number in the history of the branch, from 1.
        order: Its number among all turns of the session.
        answered: What was answered.
        completion: The completion.
        asked: The messages of the request behind those of the turn before, as they are compared; none for
            /v1/completions.
        is_heard: Whether the agent has got the answer.
        following: The turns that answered requests which go on behind this one.
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
        """Return whether the history can go on as it is. Otherwise something else follows already."""
        return not self.branch.is_busy and self.branch.history.is_behind(self.number)

    @property
    def messages(self) -> list[Message]:
        """Return the conversation up to this turn, with it."""
        return self.branch.history.messages_until(self.number)


def longest_match(roots: Iterable[AnsweredTurn], keys: Sequence[Key]) -> tuple[AnsweredTurn | None, int]:
    """Return the last turn of a conversation that a session knows, and how many of its messages are known then.

    Of several such turns, one comes first that nothing follows yet.

    Args:
        roots: The turns with which conversations begin.
        keys: The messages of the conversation.
    """
    best: tuple[AnsweredTurn | None, int] = None, 0
    waiting = [(turn, 0) for turn in roots]
    while waiting:
        turn, before = waiting.pop(0)
        end = before + len(turn.asked)
        is_known = turn.is_heard and len(keys) > end and tuple(keys[before:end]) == tuple(turn.asked)
        if not is_known or not turn.answered.is_meant_by(keys[end]):
            continue
        waiting += [(each, end + 1) for each in turn.following]
        found, num_known = best
        is_preferred = turn.can_grow and found is not None and not found.can_grow
        if end + 1 > num_known or (end + 1 == num_known and is_preferred):
            best = turn, end + 1
    return best


def joined_segments(branches: Sequence[Branch]) -> list[Segment]:
    """Return the segments of all branches, those with the latest turns last. A completion is in one of them only."""
    found: list[tuple[int, tuple[int, int], tuple[int, int] | None, Segment]] = []
    numbers = {id(branch): number for number, branch in enumerate(branches)}
    for number, branch in enumerate(branches):
        heard = branch.heard
        end = 0
        for place, segment in enumerate(branch.history.segments(len(heard)) if heard else ()):
            end += len(segment.turns)
            parent = None if segment.parent is None else (number, segment.parent)
            if parent is None and branch.parent is not None:
                behind = branch.parent.branch
                parent = numbers[id(behind)], behind.history.segment_of(branch.parent.number)
            found.append((heard[end - 1].order, (number, place), parent, segment))
    found.sort(key=lambda each: each[0])
    places = {name: place for place, (_, name, _, _) in enumerate(found)}
    return [
        Segment(segment.ids, segment.turns, None if parent is None else places[parent])
        for _, _, parent, segment in found
    ]
