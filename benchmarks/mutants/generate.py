"""Make the mutants of the package: a sample of what the operators find, and those of `field.toml` and `fixes.toml`."""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.mutants.operators import FIELD, GENERAL, Operator
from benchmarks.mutants.source import SUBPACKAGES, Function, Place, Source, is_text

TABLE = Path(__file__).with_name("field.toml")
FIXES = Path(__file__).with_name("fixes.toml")
NUM_GENERAL = 170
NUM_FIELD_BY_OPERATORS = 70  # beside those of the table
_PER_FILE = 3  # mutants of one operator in one file, at most
_SEED = "2"
_MESSAGES = re.compile(r"^(log\.|warnings\.|once\(|logger\.|report_progress|declare_metrics|register)|LOGGER")
_NEVER_CHANGED = (ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop, ast.arg, ast.alias)
_OF_MESSAGES = re.compile(r"(^|\.)_?(describe|shown|named|said|report|failure)\w*$|__repr__|__str__")


@dataclass(frozen=True)
class Mutant:
    """A change of one place of the package.

    Attributes:
        id: What names it as long as the place's text and function stay: file, function, operator and a digest.
        file: The file, relative to the package.
        line: The line in which it begins.
        kind: "general", "field" or "fix".
        operator: What has changed the place; "table" for `field.toml`, "fix" for `fixes.toml`.
        description: What is wrong with the mutant.
        before: The text that is replaced.
        after: The text in its place.
        start: The offset of the text, in bytes.
    """

    id: str
    file: str
    line: int
    kind: str
    operator: str
    description: str
    before: str
    after: str
    start: int

    @property
    def subpackage(self) -> str:
        """The package's part that the mutant belongs to."""
        return self.file.partition("/")[0]

    @property
    def span(self) -> tuple[int, int]:
        """Where the text begins and ends, in bytes."""
        return self.start, self.start + len(self.before.encode())

    def apply(self, source: bytes) -> bytes:
        """Return the mutated text of the file."""
        start, stop = self.span
        assert source[start:stop] == self.before.encode(), f"{self.id}: the file has changed"
        return source[:start] + self.after.encode() + source[stop:]


class StaleTable(ValueError):
    """The error if the text of a mutant of a table does not stand exactly once in its file."""


@dataclass(frozen=True)
class Package:
    """The directory of the package. Operators change some of its parts, and the tables any."""

    root: Path
    subpackages: tuple[str, ...] = SUBPACKAGES

    @cached_property
    def sources(self) -> dict[str, Source]:
        """The files, by path relative to the package."""
        files = sorted(self.root.rglob("*.py"))
        return {str(path.relative_to(self.root)): Source(path.read_text()) for path in files}

    def mutants(self) -> list[Mutant]:
        """Return all mutants, in the order of the files."""
        by_hand, fixes = self.of_table(TABLE), self.of_table(FIXES, "fix", "fix")
        of_field, of_general = self._of_operators
        field = self._sample(of_field, NUM_FIELD_BY_OPERATORS, by_hand)
        taken = {(mutant.file, mutant.start, mutant.after) for mutant in of_field}
        others = [mutant for mutant in of_general if (mutant.file, mutant.start, mutant.after) not in taken]
        general = self._sample(others, NUM_GENERAL, [*by_hand, *field])
        return sorted([*by_hand, *fixes, *field, *general], key=lambda mutant: (mutant.file, mutant.start, mutant.id))

    def ids(self) -> set[str]:
        """Return the ids of all mutants that a sample may have, and of those of the tables."""
        return {mutant.id for mutants in (*self._of_operators, self.mutants()) for mutant in mutants}

    @cached_property
    def _of_operators(self) -> tuple[list[Mutant], list[Mutant]]:
        """All mutants of the field's operators, and of the general ones."""
        return self.of_operators("field", FIELD), self.of_operators("general", GENERAL)

    @cached_property
    def _places(self) -> dict[str, list[Place]]:
        """The places of each file that operators may change."""
        return {
            file: list(_mutable_places(source))
            for file, source in self.sources.items()
            if file.partition("/")[0] in self.subpackages
        }

    def of_operators(self, kind: str, operators: dict[str, Operator]) -> list[Mutant]:
        """Return every mutant that the operators find."""
        found = []
        for file, places in self._places.items():
            source = self.sources[file]
            for place in places:
                for name, operator in operators.items():
                    for change in operator(place, source):
                        start, _ = source.span(change.node)
                        before = source.text(change.node)
                        found.append(
                            Mutant(
                                f"{file}:{place.qualified_name}:{name}",
                                file,
                                source.line(start),
                                kind,
                                name,
                                change.description,
                                before,
                                change.after,
                                start,
                            )  # fmt: skip
                        )
        return _with_unique_ids(found)

    def of_table(self, table: Path, kind: str = "field", operator: str = "table") -> list[Mutant]:
        """Return the mutants of a table.

        Raises:
            StaleTable: A text is not found exactly once. The message names all of them.
        """
        found, stale = [], []
        for entry in tomllib.loads(table.read_text())["mutant"]:
            file, before = entry["file"], entry["before"]
            count = self.sources[file].data.count(before.encode()) if file in self.sources else 0
            if count != 1:
                stale.append(f"{file} has {count} times, instead of once: {before.strip()!r}")
                continue
            source = self.sources[file]
            start = source.data.index(before.encode())
            first = start + len(before.encode()) - len(before.lstrip().encode())
            found.append(
                Mutant(
                    f"{file}:{source.name_around(first)}:{operator}",
                    file,
                    source.line(first),
                    kind,
                    operator,
                    entry["description"],
                    before,
                    entry["after"],
                    start,
                )  # fmt: skip
            )
        if stale:
            raise StaleTable(f"{table.name} does not fit the package:\n" + "\n".join(stale))
        return _with_unique_ids(found)

    def _sample(self, mutants: list[Mutant], number: int, taken: Iterable[Mutant]) -> list[Mutant]:
        """Return that many mutants, which follow the lines of the subpackages, and have all operators in equal shares.

        The choice depends on the ids only, so that an edit of the package changes few of them.

        Args:
            mutants: All that there are.
            number: How many are chosen.
            taken: Mutants that are in the campaign already; those that change the same text are left out.
        """
        lines: Counter[str] = Counter()
        for file in self._places:
            lines[file.partition("/")[0]] += self.sources[file].data.count(b"\n")
        by_part: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
        for mutant in sorted(mutants, key=lambda mutant: _draw(mutant.id)):
            by_part[mutant.subpackage][mutant.operator].append(mutant)
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for mutant in taken:
            spans[mutant.file].append(mutant.span)

        def overlaps(mutant: Mutant) -> bool:
            start, stop = mutant.span
            return any(start < other_stop and other_start < stop for other_start, other_stop in spans[mutant.file])

        shares = _shares(lines, number)
        return [mutant for part in shares for mutant in _in_turn(part, by_part[part], shares[part], overlaps)]


def _with_unique_ids(mutants: Iterable[Mutant]) -> list[Mutant]:
    """Add to each id a digest of the change, and its number among equal changes of the function."""
    numbers: Counter[str] = Counter()
    found = []
    for mutant in mutants:
        digest = hashlib.sha256(f"{mutant.before}\0{mutant.after}".encode()).hexdigest()[:6]
        name = f"{mutant.id}:{digest}"
        numbers[name] += 1
        found.append(replace(mutant, id=name if numbers[name] == 1 else f"{name}.{numbers[name]}"))
    return found


def _in_turn(
    part: str, by_operator: dict[str, list[Mutant]], number: int, overlaps: Callable[[Mutant], bool]
) -> list[Mutant]:
    """Return mutants of one operator after another, with few of one operator in a file."""
    of_file: Counter[tuple[str, str]] = Counter()
    chosen: list[Mutant] = []
    operators = sorted(by_operator, key=lambda name: _draw(f"{part}/{name}"))
    while len(chosen) < number and operators:
        for name in list(operators):
            waiting = by_operator[name]
            while waiting and (of_file[waiting[0].file, name] >= _PER_FILE or overlaps(waiting[0])):
                waiting.pop(0)
            if not waiting:
                operators.remove(name)
                continue
            chosen.append(waiting.pop(0))
            of_file[chosen[-1].file, name] += 1
    return chosen[:number]


def _shares(lines: Counter[str], number: int) -> dict[str, int]:
    """Divide a number in the proportion of the lines, and round up where most is lost."""
    exact = {part: number * count / lines.total() for part, count in lines.items()}
    shares = {part: int(share) for part, share in exact.items()}
    by_loss = sorted(exact, key=lambda part: exact[part] - shares[part], reverse=True)
    for part in by_loss[: number - sum(shares.values())]:
        shares[part] += 1
    return shares


def _draw(text: str) -> str:
    return hashlib.sha256(f"{_SEED}/{text}".encode()).hexdigest()


def _mutable_places(source: Source) -> Iterator[Place]:
    """Yield every node whose change changes what the package does: no text, annotation, message or declaration."""
    waiting: list[Place] = [Place(node, (source.tree,)) for node in reversed(source.tree.body)]
    while waiting:
        place = waiting.pop()
        if _is_left_out(place, source):
            continue
        yield place
        node, around = place.node, (*place.parents, place.node)
        left_out = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        left_out += node.decorator_list if isinstance(node, Function | ast.ClassDef) else []
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _NEVER_CHANGED)]
        waiting += [Place(child, around) for child in reversed(children) if not any(child is each for each in left_out)]


def _is_left_out(place: Place, source: Source) -> bool:
    node = place.node
    if is_text(node) or isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr | ast.Call) and _MESSAGES.search(source.text(node).partition("(")[0] + "("):
        return True
    if isinstance(node, ast.If) and source.text(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, Function):
        abstract = any(
            "abstract" in ast.unparse(each) or "overload" in ast.unparse(each) for each in node.decorator_list
        )
        return abstract or _OF_MESSAGES.search(node.name) is not None
    if isinstance(node, ast.ClassDef):
        return any(re.search("Protocol|TypedDict|NamedTuple|Error", ast.unparse(base)) for base in node.bases)
    at_module_level = len(place.parents) == 1
    return at_module_level and isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Subscript)
