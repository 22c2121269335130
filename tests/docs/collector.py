"""Read the pages of the documentation: their fenced blocks, and the commands in their bash blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from tests.forkserver import REPOSITORY

_FENCE = re.compile(r"^ *(?P<marks>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^ *(?P=marks) *$", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"""title=["'](?P<path>[^"']+)["']""")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_RANKS = re.compile(r"--(nproc-per-node|nproc_per_node|nnodes)(?:=(\S+))?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page, relative to the repository.
        line: The line of the page on which the block's text begins.
        language: The first word behind the fence.
        title: The path that `title="…"` behind the fence gives: the block is the text of that file.
        text: The text, without the fences and without the indentation of the first line.
    """

    page: str
    line: int
    language: str
    title: str | None
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a bash block.

    Attributes:
        page: The page, relative to the repository.
        line: The line of the page that it is on.
        text: The command as it is written, lines joined.
        words: The words of the command, without assignments before it and without what follows a pipe or a redirect.
        variables: The assignments before it, such as `NPROC_PER_NODE=2`.
    """

    page: str
    line: int
    text: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def arguments(self) -> tuple[str, ...] | None:
        """Return the arguments of `rl-megatron`, however it is started; None if the command starts something else."""
        words = list(self.words[1:] if self.words[0] in ("bash", "sbatch") else self.words)
        if words[0] == "rl-megatron":
            return tuple(words[1:])
        for index, word in enumerate(words):
            if word == "rl_megatron" and words[index - 1] == "-m":
                return tuple(words[index + 1 :])
            if word in ("scripts/train.sh", "scripts/train.slurm"):
                return tuple(words[index + 1 :])
        return None

    @property
    def ranks(self) -> int | None:
        """Return how many ranks the command starts; None if that depends on the machine."""
        if self.words[0] == "rl-megatron" or self.words[:3] == ("python", "-m", "rl_megatron"):
            return 1
        found = {"nnodes": self.variables.get("NNODES", "1"), "nproc": self.variables.get("NPROC_PER_NODE", "")}
        for index, word in enumerate(self.words):
            if option := _RANKS.fullmatch(word):
                found[option[1].replace("_", "-").removesuffix("-per-node")] = option[2] or self.words[index + 1]
        if not all(number.isdecimal() for number in found.values()):
            return None
        return int(found["nnodes"]) * int(found["nproc"])


def pages() -> list[str]:
    """Return README.md, CONTRIBUTING.md and every page under docs/, relative to the repository."""
    docs = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))
    return ["README.md", "CONTRIBUTING.md", *docs]


def blocks(page: str, repository: Path = REPOSITORY) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = (repository / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        language, _, rest = fence["info"].strip().partition(" ")
        title = _TITLE.search(rest)
        body = fence["body"]
        indent = len(body) - len(body.lstrip(" "))
        body = re.sub(rf"^ {{1,{indent}}}", "", body, flags=re.MULTILINE) if indent else body
        line = text.count("\n", 0, fence.start("body")) + 1
        found.append(Block(page, line, language, title["path"] if title else None, body))
    return found


def commands(block: Block) -> list[Command]:
    """Return the commands of a bash block, in order.

    Raises:
        ValueError: a line cannot be read as shell; the message names its place.
    """
    found = []
    for offset, text in _logical_lines(block.text):
        place = f"{block.page}:{block.line + offset}"
        try:
            parts = list(_parts(text.partition("\n")[0]))
        except ValueError as error:
            raise ValueError(f"{place}: {text!r} cannot be read as shell: {error}") from error
        for variables, words in parts:
            shown = text if len(parts) == 1 else shlex.join(words)
            found.append(Command(block.page, block.line + offset, shown, words, variables))
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 0, command): continued lines joined, a here-document with its command, no comments."""
    lines = iter(enumerate(text.splitlines()))
    for number, line in lines:
        while line.endswith("\\"):
            line = line[:-1].rstrip() + " " + next(lines)[1].strip()
        line = line.strip()
        if heredoc := _HEREDOC.search(line):
            for _, below in lines:
                line += "\n" + below
                if below.strip() == heredoc[1]:
                    break
        if line and not line.startswith("#"):
            yield number, line


def _parts(line: str) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Yield (variables, words) of each command of a line; of a pipe, the first command alone."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    in_pipe = False
    for token in [*lexer, ";"]:
        if token in ("&&", ";", "||", "&"):
            variables = dict(word.split("=", 1) for word in takewhile(_ASSIGNMENT.match, words))
            rest = words[len(variables) :]
            if rest:
                yield variables, tuple(rest)
            words, in_pipe = [], False
        elif set(token) <= set("|<>&"):
            in_pipe = True
        elif not in_pipe:
            words.append(token)
