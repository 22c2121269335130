"""A pytest plugin that records which blocks of the package each test reaches, in whatever process it does.

Every process that descends from pytest's maps the file of marks, and sets the byte of a block that it enters. What a
fixture of a wider scope reaches counts for all tests that use it, as does what `ranks.reference` reached when it
computed the value that a test gets.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TIERS = ("fast", "change", "nightly")
# Environment variables: the file of marks, the file that a line per test is appended to, the name of the table of
# blocks, and the slowest tier that runs.
MARKS, OUT, TABLE, TIER = "MUTANTS_MARKS", "MUTANTS_OUT", "MUTANTS_TABLE", "MUTANTS_TIER"
MARKED = re.compile(b"\1")
NARROW = "function"


def write_ranges(numbers: set[int]) -> str:
    """Return numbers as text, such as "1-3,7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def read_ranges(text: str) -> set[int]:
    """Return the numbers that `write_ranges` wrote."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def give_worker_marks(worker: str) -> None:
    """Give a worker of pytest-xdist a file of marks of its own, before it imports the package."""
    size = os.path.getsize(os.environ[MARKS])
    os.environ[MARKS] += worker
    Path(os.environ[MARKS]).write_bytes(bytes(size))


if MARKS in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    give_worker_marks(os.environ["PYTEST_XDIST_WORKER"])


class Recorder:
    """Appends a line for each test: its blocks, tier, seconds and outcome."""

    def __init__(self) -> None:
        with open(os.environ[MARKS], "r+b") as file:
            self._marks = mmap.mmap(file.fileno(), 0)
        self._out, self._table = Path(os.environ[OUT]), os.environ[TABLE]
        self._of_fixtures: dict[Any, set[int]] = defaultdict(set)
        self._of_references: dict[tuple[int, bytes], set[int]] = {}
        self._outcome, self._seconds = "passed", 0.0

    def _take(self) -> set[int]:
        """Return the numbers that are marked, and erase the marks."""
        marked = self._marks[:]
        self._marks[:] = bytes(len(marked))
        return {match.start() for match in MARKED.finditer(marked)}

    def _mark(self, numbers: set[int]) -> None:
        for number in numbers:
            self._marks[number] = 1

    def pytest_collection_finish(self) -> None:
        """Watch the pool of ranks, once the tests have imported it."""
        module = sys.modules.get("tests.worker_pool")
        if module is None:
            return
        compute = module.WorkerPool.reference

        def reference(pool: Any, function: Any, *args: Any) -> Any:
            key = id(pool), pickle.dumps((function, args))
            before = self._take()
            result = compute(pool, function, *args)
            reached = self._of_references.setdefault(key, self._take())
            self._mark(before | reached)
            return result

        module.WorkerPool.reference = reference

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out slower tiers, and tests that have a line already."""
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        recorded = {line["test"] for line in map(json.loads, lines) if line["table"] == self._table}
        from tests.costs import tier_of  # the copy's; `run` forks a process that has not imported the tests

        tiers = TIERS[: TIERS.index(os.environ.get(TIER, "change")) + 1]
        kept = [item for item in items if tier_of(item) in tiers and item.nodeid not in recorded]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Note what the setup of a fixture reaches that several tests share."""
        if fixturedef.scope == NARROW:
            yield
            return
        before = self._take()
        yield
        reached = self._take()
        self._of_fixtures[fixturedef] |= reached
        self._mark(before | reached)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Record what a test reaches."""
        self._take()
        self._outcome, self._seconds = "passed", 0.0
        yield
        reached = self._take()
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                reached |= self._of_fixtures.get(definition, set())
        from tests.costs import tier_of

        line = {
            "test": item.nodeid, "tier": tier_of(item), "seconds": round(self._seconds, 3), "outcome": self._outcome,
            "table": self._table, "blocks": write_ranges(reached),
        }  # fmt: skip
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a phase of a test, and its seconds."""
        self._seconds += report.duration
        if report.outcome != "passed":
            self._outcome = report.outcome


def pytest_configure(config: pytest.Config) -> None:
    """Record, if this process runs tests; with several workers, the first process does not."""
    if os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder())
