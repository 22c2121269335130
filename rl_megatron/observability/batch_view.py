"""What is shown of a batch: tokens with their loss mask, in sequences, in microbatches. Renderers read only this."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Token:
    """A token as it is shown.

    Attributes:
        id: Its number in the vocabulary.
        text: Its text behind another token.
        trained: Whether it counts in the loss.
        special: Whether it is a special token, such as end-of-sequence, rather than text.
    """

    id: int
    text: str
    trained: bool = False
    special: bool = False


@dataclass(frozen=True)
class ShownSequence:
    """A sequence of the batch, or a prompt.

    Attributes:
        title: Its number, and whether it is the chosen or the rejected one of a pair.
        tokens: Its tokens, without padding.
        padding: Padding positions behind it in its microbatch.
        note: What else is known of it, such as the reference answer; empty if nothing is.
    """

    title: str
    tokens: list[Token]
    padding: int = 0
    note: str = ""

    @property
    def num_trained(self) -> int:
        """Return the number of tokens that count in the loss."""
        return sum(token.trained for token in self.tokens)


@dataclass(frozen=True)
class ShownGroup:
    """The sequences of a microbatch, or the prompts of a step.

    Attributes:
        title: What it is.
        sequences: In the order in which the model gets them.
        pack: If they lie one after the other in one pack, the (title, tokens, padding) of each; otherwise empty.
        num_hidden: Sequences that the user did not ask to see.
    """

    title: str
    sequences: list[ShownSequence]
    pack: tuple[tuple[str, int, int], ...] = ()
    num_hidden: int = 0


@dataclass(frozen=True)
class BatchView:
    """Everything that is shown of a step, or of the held-out data.

    Attributes:
        title: The stage and the step.
        facts: Names and values.
        groups: The sequences.
        has_mask: Whether a loss mask is known; prompts have none.
    """

    title: str
    facts: list[tuple[str, str]]
    groups: list[ShownGroup]
    has_mask: bool = True

    @property
    def num_hidden(self) -> int:
        """Return the number of sequences that are not shown."""
        return sum(group.num_hidden for group in self.groups)

    def shortened(self, limit: int) -> BatchView:
        """Return the view with the first `limit` sequences only."""
        groups, left = [], limit
        for group in self.groups:
            kept = group.sequences[: max(left, 0)]
            left -= len(kept)
            groups.append(replace(group, sequences=kept, num_hidden=len(group.sequences) - len(kept)))
        return replace(self, groups=groups)
