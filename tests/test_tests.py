"""Tests and benchmarks use the package as its users do: by its public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USERS = sorted(
    path
    for directory in ("tests", "benchmarks")
    for path in (ROOT / directory).rglob("*.py")
    if "mutants" not in path.as_posix()  # they change the package's text
)
# Attributes of others that have names which the package uses too.
OF_OTHERS = ("func._schema", "torch.nn.Module._apply", "options._timeout", "self._metrics")  # the last is TRL's
# The documentation of NeMo RL lists the first two, which its users call and override. The others are namedtuples'.
NAMES_OF_OTHERS = {"_dpo_loss", "_preference_loss", "_fields", "_asdict", "_replace"}


def is_private(name: str) -> bool:
    return re.match(r"_(?!_)", name) is not None and name not in NAMES_OF_OTHERS


def is_on_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_definitions(source: str) -> set[str]:
    """Return the private names of functions, classes, attributes, and variables of modules and classes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                stored = {part.attr for part in ast.walk(node) if is_on_self(part) and isinstance(part.ctx, ast.Store)}
                found |= {name} | stored
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    found |= {part.id for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)}
    return {name for name in found if is_private(name)}


@lru_cache(maxsize=1)
def of_package() -> frozenset[str]:
    """Return the private names of the package."""
    files = (ROOT / "rl_megatron").rglob("*.py")
    return frozenset(name for path in files for name in private_definitions(path.read_text()))


def parts_of_texts(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the strings that are parts of f-strings, or are looked for in texts."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                yield from parts
            case ast.Compare(left=text, ops=[ast.In() | ast.NotIn()]):
                yield text
            case ast.Call(func=ast.Attribute(attr="endswith" | "removesuffix"), args=parts):
                yield from parts


def private_uses(source: str, of: Collection[str] | None = None) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every use of a private name of the package, also in strings that hold a name or a program.

    A name that the source itself defines is its own.
    """
    names = set(of_package() if of is None else of)
    if names.isdisjoint(re.findall(r"\b_\w+", source)):  # cheaper than parsing it
        return
    names, tree = names - private_definitions(source), ast.parse(source)
    texts = set(parts_of_texts(tree))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.partition(".")[0] == "rl_megatron":
                yield from ((node.lineno, alias.name) for alias in aliases if is_private(alias.name))
            case ast.Attribute(attr=name) if name in names:
                if not ast.unparse(node).endswith(OF_OTHERS):
                    yield node.lineno, name
            case ast.Constant(value=str(text)) if node not in texts:
                found = {text, *re.findall(r"\.(_\w+)", text), *re.findall(r"import (_\w+)", text)}
                yield from ((node.lineno, name) for name in sorted(found & names))


@pytest.mark.change
def test_no_test_and_no_benchmark_uses_a_private_name_of_the_package():
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in USERS
        if path != Path(__file__)
        for line, name in private_uses(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("use", "is_found"),
    [
        ("engine._workers", True),
        ("engine._workers = []", True),
        ("from rl_megatron.engine import _start", True),
        ("monkeypatch.setattr(engine, '_workers', [])", True),
        ("monkeypatch.setattr('rl_megatron.engine._workers', [])", True),
        ("run('from rl_megatron import engine\\nprint(engine._workers)')", True),
        ("fakes = {'_start': None}", True),
        ("def stop(self): self._workers = []\nEngine.stop = stop", True),
        ("class Fake(Engine):\n    def stop(self): self._workers.clear()", True),
        ("engine.workers, engine._asdict(), engine.__dict__, os._exit(0)", False),
        ("'_start' in name, f'{name}_start', name.endswith('_start')", False),
        ("class Fake:\n    def __init__(self): self._workers = []\nFake()._workers", False),
        ("from tests.engine import _start", False),
    ],
)
def test_a_private_name_is_found(use, is_found):
    package = "_limit = 1\ndef _start(): ...\nclass Engine:\n    def __init__(self): self._workers = []"
    assert bool([*private_uses(use, private_definitions(package))]) == is_found
