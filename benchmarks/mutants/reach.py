"""Record which tests reach which blocks of the package, and read the record."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants import plugin
from benchmarks.mutants.copies import REPOSITORY, Copy
from benchmarks.mutants.generate import Mutant, Package

_MODULE = "_reached"
_TEXT = """import mmap
import os

with open(os.environ.get({variable!r}, {default!r}), "r+b") as _file:
    REACHED = mmap.mmap(_file.fileno(), 0)
"""
# A confined program of a test has only the module that limits it.
_IMPORT = """try:
    from rl_megatron._reached import REACHED as _reached
except ModuleNotFoundError:
    _reached = bytearray({size})"""


def record(out: Path, tests: Sequence[str], tier: str, options: Sequence[str], copy: Copy, package: Package) -> int:
    """Run tests on a copy of the package with marks, and add a line for each to `reach.jsonl`. Return pytest's status.

    Args:
        out: The directory of the record, which an interrupted recording goes on with.
        tests: Paths of tests, relative to the repository.
        tier: The slowest tier that runs.
        options: More options of pytest.
        copy: The copy that gets the marks.
        package: The package in the copy.
    """
    keys = block_keys(package)
    name = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"blocks-{name}.json").write_text(json.dumps(keys))
    root = copy.root.absolute()
    marks = Path(f"{root}.marks")
    marks.write_bytes(bytes(len(keys)))
    numbers = {key: number for number, key in enumerate(keys)}
    for file, source in package.sources.items():
        of_file = {block.key: numbers[f"{file}:{block.key}"] for block in source.blocks}
        copy.write(file, source.with_marks(of_file, _IMPORT.format(size=len(keys))))
    copy.write(f"{_MODULE}.py", _TEXT.format(variable=plugin.MARKS, default=str(marks)).encode())
    environment = os.environ | {
        "PYTHONPATH": f"{root}{os.pathsep}{REPOSITORY}", "PYTHONPYCACHEPREFIX": f"{root}.bytecode",
        "OMP_NUM_THREADS": "1", plugin.MARKS: str(marks), plugin.TABLE: name, plugin.TIER: tier,
        plugin.OUT: str(out.absolute() / "reach.jsonl"),
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # new processes of tests would compile everything
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin.__name__, *options, *tests]
    return subprocess.run(command, cwd=root, env=environment).returncode


def block_keys(package: Package) -> list[str]:
    """Return the keys of the blocks of all files, with the file before each."""
    return [f"{file}:{block.key}" for file, source in package.sources.items() for block in source.blocks]


@dataclass(frozen=True)
class ReachingTest:
    """A test that may notice mutants.

    Attributes:
        id: What pytest calls it.
        tier: "fast", "change" or "nightly".
        seconds: How long it took with marks.
    """

    id: str
    tier: str
    seconds: float

    @property
    def file(self) -> str:
        """The file of the test."""
        return self.id.partition("::")[0]


class Reach:
    """The tests of a record by the blocks that they reach. Tests that were skipped reach nothing.

    If a function has other blocks than when a test was recorded, the test counts for all of them if it reached any; if
    there was no such function, then for the function if it reached any block of the file.
    """

    def __init__(self, out: Path, repository: Path = REPOSITORY) -> None:
        self._by_block: dict[str, dict[str, list[ReachingTest]]] = {}  # by table and key
        self._keys: dict[str, dict[str, list[str]]] = {}  # by table and by function, or file
        tables: dict[str, list[str]] = {}
        lines = (out / "reach.jsonl").read_text().splitlines()
        latest = {line["test"]: line for line in map(json.loads, lines)}
        for line in latest.values():
            if line["outcome"] == "skipped" or not (repository / line["test"].partition("::")[0]).exists():
                continue
            table = line["table"]
            if table not in tables:
                tables[table] = json.loads((out / f"blocks-{table}.json").read_text())
                self._by_block[table], self._keys[table] = defaultdict(list), defaultdict(list)
                for key in tables[table]:
                    self._keys[table][_function_of(key)].append(key)
                    self._keys[table][key.partition(":")[0]].append(key)
            test = ReachingTest(line["test"], line["tier"], line["seconds"])
            for number in plugin.read_ranges(line["blocks"]):
                self._by_block[table][tables[table][number]].append(test)

    def tests_of(self, mutant: Mutant, package: Package) -> list[ReachingTest]:
        """Return the tests that reach a mutant; those that are likely to notice it, and fast ones, come first."""
        source = package.sources[mutant.file]
        current: dict[str, list[str]] = defaultdict(list)
        for block in source.blocks:
            key = f"{mutant.file}:{block.key}"
            current[_function_of(key)].append(key)
        blocks = source.blocks_of(mutant.start + len(mutant.before) - len(mutant.before.lstrip()))
        tests: set[ReachingTest] = set()
        for key in (f"{mutant.file}:{block.key}" for block in blocks):
            function = _function_of(key)
            for table, by_block in self._by_block.items():
                keys = self._keys[table].get(function) or self._keys[table].get(mutant.file, [])
                for each in [key] if keys == current[function] else keys:
                    tests.update(by_block.get(each, ()))
        stem, folder = Path(mutant.file).stem, f"/{mutant.subpackage}/"

        def order(test: ReachingTest) -> tuple[int, int, float, str]:
            is_far = 2 if folder not in test.file and stem not in test.file else 0 if stem in test.file else 1
            return plugin.TIERS.index(test.tier), is_far, test.seconds, test.id

        return sorted(tests, key=order)


def _function_of(key: str) -> str:
    return key.rpartition("#")[0]
