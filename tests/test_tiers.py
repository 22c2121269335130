"""The tiers of the tests: what they cost, which one a test belongs to, and which tests a change can reach."""

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import costs
from tests.changed import changed_files, reached_tests

ROOT = Path(__file__).parents[1]

SOURCES = {
    "rl_megatron/__init__.py": "",
    "rl_megatron/losses/__init__.py": "from .dpo import DPO\nfrom rl_megatron.losses.kto import KTO\n",
    "rl_megatron/losses/dpo.py": "from ..sums import add\nclass DPO: ...\n",
    "rl_megatron/losses/kto.py": "@register_loss('kto')\nclass KTO: ...\n",
    "rl_megatron/sums.py": "def add(): ...\n",
    "rl_megatron/command.py": "",
    "configs/one.yaml": "",
    "tests/conftest.py": "from rl_megatron import sums\ndef added():\n    return sums.add()\n",
    "tests/test_dpo.py": "from rl_megatron.losses import DPO\n",
    "tests/test_by_name.py": "def test_kto():\n    run('loss.name=kto')\n",
    "tests/test_process.py": "COMMAND = ['python', '-m', 'rl_megatron.command']\n",
    "tests/test_fixture.py": "def test_added(added): ...\n",
    "tests/test_files.py": "CONFIGS = 'configs'\n",
    "tests/test_language.py": "",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("rl_megatron/losses/dpo.py", ["dpo"]),
        ("rl_megatron/losses/kto.py", ["by_name"]),
        ("rl_megatron/losses/__init__.py", ["by_name", "dpo"]),
        ("rl_megatron/sums.py", ["dpo", "fixture"]),
        ("rl_megatron/command.py", ["process"]),
        ("configs/one.yaml", ["files"]),
        ("tests/test_fixture.py", ["fixture"]),
    ],
)
def test_a_change_reaches_the_tests_that_import_or_name_it(tree, changed, reached):
    found = reached_tests(tree, [changed])
    assert found == sorted(f"tests/test_{name}.py" for name in [*reached, "language"])


def test_what_all_tests_share_reaches_all_of_them(tree):
    assert reached_tests(tree, ["tests/conftest.py", "rl_megatron/sums.py"]) == ["tests"]
    assert reached_tests(tree, []) == []


def test_changed_files_are_edits_commits_and_new_files(tree):
    def git(*words):
        who = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_files(tree, "HEAD") == []
    (tree / "rl_megatron/sums.py").write_text("")
    git("commit", "-am", "second")
    (tree / "rl_megatron/command.py").write_text("x = 1")
    (tree / "configs/one.yaml").unlink()
    (tree / "new.py").touch()
    assert changed_files(tree, "HEAD") == ["new.py", "rl_megatron/command.py"]
    assert changed_files(tree, "HEAD~1") == ["new.py", "rl_megatron/command.py", "rl_megatron/sums.py"]


TESTS = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.3: pass"

def test_in_another_process():
    subprocess.run([sys.executable, "-S", "-c", BUSY], check=True)

@pytest.fixture
def slow():
    time.sleep(0.3)

@pytest.mark.change
def test_waits_in_a_fixture(slow): ...

@pytest.mark.nightly
def test_fails():
    assert False

def test_is_skipped():
    pytest.skip("no reason")
"""


@pytest.fixture(params=[(), ("-n", "2")], ids=["one process", "two workers"])
def recorded(request, tmp_path):
    """Return what a few tests cost, by their names, and the file."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    change\n    nightly\n")
    file = tmp_path / "costs.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "tests.costs", f"--durations-to={file}", *request.param]
    finished = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert finished.returncode == 1, finished.stdout
    return {each["test"].partition("::test_")[2]: each for each in costs.read(file)}, file


@pytest.mark.change
def test_what_every_test_costs_is_recorded(recorded):
    tests, _ = recorded
    busy, waiting, failed = (tests[name] for name in ("in_another_process", "waits_in_a_fixture", "fails"))
    assert busy["cpu_seconds"] >= 0.25 and busy["tier"] == "fast"  # the kernel counts in steps of 0.01 s
    assert waiting["seconds"] >= 0.3 and waiting["cpu_seconds"] < 0.25 and waiting["tier"] == "change"
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "in_another_process": "passed", "waits_in_a_fixture": "passed", "fails": "failed", "is_skipped": "skipped",
    }  # fmt: skip
    assert failed["tier"] == "nightly"


def test_costs_are_printed_by_tier_directory_and_file(tmp_path):
    lines = [
        {"test": "tests/unit/a.py::x", "outcome": "passed", "seconds": 1.4, "tier": "fast", "cpu_seconds": 1},
        {"test": "tests/unit/b.py::x", "outcome": "skipped", "seconds": 2, "tier": "fast", "cpu_seconds": 1},
        {"test": "tests/gpu/a.py::y", "outcome": "failed", "seconds": 1000, "tier": "change", "cpu_seconds": 7},
    ]
    for name, part in (("one", lines[:2]), ("two", lines[2:])):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in part))
    (tmp_path / "page.md").write_text(f"above\n\n{costs.MARK}\nold\n{costs.MARK}\n\nbelow\n")
    command = [sys.executable, "-m", "tests.costs", tmp_path / "one", tmp_path / "two", "--files", "2"]
    command += ["--into", tmp_path / "page.md"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [
        "3 tests in 1,003 s of their workers: 1 passed, 1 failed, 1 skipped",
        "- failed: tests/gpu/a.py::y",
        "",
        "| tier | tests | seconds | CPU seconds |",
        "|---|---:|---:|---:|",
        "| change | 1 | 1,000 | 7 |",
        "| fast | 2 | 3 | 2 |",
        "",
        "| directory | tests | seconds | CPU seconds |",
        "|---|---:|---:|---:|",
        "| tests/gpu | 1 | 1,000 | 7 |",
        "| tests/unit | 2 | 3 | 2 |",
        "",
        "| file | tests | seconds | CPU seconds |",
        "|---|---:|---:|---:|",
        "| tests/gpu/a.py (change) | 1 | 1,000 | 7 |",
        "| tests/unit/b.py (fast) | 1 | 2 | 1 |",
    ]
    above, table, below = (tmp_path / "page.md").read_text().split(costs.MARK)
    assert (above, below) == ("above\n\n", "\n\nbelow\n")
    assert table.strip().splitlines() == [
        "| directory | fast | change | nightly |",
        "|---|---:|---:|---:|",
        "| tests/gpu |  | 1: 1,000 s |  |",
        "| tests/unit | 2: 3 s |  |  |",
        "| all | 2: 3 s | 1: 1,000 s |  |",
    ]


@pytest.mark.change
def test_shards_divide_the_files_of_tests():
    files = [f"tests/test_{name}.py" for name in ("language", "readme", "tiers")]
    found = []
    for number in (1, 2):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--shard", f"{number}/2", *files]
        printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        found.append({line.partition("::")[0] for line in printed.splitlines() if "::" in line})
    assert found == [{files[0], files[2]}, {files[1]}]


@pytest.mark.parametrize(
    ("pattern", "kept", "taken"),
    [
        ("tests/a.py", (), {"tests/a.py::x", "tests/a.py::y[1-b]", "tests/a.py::y[2-b]", "tests/a.py::K::y[1-b]"}),
        ("tests/a.py", ("x", "y[*-b]"), {"tests/a.py::K::y[1-b]"}),
        ("tests/a.py::y", ("1-*",), {"tests/a.py::y[2-b]"}),
        ("tests/a*::K", (), {"tests/a.py::K::y[1-b]", "tests/ab.py::K"}),
        ("tests/a.py::*[2-b]", (), {"tests/a.py::y[2-b]"}),
        ("tests/a.py", 1, {"tests/a.py::y[2-b]"}),
        ("tests/a.py::y", 0, {"tests/a.py::y[1-b]", "tests/a.py::y[2-b]"}),
    ],
)
def test_an_entry_takes_all_but_what_it_keeps(pattern, kept, taken):
    a = ("tests/a.py::x", "tests/a.py::y[1-b]", "tests/a.py::y[2-b]", "tests/a.py::K::y[1-b]")
    entry = costs.NightlyEntry(pattern, kept)
    assert {test for test in (*a, "tests/ab.py::K") if entry.takes(test)} == taken


def test_every_entry_of_nightly_toml_takes_and_keeps_tests(collected):
    """Of the files that were collected: an editor may run this test alone."""
    by_file: dict[str, dict[str, str]] = {}
    for item in collected:
        by_file.setdefault(item.nodeid.partition("::")[0], {})[item.nodeid] = costs.tier_of(item)
    for pattern, kept in costs.NightlyTests().entries:
        files = fnmatch.filter(by_file, pattern.partition("::")[0])
        ids = {test: tier for file in files for test, tier in by_file[file].items()}
        if not ids:
            continue
        entry = costs.NightlyEntry(pattern, kept)
        taken = {test for test in ids if entry.takes(test)}
        assert taken, f"{pattern} takes no test"
        for name in () if isinstance(kept, int) else kept:
            others = costs.NightlyEntry(pattern, [other for other in kept if other != name])
            stay = [test for test in ids if others.takes(test) and test not in taken]
            assert stay, f"{name!r} keeps no test of {pattern}"
            assert {ids[test] for test in stay} != {"nightly"}, f"another entry takes what {name!r} of {pattern} keeps"
