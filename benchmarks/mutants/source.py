"""The text of a file of the package, its syntax tree, and the blocks of statements that a run of it enters."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

# The package's parts that operators change.
SUBPACKAGES = (
    "losses", "logprobs", "batching", "training", "weight_sync", "checkpoint", "generation", "rollouts", "evaluation",
    "algorithms", "runs",
)  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BODIES = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Place:
    """A node of a tree, with the nodes around it, the innermost last."""

    node: ast.AST
    parents: tuple[ast.AST, ...]

    @property
    def qualified_name(self) -> str:
        """The names of the functions and classes around the node, or "" at module level."""
        around = (*self.parents, self.node)
        return ".".join(each.name for each in around if isinstance(each, Function | ast.ClassDef))

    @property
    def parent(self) -> ast.AST:
        """The node around this one."""
        return self.parents[-1]


@dataclass(frozen=True)
class Block:
    """A list of statements that is entered as a whole: the body of a function, a branch or a loop."""

    key: str
    start: int
    stop: int
    insert_at: int  # the offset of the line before which a mark is inserted
    indent: str


class Source:
    """A file's text as UTF-8, whose offsets are those of its tree."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends."""
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, stop = self.span(node)
        return self.data[start:stop].decode()

    def line(self, offset: int) -> int:
        """Return the number of the line of an offset."""
        return bisect_right(self._starts, offset)

    def places(self) -> Iterator[Place]:
        """Yield every node, outer ones first."""
        waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(self.tree, ())]
        while waiting:
            node, parents = waiting.pop()
            yield Place(node, parents)
            children = [(child, (*parents, node)) for child in ast.iter_child_nodes(node)]
            waiting += reversed(children)

    @cached_property
    def _named(self) -> list[tuple[int, int, str]]:
        """Where each function and class begins and ends, and its qualified name."""
        named = [place for place in self.places() if isinstance(place.node, Function | ast.ClassDef)]
        return [(*self.span(place.node), place.qualified_name) for place in named]

    def name_around(self, offset: int) -> str:
        """Return the qualified name of the innermost function or class around an offset, or ""."""
        return max((name for start, stop, name in self._named if start <= offset < stop), key=len, default="")

    @cached_property
    def blocks(self) -> list[Block]:
        """Every block of the functions that Python itself runs, in the order of the file."""
        found: list[Block] = []
        counts: dict[str, int] = {}
        for place in self.places():
            function = next(
                (each for each in reversed((*place.parents, place.node)) if isinstance(each, Function)), None
            )
            if function is None or any(is_compiled(each) for each in (*place.parents, place.node)):
                continue
            for name in _BODIES:
                statements = getattr(place.node, name, None)
                if isinstance(statements, list) and not isinstance(place.node, ast.ClassDef):
                    key = place.qualified_name
                    counts[key] = counts.get(key, -1) + 1
                    block = self._block(f"{key}#{counts[key]}", statements)
                    if block is not None:
                        found.append(block)
        return found

    def _block(self, key: str, statements: list[ast.stmt]) -> Block | None:
        code = [each for each in statements if not is_text(each)]
        if not code or self.data[self.span(code[0])[0] :].startswith(b"elif"):
            return None
        start, (_, stop) = self.span(statements[0])[0], self.span(statements[-1])
        first = min([code[0], *getattr(code[0], "decorator_list", ())], key=lambda node: node.lineno)
        line_start = self._starts[first.lineno - 1]
        indent = self.data[line_start : line_start + code[0].col_offset].decode()
        return Block(key, start, stop, line_start, indent) if not indent.strip() else None

    def with_marks(self, numbers: dict[str, int], import_line: str) -> bytes:
        """Return the text with a line at the start of each block that marks its number.

        Args:
            numbers: The number of each block by its key.
            import_line: The lines that define `_reached`, in which `_reached[number] = 1` marks.
        """
        if not self.blocks:
            return self.data
        head = (each for each in self.tree.body if not is_text(each))
        first = next(each for each in head if getattr(each, "module", "") != "__future__")
        line = min([first, *getattr(first, "decorator_list", ())], key=lambda node: node.lineno).lineno
        insertions = [(self._starts[line - 1], f"{import_line}\n")]
        insertions += [
            (block.insert_at, f"{block.indent}_reached[{numbers[block.key]}] = 1\n") for block in self.blocks
        ]
        data = self.data
        for offset, text in sorted(insertions, reverse=True):
            data = data[:offset] + text.encode() + data[offset:]
        return data

    def blocks_of(self, offset: int) -> list[Block]:
        """Return the innermost block around an offset; or all of the file's blocks, if the offset is in none.

        Code at module level, defaults of arguments and functions that something else compiles are in none.
        """
        function = self._function_with_default(offset)
        if function is not None:
            offset = self.span(function.body[-1])[0]
        around = [block for block in self.blocks if block.start <= offset < block.stop]
        return [min(around, key=lambda block: block.stop - block.start)] if around else self.blocks

    def _function_with_default(self, offset: int) -> Function | None:
        """Return the function whose decorators or signature have the offset, or None."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                start = min([self.span(node)[0], *(self.span(each)[0] for each in node.decorator_list)])
                if start <= offset < self.span(node.body[0])[0]:
                    return node
        return None


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is a docstring, or another text that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_compiled(node: ast.AST) -> bool:
    """Return whether a node is a function whose source something else compiles, such as Triton."""
    return isinstance(node, Function) and any("jit" in ast.unparse(each) for each in node.decorator_list)
