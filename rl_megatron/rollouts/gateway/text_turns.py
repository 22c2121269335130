"""The turns of /v1/completions as trees, in which a prompt finds the turn that it goes on behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rl_megatron.rollouts.gateway.turns import AnsweredTurn

Prompt = str | Sequence[int]


@dataclass
class _TextTurn:
    """A turn of /v1/completions.

    Attributes:
        turn: The turn.
        place: Its number among these turns.
        text: What its prompt and its answer add to the text of the turn before; None if its prompt was tokens.
        ids: The tokens that it adds.
        following: The turns that go on behind it.
    """

    turn: AnsweredTurn
    place: int
    text: str | None
    ids: list[int]
    following: list[_TextTurn] = field(default_factory=list)


class TextTurns:
    """The turns of a session that answered /v1/completions."""

    def __init__(self) -> None:
        self._roots: list[_TextTurn] = []
        self._turns: dict[AnsweredTurn, _TextTurn] = {}

    def add(self, turn: AnsweredTurn, before: AnsweredTurn | None, rest: Prompt, ids: Sequence[int]) -> None:
        """Add a turn.

        Args:
            turn: The turn.
            before: The turn behind which its prompt goes on, as `match` has said.
            rest: The rest of its prompt, likewise.
            ids: The tokens of the rest.
        """
        text = rest + (turn.answered.content or "") if isinstance(rest, str) else None
        added = _TextTurn(turn, len(self._turns), text, [*ids, *turn.completion.ids])
        self._turns[turn] = added
        (self._roots if before is None else self._turns[before].following).append(added)

    def match(self, prompt: Prompt) -> tuple[AnsweredTurn | None, Prompt]:
        """Return the turn with the longest history that a prompt goes on behind, and the rest of the prompt.

        Of several such turns, one comes first that nothing follows yet, and then the earliest.
        """
        known = [(end, each) for end, each in self._known(prompt) if end < len(prompt) and each.turn.is_heard]
        if not known:
            return None, prompt
        longest = max(end for end, _ in known)
        turns = [each.turn for end, each in sorted(known, key=lambda pair: pair[1].place) if end == longest]
        return next((turn for turn in turns if turn.can_grow), turns[0]), prompt[longest:]

    def _known(self, prompt: Prompt) -> Iterator[tuple[int, _TextTurn]]:
        """Yield the turns whose whole histories a prompt begins with, and how much of it each of them is."""
        waiting = [(0, each) for each in self._roots]
        while waiting:
            begin, each = waiting.pop()
            added = each.text if isinstance(prompt, str) else each.ids
            if added is None:
                continue  # what follows tokens is tokens
            end = begin + len(added)
            if prompt[begin:end] == added:
                yield end, each
                waiting += [(end, following) for following in each.following]
