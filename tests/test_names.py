"""Functions of the package are named by verbs, and local variables by what they are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rl_megatron"

_IRREGULAR = (
    "begun|bound|bought|brought|built|chosen|cut|done|drawn|driven|fallen|found|given|gone|grown|heard|held|hidden|kept|"
    "known|laid|left|lent|lost|made|meant|met|put|run|said|seen|sent|set|shown|split|spent|taken|thrown|told|written"
)
# A participle alone says what comes out, but neither what is done nor with what.
PARTICIPLE = re.compile(rf"_*([a-z]+ed|{_IRREGULAR})(_(at|by|for|from|in|off|on|out|to|with))?")
POSSESSIVE = re.compile(r"_*(of|of_.*|.*_of)")
VERBS = {"cut", "embed", "exceed", "feed", "need", "proceed", "put", "run", "seed", "set", "shed", "speed", "split"}
LOCALS = {"each", "found", "given", "known", "made", "place", "own", "before", "taken", "said"}
_NOUNS = {"property", "cached_property", "setter"}

# Names that a protocol, another library or a user's file fixes, or that are verbs or nouns after all.
ALLOWED: dict[str, set[str]] = {
    "observability/failures.py": {"place"},  # in a run: the class `Place`
    "observability/html_report.py": {"place"},
    "observability/liveness.py": {"place"},
    "observability/watchdog.py": {"place"},
    "losses/base.py": {"Loss.name_of", "LogprobLoss.name_of"},  # users' losses override it
    "losses/calling.py": {"CallForms.name_of"},
}


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a module with their qualified names, without properties."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef) and not _is_noun(child):
                    yield name, child
                yield from visit(child, f"{name}.")
            else:
                yield from visit(child, prefix)

    return visit(tree, "")


def _is_noun(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {
        node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in function.decorator_list
    }
    return bool(names & _NOUNS)


def is_refused(name: str) -> bool:
    """Return whether a function's name is a possessive or a bare participle."""
    if POSSESSIVE.fullmatch(name):
        return True
    match = PARTICIPLE.fullmatch(name)
    return bool(match) and match[1] not in VERBS


def refused_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each function and each local variable of a module that has a refused name."""
    tree = ast.parse(text)
    for name, function in definitions(tree):
        if is_refused(function.name):
            yield function.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in LOCALS:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in LOCALS:
            yield node.lineno, node.arg


@cache
def refused_by_file() -> dict[str, list[tuple[int, str]]]:
    """Return the refused names of every file of the package."""
    return {
        str(path.relative_to(PACKAGE)): list(refused_names(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_functions_are_named_by_verbs_and_locals_by_what_they_are():
    refused = [
        f"{name}:{line}: {word}"
        for name, refusals in refused_by_file().items()
        for line, word in refusals
        if word not in ALLOWED.get(name, ())
    ]
    assert not refused, "\n".join(refused)


def test_every_exception_is_needed():
    unused = {
        (name, word)
        for name, words in ALLOWED.items()
        for word in words - {word for _, word in refused_by_file()[name]}
    }
    assert not unused


def test_a_possessive_a_participle_and_an_empty_local_are_refused():
    text = "def lengths_of(x):\n    for each in x:\n        yield each\nclass A:\n    def joined(self): ...\n"
    text += "    @property\n    def kept(self): ...\n    def embed(self): ...\n    def reset_weights(self): ...\n"
    assert [word for _, word in refused_names(text)] == ["lengths_of", "A.joined", "each"]
