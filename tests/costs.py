"""Record what every test costs (`pytest --durations-to=FILE`), and print it by file, directory and tier.

    python -m tests.costs FILE... [--files N] [--into PAGE]

A test's seconds are those of its setup, call and teardown. A fixture that several tests share counts for the first of
them. Its CPU seconds are those of the pytest process and of all processes below it: forks, ranks and servers.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
MARK = "<!-- what the tests cost: python -m tests.costs -->"
TIERS = ("fast", "change", "nightly")
NIGHTLY = Path(__file__).with_name("nightly.toml")


def tier_of(item: pytest.Item) -> str:
    """Return the first tier that runs a test."""
    return next((tier for tier in ("nightly", "change") if item.get_closest_marker(tier)), "fast")


class NightlyEntry:
    """An entry of nightly.toml: tests that it takes from the change tier.

    Attributes:
        files: The files of tests that it is about; `*` stands for any text.
    """

    def __init__(self, pattern: str, kept: Sequence[str] | int):
        """Read an entry.

        Args:
            pattern: A file of tests or a test; `*` stands for any text without `[` and `:`.
            kept: The tests of the file, or the cases of the test, that stay; `*` stands for any text. A number keeps so
                many cases of each test, the first ones.
        """
        self.files = pattern.partition("::")[0]
        self._num_kept, self._asked = (kept, Counter[str]()) if isinstance(kept, int) else (None, None)
        names = () if isinstance(kept, int) else kept
        taken = "[^[:]*".join(map(re.escape, pattern.split("*")))
        stays = "|".join(".*".join(map(re.escape, name.split("*"))) for name in names) or "(?!)"
        self._expression = re.compile(rf"{taken}((::|\[)(?!({stays})]?$).*)?")

    def takes(self, test: str) -> bool:
        """Return whether it takes a test. Each is asked about once, in the order of its file."""
        if self._expression.fullmatch(test) is None:
            return False
        if self._num_kept is None or self._asked is None:
            return True
        name = test.partition("[")[0]
        self._asked[name] += 1
        return self._asked[name] > self._num_kept


class NightlyTests:
    """All entries of nightly.toml."""

    def __init__(self) -> None:
        """Read the file."""
        reasons = tomllib.loads(NIGHTLY.read_text()).values()
        self.entries = [entry for reason in reasons for entry in reason["tests"].items()]
        self._read = [NightlyEntry(pattern, kept) for pattern, kept in self.entries]
        self._by_file: dict[str, list[NightlyEntry]] = {}

    def takes_all_of(self, file: str) -> bool:
        """Return whether an entry takes all tests of a file."""
        return any(kept == [] and fnmatch.fnmatchcase(file, pattern) for pattern, kept in self.entries)

    def __contains__(self, test: str) -> bool:
        """Return whether an entry takes a test. Each is asked about once, in the order of its file."""
        file = test.partition("::")[0]
        if file not in self._by_file:
            self._by_file[file] = [entry for entry in self._read if fnmatch.fnmatchcase(file, entry.files)]
        return any(entry.takes(test) for entry in self._by_file[file])


def pytest_addoption(parser):
    parser.addoption("--durations-to", type=Path, metavar="FILE", help="write what every test costs to a file")


def pytest_configure(config):
    if path := config.getoption("--durations-to"):
        config.pluginmanager.register(Costs(path, writes=not hasattr(config, "workerinput")), "costs")


class Costs:
    """A pytest plugin that writes a JSON line for every test: its id, tier, outcome, seconds and CPU seconds."""

    def __init__(self, path: Path, *, writes: bool):
        """Start the file.

        Args:
            path: The file; it is replaced.
            writes: Whether this process writes it: the only one, or the one to which workers of xdist report.
        """
        self._file = path.open("w") if writes else None
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}
        self._began = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._began = cpu_seconds(os.getpid())
        item.user_properties.append(("tier", tier_of(item)))
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            item.user_properties.append(("cpu_seconds", round(cpu_seconds(os.getpid()) - self._began, 3)))

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome
        if report.when == "teardown" and self._file:
            line = {"test": report.nodeid, "outcome": self._outcomes.pop(report.nodeid, report.outcome)}
            line |= {"seconds": round(self._seconds.pop(report.nodeid), 3)} | dict(report.user_properties)
            print(json.dumps(line), file=self._file, flush=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, of its children that have ended, and of all processes below it.

    It reads every process of the machine once. The children of a process would have to be read from each of its
    threads, and ranks have dozens of them.
    """
    ticks, children = {}, defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _read(Path(f"/proc/{name}/stat"))):
            fields = stat.rpartition(")")[2].split()
            ticks[int(name)] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(int(name))
    total, remaining = 0, [pid]
    while remaining:
        process = remaining.pop()
        total += ticks.get(process, 0)
        remaining += children[process]
    return total / TICKS


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; nothing for a process that has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def read(path: Path) -> list[dict]:
    """Return the lines of a file that `--durations-to` has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def directory_of(test: str) -> str:
    """Return the directory of a test, or the file if it lies in `tests` itself."""
    path = PurePosixPath(test.partition("::")[0])
    return "/".join(path.parts[:2])


def table(name: str, groups: Iterable[tuple[str, list[dict]]]) -> str:
    """Return a Markdown table of groups of tests, the dearest first."""
    rows = [f"| {name} | tests | seconds | CPU seconds |", "|---|---:|---:|---:|"]
    ordered = sorted(groups, key=lambda group: -sum(test["seconds"] for test in group[1]))
    for title, tests in ordered:
        seconds, cpu = (sum(test[key] for test in tests) for key in ("seconds", "cpu_seconds"))
        rows.append(f"| {title} | {len(tests):,} | {seconds:,.0f} | {cpu:,.0f} |")
    return "\n".join(rows)


def grouped(tests: list[dict], key) -> list[tuple[str, list[dict]]]:
    groups = defaultdict(list)
    for test in tests:
        groups[key(test)].append(test)
    return list(groups.items())


def overview(tests: list[dict]) -> str:
    """Return a Markdown table with the number and the seconds of the tests of each directory, for every tier."""
    rows = [f"| directory | {' | '.join(TIERS)} |", f"|---|{'---:|' * len(TIERS)}"]
    groups = sorted(grouped(tests, lambda test: directory_of(test["test"]))) + [("all", tests)]
    for directory, found in groups:
        of_tiers = [[test["seconds"] for test in found if test["tier"] == tier] for tier in TIERS]
        cells = [f"{len(seconds):,}: {sum(seconds):,.0f} s" if seconds else "" for seconds in of_tiers]
        rows.append(f"| {directory} | {' | '.join(cells)} |")
    return "\n".join(rows)


def replace_table(page: str, table: str) -> str:
    """Return the text of a page with another table between its two marks."""
    before, _, rest = page.partition(MARK)
    _, _, after = rest.partition(MARK)
    if not after:
        raise SystemExit(f"error: the page has no two lines {MARK}")
    return f"{before}{MARK}\n\n{table}\n\n{MARK}{after}"


def summary(tests: list[dict]) -> str:
    """Return how many tests passed, failed and were skipped, in a line, and the failed ones."""
    outcomes = Counter(test["outcome"] for test in tests)
    counts = ", ".join(f"{outcomes[name]:,} {name}" for name in ("passed", "failed", "skipped"))
    seconds = sum(test["seconds"] for test in tests)
    failed = [f"- failed: {test['test']}" for test in tests if test["outcome"] == "failed"]
    return "\n".join([f"{len(tests):,} tests in {seconds:,.0f} s of their workers: {counts}", *failed])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description="Print what tests cost.")
    parser.add_argument("file", type=Path, nargs="+", help="what `--durations-to` has written, as for several shards")
    parser.add_argument("--files", type=int, default=40, metavar="N", help="the dearest files that are listed (40)")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="the page that gets a table of directories and tiers")
    arguments = parser.parse_args()
    tests = [test for path in arguments.file for test in read(path)]
    if arguments.into:
        arguments.into.write_text(replace_table(arguments.into.read_text(), overview(tests)))
    print(summary(tests), end="\n\n")
    print(table("tier", grouped(tests, lambda test: test["tier"])), end="\n\n")
    print(table("directory", grouped(tests, lambda test: directory_of(test["test"]))), end="\n\n")
    files = grouped(tests, lambda test: f"{test['test'].partition('::')[0]} ({test['tier']})")
    files.sort(key=lambda group: -sum(test["seconds"] for test in group[1]))
    print(table("file", files[: arguments.files]))


if __name__ == "__main__":
    main()
