"""Run the tests on mutants, one after the other, and keep a line for each in a file of results."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutants.copies import Copy
from benchmarks.mutants.forks import Outcome, prepare, run_tests
from benchmarks.mutants.generate import Mutant, Package
from benchmarks.mutants.plugin import TIERS
from benchmarks.mutants.reach import Reach, ReachingTest

_FIRST_TESTS, _FIRST_FILES, _FIRST_SECONDS = 12, 4, 6.0
_NEXT_SECONDS = 25.0
_FILE_SECONDS = 1.0  # what the import of a file of tests takes, about
LATE_SECONDS = 40.0  # a test is late after this time and six times its own


@dataclass
class Campaign:
    """The mutants that one process runs, on a copy of the repository.

    Attributes:
        out: The directory of the reach and the results.
        copy: The copy that mutants are written into.
        package: The package of the copy, without a mutant.
        reach: The tests that reach each block.
        tier: The slowest tier that runs.
        seconds: The tests of a tier that a mutant gets take this long in all, at most.
        options: More options of pytest.
        results: The name of the file of results in `out`.
        matrix: Whether all tests run, instead of stopping at the first one that fails.
    """

    out: Path
    copy: Copy
    package: Package
    reach: Reach
    tier: str
    seconds: float
    options: Sequence[str] = ()
    results: str = "results.jsonl"
    matrix: bool = False
    _controls: dict[str, bool] = field(default_factory=dict)

    def run(self, mutants: Iterable[Mutant]) -> None:
        """Run the mutants that have no result for the same text and tests."""
        mutants = list(mutants)
        self.out.mkdir(parents=True, exist_ok=True)
        controls = self.out / "controls.jsonl"
        self._controls = {line["test"]: line["passes"] for line in read_lines(controls)}
        known = {line["id"]: line for line in read_lines(self.out / self.results)}
        waiting = [(mutant, self._offered(mutant)) for mutant in mutants]
        waiting = [each for each in waiting if not self._is_done(*each, known.get(each[0].id))]
        print(f"{len(waiting)} of {len(mutants)} mutants wait", flush=True)
        if not waiting:
            return
        scratch = self.copy.root.parent
        prepare(self.copy.root.absolute(), scratch / "bytecode")
        os.environ["TMPDIR"] = str(scratch / "tmp")
        for number, (mutant, tests) in enumerate(waiting, 1):
            result = self._result(mutant, tests)
            append_line(self.out / self.results, result)
            by = f" by {result['test']}" if result["test"] else ""
            print(f"{number}/{len(waiting)} {mutant.id}: {result['status']}{by}, {result['seconds']:.0f} s", flush=True)

    def _offered(self, mutant: Mutant) -> list[ReachingTest]:
        """Return the tests that run on a mutant if none fails, in this order."""
        tiers, offered = TIERS[: TIERS.index(self.tier) + 1], []
        total: Counter[str] = Counter()
        files: set[str] = set()
        for test in self.reach.tests_of(mutant, self.package):
            seconds = total[test.tier] + test.seconds + (0.0 if test.file in files else _FILE_SECONDS)
            if test.tier in tiers and (seconds <= self.seconds or test.tier not in total):
                offered.append(test)
                files.add(test.file)
                total[test.tier] = seconds
        return offered

    def _is_done(self, mutant: Mutant, tests: Sequence[ReachingTest], line: dict[str, Any] | None) -> bool:
        """Return whether a result still says what a new one would say."""
        if line is None or line["source"] != self._source_digest(mutant) or line["status"] == "error":
            return False
        if line["status"] in ("killed", "timeout") and not self.matrix:
            return line["test"] is None or line["test"] in {test.id for test in tests} | {test.file for test in tests}
        return line["tests"] == _digest(sorted(test.id for test in tests))

    def _source_digest(self, mutant: Mutant) -> str:
        return _digest([mutant.apply(self.package.sources[mutant.file].data).decode()])

    def _result(self, mutant: Mutant, tests: list[ReachingTest]) -> dict[str, Any]:
        """Run the tests on a mutant. A test that fails without a mutant does not count."""
        began, left, ran = time.monotonic(), list(tests), 0
        status, by, failed = ("survived" if tests else "unreached"), None, []
        mutated = mutant.apply(self.package.sources[mutant.file].data)
        while left := [test for test in left if self._counts(test)]:
            with self.copy.changed(mutant.file, mutated):
                outcome = self._run(_in_batches(left))
            ran += len(outcome.ran)
            failed = [test for test in outcome.failed if self._passes_without_mutant(test, tests)]
            if outcome.late is not None:
                status, by = "timeout", outcome.late
            elif failed:
                status, by = "killed", failed[0]
            elif not outcome.complete:
                status = "killed" if self._passes_without_mutant(left[0].id, tests) else "error"  # a process died
            elif outcome.failed:
                continue
            break
        tier = next((test.tier for test in tests if by is not None and test.id.startswith(by)), None)
        return {
            "id": mutant.id, "status": status, "test": None if by == "collection" else by, "tier": tier,
            "up_to": self.tier,
            "seconds": round(time.monotonic() - began, 1), "ran": ran, "offered": len(tests),
            "source": self._source_digest(mutant), "tests": _digest(sorted(test.id for test in tests)),
        } | ({"failed": failed} if self.matrix else {})  # fmt: skip

    def _counts(self, test: ReachingTest) -> bool:
        return self._controls.get(test.id, True) and self._controls.get(test.file, True)

    def _run(self, batches: Sequence[Sequence[ReachingTest]]) -> Outcome:
        scratch = self.copy.root.parent
        shutil.rmtree(scratch / "tmp", ignore_errors=True)
        (scratch / "tmp").mkdir(parents=True)
        limited = [[(test.id, LATE_SECONDS + 6 * test.seconds) for test in batch] for batch in batches]
        log = self.out / f"last-{scratch.name}.log"
        return run_tests(self.copy.root.absolute(), limited, log, self.options, stop_early=not self.matrix)

    def _passes_without_mutant(self, failed: str, tests: Sequence[ReachingTest]) -> bool:
        """Return whether a test passes, or a file can be collected, without a mutant. This is run once for each."""
        if failed not in self._controls:
            chosen = [test for test in tests if test.id == failed] or [t for t in tests if t.file == failed][:1]
            if not chosen:
                return True
            outcome = self._run([chosen])
            self._controls[failed] = outcome.complete and not outcome.failed and bool(outcome.ran)
            append_line(self.out / "controls.jsonl", {"test": failed, "passes": self._controls[failed]})
        return self._controls[failed]


def _in_batches(tests: Sequence[ReachingTest]) -> list[list[ReachingTest]]:
    """Cut tests into a few, those that take a short time, and the rest; each with the tests of a file together."""
    first: list[ReachingTest] = []
    for test in tests:
        files = {each.file for each in (*first, test)}
        seconds = sum(each.seconds for each in (*first, test))
        if len(first) < _FIRST_TESTS and len(files) <= _FIRST_FILES and (seconds <= _FIRST_SECONDS or not first):
            first.append(test)
    rest, second, total = [test for test in tests if test not in first], [], 0.0
    while rest and total + rest[0].seconds <= _NEXT_SECONDS and rest[0].tier == tests[0].tier:
        total += rest[0].seconds
        second.append(rest.pop(0))
    others = [[test for test in rest if test.tier == tier] for tier in TIERS]
    return [batch for batch in (first, second, *others) if batch]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, or [] without one."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a file, which several processes may do."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
