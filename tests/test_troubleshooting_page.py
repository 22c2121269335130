"""docs/troubleshooting.md: the package has every message that it quotes, and it has every kind of error.

A quote is a code span at the start of a list item, or one that follows another quote and a comma. "…" stands for any
text, so that a quote is a list of constant parts, which a message has in this order. If a message was reworded, the
failure shows the most similar messages of the package: copy the new words into the page.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "rl_megatron"
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
NOT_OURS = {"does not divide the world size 1"}  # an example
VALUE = "\0"
BASES = {"RunFailed"}  # exceptions that have no message of their own, because only classes below them are raised
FEWEST_CHARACTERS = 10  # in a quote's constant parts; shorter quotes would match too much


@dataclass(frozen=True)
class Message:
    """A string of the package.

    Attributes:
        text: The string, with `VALUE` in place of every value of an f-string.
        module: The file, relative to the package.
        raised: The names of the calls around the string; the exception's class is among them if it is raised.
    """

    text: str
    module: str
    raised: frozenset[str]


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string, an f-string or a sum of them, or None for another expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(VALUE if isinstance(part, ast.FormattedValue) else str(text_of(part)) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is right is None else (left or VALUE) + (right or VALUE)
    return None


def messages_below(node: ast.AST, module: str, raised: frozenset[str]) -> Iterator[Message]:
    text = text_of(node)
    if text is not None:
        yield Message(text, module, raised)
        if isinstance(node, ast.Constant | ast.JoinedStr):
            return  # the pieces of an f-string are not messages
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        raised = raised | {called}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        yield from messages_below(child, module, raised)


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def messages() -> tuple[Message, ...]:
    found = (message for module, tree in trees().items() for message in messages_below(tree, module, frozenset()))
    return tuple(message for message in found if len(message.text) >= FEWEST_CHARACTERS)


def quotes_of(page: str) -> list[str]:
    """Return the quoted messages of a page, in its order."""
    quotes = []
    for item in re.findall(r"^- (`.*?)(?=^\S|^$|\Z)", page, re.MULTILINE | re.DOTALL):
        item, ends = " ".join(item.split()), 0
        while span := re.compile(r"(?:, )?`([^`]+)`(?: \(`\w+`\))?").match(item, ends):
            quotes.append(span[1])
            ends = span.end()
    return [quote for quote in quotes if quote not in NOT_OURS]


def parts_of(quote: str) -> list[str]:
    return [part.strip() for part in quote.split("…") if part.strip()]


def says(message: str, parts: list[str]) -> bool:
    """Return whether the message has the constant parts of a quote in their order."""
    place = 0
    for part in parts:
        found = message.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


@cache
def sources_of(quote: str) -> list[Message]:
    parts = parts_of(quote)
    return [message for message in messages() if says(message.text, parts)]


def nearest_to(quote: str) -> str:
    """Return the package's messages that are most similar to a quote, as a help to correct the quote."""
    wanted = " ".join(parts_of(quote))
    raised = {message.text.replace(VALUE, "…"): message.module for message in messages() if message.raised}
    score = {text: difflib.SequenceMatcher(None, wanted, text[:300]).quick_ratio() for text in raised}
    words = set(re.findall(r"\w{4,}", wanted))
    common = sorted(raised, key=lambda text: (-len(words & set(re.findall(r"\w{4,}", text))), -score[text]))
    return "\n".join(f"    {raised[text]}: {text}" for text in common[:3])


QUOTES = quotes_of(PAGE)


def test_quotes_are_found():
    page = "- `one thing …`, `another\n  thing` (`Error`): cause.\n- Not `this`.\n- `a third`\n"
    assert quotes_of(page) == ["one thing …", "another thing", "a third"]
    parts = parts_of("x=… nothing")
    assert says(f"x={VALUE} does nothing: y", parts) and not says("nothing x=", parts)
    assert len(QUOTES) > 100


@pytest.mark.change
def test_the_package_has_every_quoted_message():
    short = [quote for quote in QUOTES if sum(map(len, parts_of(quote))) < FEWEST_CHARACTERS]
    assert not short, f"quote more of these messages: {short}"
    wrong = [f"{quote!r}; nearest:\n{nearest_to(quote)}" for quote in QUOTES if not sources_of(quote)]
    assert not wrong, "no message of the package has the words of\n" + "\n".join(wrong)


def exceptions_of_the_package() -> dict[str, str]:
    """Return class → module for every exception class of the package."""
    bases = {
        node.name: ({ast.unparse(base).rpartition(".")[2] for base in node.bases}, module)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def is_exception(name: str) -> bool:
        known = name in ("Exception", "BaseException") or name.endswith(("Error", "Exception"))
        return known or any(is_exception(base) for base in bases.get(name, ((), ""))[0])

    return {name: module for name, (_, module) in bases.items() if is_exception(name)}


def test_every_exception_has_an_entry():
    exceptions = exceptions_of_the_package()
    quoted = {call for quote in QUOTES for message in sources_of(quote) for call in message.raised}
    assert exceptions
    assert not [name for name in exceptions if f"`{name}`" not in PAGE], "the page does not name these"
    assert not exceptions.keys() - BASES - quoted, "no entry quotes a message of these"


def raises_config_error(tree: ast.Module) -> bool:
    """Return whether a module raises ConfigError with words of its own; some only pass on the message of another."""
    return any(
        isinstance(word, ast.Constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if ast.unparse(node.exc.func) == "ConfigError"
        for word in ast.walk(node.exc)
    )


def test_every_module_that_refuses_input_has_an_entry():
    modules = {module for module, tree in trees().items() if raises_config_error(tree)}
    assert modules
    missing = modules - {message.module for quote in QUOTES for message in sources_of(quote)}
    assert not missing, f"no entry quotes a message of {sorted(missing)}"
