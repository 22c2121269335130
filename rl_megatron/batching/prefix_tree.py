"""`PrefixTree`: sequences with common beginnings, cut into segments that the model computes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that all sequences below them share.

    Attributes:
        begin: The position of the first token in these sequences.
        length: The number of tokens, at least 1.
        parent: The index of the segment that precedes this one in these sequences; None at a sequence's start.
        end: The index after the last segment below this one. The segments from the next one to this index descend from
            it, because a tree lists its segments depth first.
    """

    begin: int
    length: int
    parent: int | None
    end: int


@dataclass(frozen=True)
class PrefixTree:
    """The segments of a pack's sequences, as a forest.

    Attributes:
        segments: All segments, depth first.
        paths: For each sequence, the indices of its segments, from its start to its end.
    """

    segments: tuple[Segment, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def depth(self) -> int:
        """Return the largest number of segments of a sequence."""
        return max(map(len, self.paths), default=0)

    @classmethod
    def build(cls, lengths: Sequence[int], shared: Sequence[int]) -> PrefixTree:
        """Return the tree of sequences that are listed so that those with common tokens follow each other.

        Args:
            lengths: The number of tokens of each sequence, at least 1.
            shared: The number of tokens at its start that each sequence shares with the one before it, less than its
                own length and at most the length of that one. As in a sorted list, a sequence shares with all earlier
                ones at most the smallest number between them.
        """
        roots: list[_Node] = []
        open_nodes: list[_Node] = []  # those of the last sequence, from its start to its end
        leaves = []
        for length, common in zip(lengths, shared, strict=True):
            while open_nodes and open_nodes[-1].begin >= common:
                open_nodes.pop()
            if common and (not open_nodes or open_nodes[-1].stop < common):
                raise ValueError(f"a sequence shares {common} tokens with the one before it, which has fewer")
            if common >= length:
                raise ValueError(f"a sequence of {length} tokens shares {common}; its last token has to be its own")
            if open_nodes and open_nodes[-1].stop > common:
                open_nodes[-1].split(common)
            leaf = _Node(common, length, open_nodes[-1] if open_nodes else None)
            (open_nodes[-1].children if open_nodes else roots).append(leaf)
            open_nodes.append(leaf)
            leaves.append(leaf)
        segments = _list_segments(roots)
        return cls(segments, tuple(leaf.path() for leaf in leaves))


@dataclass(eq=False)
class _Node:
    """A segment of a tree that is being built. If it is split, it keeps its upper part, and `lower` is the rest."""

    begin: int
    stop: int
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    lower: _Node | None = None
    index: int = -1

    def split(self, at: int) -> None:
        """Cut the segment at a position; its children stay below its lower part."""
        self.lower = _Node(at, self.stop, self, self.children, self.lower)
        for child in self.children:
            child.parent = self.lower
        self.stop, self.children = at, [self.lower]

    def path(self) -> tuple[int, ...]:
        """Return the indices of the segments of the sequence that ends in this node."""
        node = self
        while node.lower is not None:
            node = node.lower
        indices = []
        while node is not None:
            indices.append(node.index)
            node = node.parent
        return tuple(reversed(indices))


def _list_segments(roots: list[_Node]) -> tuple[Segment, ...]:
    """Return the segments depth first, and set the indices of their nodes."""
    nodes: list[_Node] = []
    waiting = roots[::-1]
    while waiting:
        node = waiting.pop()
        node.index = len(nodes)
        nodes.append(node)
        waiting += node.children[::-1]
    sizes = [1] * len(nodes)  # of the subtrees
    for node in reversed(nodes):
        if node.parent is not None:
            sizes[node.parent.index] += sizes[node.index]
    return tuple(
        Segment(node.begin, node.stop - node.begin, None if node.parent is None else node.parent.index, end)
        for node, end in zip(nodes, (node.index + size for node, size in zip(nodes, sizes, strict=True)), strict=True)
    )
