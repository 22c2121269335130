"""The mutants of the package are what they say, and a campaign says which of them tests catch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks.mutants.generate import TABLE, Package, StaleTable
from benchmarks.mutants.operators import FIELD, GENERAL
from benchmarks.mutants.plugin import read_ranges, write_ranges
from benchmarks.mutants.report import UnknownMutants, read_reasons, write_matrix, write_report
from benchmarks.mutants.source import Source
from tests.forkserver import environment

REPOSITORY = Path(__file__).resolve().parents[1]

# Operator, code, and what it makes of it.
CASES = [
    ("comparison", "a < b", ["a <= b"]),
    ("comparison", "a == b", ["a != b"]),
    ("arithmetic", "a + b", ["a - b"]),
    ("arithmetic", "-a", ["a"]),
    ("arithmetic", "directory / 'name'", []),
    ("constant", "f(3)", ["f(4)"]),
    ("statement", "self.a = 1", ["pass"]),
    ("statement", "f(a)", ["pass"]),
    ("statement", "log.once(a)", []),
    ("logic", "a and b", ["(a or b)"]),
    ("logic", "not a", ["a"]),
    ("default", "def f(a=True): pass", ["def f(a=False): pass"]),
    ("condition", "if a: b()", ["if not (a): b()"]),
    ("condition", "if a: raise b", ["if False: raise b"]),
    ("result", "return True", ["return False"]),
    ("collective", "dist.all_reduce(x, group=g)", ["pass"]),
    ("collective", "y = gather_from_ranks(x, g)", ["y = x[None]"]),
    ("collective", "y = ranks.sum(x)", ["y = x"]),
    ("group", "f(topology.groups.tp)", ["f(topology.groups.dp)"]),
    ("mask", "y = x * mask", ["y = x"]),
    ("mask", "y = (a + b) * mask", ["y = (a + b)"]),
    ("mask", "y = x.masked_fill(m, 0)", ["y = x"]),
    ("mask", "y = torch.where(m, a, b)", ["y = a"]),
    ("shift", "y = x[:, 1:]", ["y = x[:, :-1]"]),
    ("shift", "y = x.roll(-1, dims=1)", ["y = x.roll(1, dims=1)"]),
    ("shift", "y = pad(x, (0, 1))", ["y = pad(x, (1, 0))"]),
    ("temperature", "y = f(x, temperature=t)", ["y = f(x, temperature=1.0)"]),
    ("temperature", "y = x / temperature[:, None]", ["y = x"]),
    ("version", "self.version = pending", ["pass"]),
    ("disk", "os.fsync(file)", ["pass"]),
    ("seed", "f(seed=self._seed)", ["f(seed=0)"]),
    ("gradient", "y = x.detach()", ["y = x"]),
    ("bound", "y = x.clamp(min=0)", ["y = x"]),
    ("bound", "y = torch.nan_to_num(x, nan=0.0)", ["y = x"]),
    ("reduction", "y = (a + b).sum(0)", ["y = (a + b).mean(0)"]),
    ("reduction", "f(op=dist.ReduceOp.MAX)", ["f(op=dist.ReduceOp.SUM)"]),
    ("count", "f(global_normalization_factor=n)", ["f(global_normalization_factor=None)"]),
    ("coefficient", "y = cfg.beta * x", ["y = x"]),
    ("copy", "y = x.clone()", ["y = x"]),
    ("step", "self.optimizer.zero_grad()", ["pass"]),
]


def package_of(directory: Path, code: str) -> Package:
    (directory / "losses").mkdir(parents=True, exist_ok=True)
    (directory / "losses" / "one.py").write_text(code)
    return Package(directory, ("losses",))


@pytest.fixture(scope="module")
def package():
    return Package(REPOSITORY / "rl_megatron")


@pytest.fixture(scope="module")
def mutants(package):
    return package.mutants()


@pytest.mark.parametrize(("operator", "code", "expected"), CASES)
def test_an_operator_changes_what_it_says(tmp_path, operator, code, expected):
    body = "def f(self):\n    " + code + "\n"
    package = package_of(tmp_path, body)
    chosen = {name: change for name, change in (GENERAL | FIELD).items() if name == operator}
    changed = [mutant.apply(body.encode()).decode() for mutant in package.of_operators("general", chosen)]
    assert changed == [f"def f(self):\n    {each}\n" for each in expected]


def test_texts_messages_and_annotations_are_left_out(tmp_path):
    code = '''
        """Say 1 + 1."""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            a = f(1)
        def describe(a: "1 < 2" = None) -> "3 < 4":
            return a < 1
        def f(a: "1 < 2"):
            """Return 1 < 2."""
            raise ValueError(f"{a < 1}")
        '''
    assert package_of(tmp_path, dedent(code)).of_operators("general", GENERAL) == []


def test_ids_outlive_edits_elsewhere(tmp_path):
    code = "def f(a, b):\n    return g(a < b, 1, 1)\n"
    ids = [mutant.id for mutant in package_of(tmp_path / "1", code).of_operators("general", GENERAL)]
    edited = f"# a comment\ndef other(π):\n    return π < 2\n\n\n{code}"
    others = [mutant.id for mutant in package_of(tmp_path / "2", edited).of_operators("general", GENERAL)]
    assert len(set(ids)) == len(ids) == 3 and set(ids) < set(others)


@pytest.mark.change  # whoever takes the text of a mutant knows best what stands in its place
def test_there_are_enough_mutants_and_all_of_them_are_python(package, mutants):
    assert len(package.of_table(TABLE)) > 100
    kinds = Counter(mutant.kind for mutant in mutants)
    assert kinds.total() >= 300 and kinds["field"] > kinds["general"] and kinds["fix"] >= 70
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        original = package.sources[mutant.file].data
        mutated = mutant.apply(original)
        assert mutated != original and ast.parse(mutated), mutant.id
    assert {mutant.subpackage for mutant in mutants if mutant.kind == "field"} == set(package.subpackages)


@pytest.mark.change
def test_a_mutant_of_the_table_whose_text_is_gone_is_named(package, tmp_path):
    entry = '[[mutant]]\nfile = "losses/nll.py"\ndescription = ""\nbefore = "no such text"\nafter = ""\n'
    (tmp_path / "table.toml").write_text(entry)
    with pytest.raises(StaleTable, match="losses/nll.py has 0 times, instead of once: 'no such text'"):
        package.of_table(tmp_path / "table.toml")


@pytest.mark.change
def test_a_reason_for_a_mutant_that_does_not_exist_is_refused(package, tmp_path):
    read_reasons(package.ids())
    (tmp_path / "reasons.toml").write_text('[[equivalent]]\nid = "gone"\nreason = "it is"\n')
    with pytest.raises(UnknownMutants, match="gone"):
        read_reasons(package.ids(), tmp_path / "reasons.toml")


@pytest.mark.change
def test_marks_are_in_every_block_and_the_code_stays(package):
    source = Source(
        "def f(a):\n    '''Say.'''\n    if a:\n        g()\n    elif b:\n        h()\n    else:\n        i()\n"
    )
    numbers = {block.key: number for number, block in enumerate(source.blocks)}
    marked = source.with_marks(numbers, "import marks as _reached").decode()
    assert marked.count("_reached[") == len(numbers) == 4
    ast.parse(marked)
    assert [block.key for block in source.blocks_of(source.data.index(b"h()"))] == ["f#3"]
    for source in package.sources.values():
        ast.parse(source.with_marks({block.key: 0 for block in source.blocks}, "import marks as _reached"))


def test_numbers_of_blocks_are_written_as_ranges():
    numbers = {1, 2, 3, 7, 9, 10}
    assert write_ranges(numbers) == "1-3,7,9-10" and read_ranges("1-3,7,9-10") == numbers
    assert read_ranges(write_ranges(set())) == set()


@pytest.mark.change
def test_a_report_counts_by_tier_and_leaves_equivalent_mutants_out(mutants):
    losses = [mutant for mutant in mutants if mutant.subpackage == "losses" and mutant.kind == "field"][:4]
    results = (
        {"status": "killed", "tier": "fast"},
        {"status": "timeout", "tier": "change"},
        {"status": "survived", "tier": None},
    )
    lines = [{"id": mutant.id, **result} for mutant, result in zip(losses, results, strict=False)]
    text = write_report(losses, lines, {losses[3].id: "it computes the same"})
    assert "| losses | 4 | 1 | 0 | 1 (33.3%) | 2 (66.7%) | 2 (66.7%) |" in text
    assert losses[2].id in text and losses[0].id not in text
    lines[2]["up_to"] = "fast"
    assert "| losses | 4 | 1 | 1 | 1 (33.3%) | 2 (66.7%) | 2 (66.7%) |" in write_report(
        losses, lines, {losses[3].id: ""}
    )
    matrix = write_matrix([{"id": "a", "failed": ["t.py::1", "t.py::2"]}, {"id": "b", "failed": ["t.py::1"]}])
    assert "| `t.py` | 2 | 2 |" in matrix and "| `t.py::1` | 2 | 1 |" in matrix


SMALL = {
    "rl_megatron/__init__.py": "",
    "rl_megatron/losses/__init__.py": "",
    "rl_megatron/losses/one.py": """
        def add(a, b):
            return a + b

        def count(n):
            i = 0
            while i != n:
                i += 1
            return i

        def unseen(a):
            return a < 1

        def in_process(a):
            return a - 1
        """,
    "tests/__init__.py": "",
    "tests/costs.py": (REPOSITORY / "tests" / "costs.py").read_text(),
    "tests/conftest.py": "import rl_megatron.losses.one\n",  # before pytest configures its workers
    "tests/preloaded.py": "",
    "tests/test_one.py": """
        import multiprocessing

        import pytest

        from rl_megatron.losses.one import add, count, in_process

        def test_add():
            assert add(2, 0) == 2

        def test_count():
            assert count(3) == 3

        @pytest.mark.change
        def test_in_a_process():
            with multiprocessing.get_context("forkserver").Pool(1) as pool:
                assert pool.apply(in_process, (3,)) == 2

        def test_that_fails_anyway():
            assert add(1, 1) == 3
        """,
    "pytest.ini": "[pytest]\nmarkers = change\npythonpath = .\n",
}
CAMPAIGN = """
import json, sys
from pathlib import Path
from benchmarks.mutants import campaign, forks
from benchmarks.mutants.copies import Copy
from benchmarks.mutants.generate import Package
from benchmarks.mutants.operators import GENERAL
from benchmarks.mutants.reach import Reach, record

campaign.LATE_SECONDS = 5.0
CHOSEN = ("add:arith", "count:statement", "unseen:comp", "in_process:arith")
here = Path(sys.argv[1])
small, out = here / "small", here / "out"
copy = Copy(here / "reach", small)
assert record(out, ["tests"], "change", ["-n", "2"], copy, Package(copy.package, ("losses",))) == 1
copy = Copy(here / "shard" / "copy", small)
package = Package(copy.package, ("losses",))
reach = Reach(out, small)
mutants = [mutant for mutant in package.of_operators("general", GENERAL) if any(name in mutant.id for name in CHOSEN)]
for _ in range(2):
    campaign.Campaign(out, copy, package, reach, "change", 60.0).run(mutants)
"""


@pytest.mark.nightly
def test_a_campaign_on_a_small_package():
    """A mutant is killed, also in another process; one survives, one hangs, and results are kept."""
    # A short path, because sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="m") as directory:
        here = Path(directory)
        for name, text in SMALL.items():
            (here / "small" / name).parent.mkdir(parents=True, exist_ok=True)
            (here / "small" / name).write_text(dedent(text))
        git = ["git", "-C", str(here / "small")]
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run([*git, "add", "."], check=True)
        done = subprocess.run(
            [sys.executable, "-c", CAMPAIGN, here], cwd=REPOSITORY, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in (here / "out" / "results.jsonl").read_text().splitlines()]
        found = {":".join(line["id"].split(":")[1:3]): (line["status"], line["tier"]) for line in lines}
        print(done.stdout, *lines, (here / "out" / "controls.jsonl").read_text(), sep="\n")
        assert found == {
            "add:arithmetic": ("survived", None),
            "count:statement": ("timeout", "fast"),
            "unseen:comparison": ("unreached", None),
            "in_process:arithmetic": ("killed", "change"),
        }
        assert len(lines) == 4, "the second run adds nothing"
        controls = [json.loads(line) for line in (here / "out" / "controls.jsonl").read_text().splitlines()]
        assert {"test": "tests/test_one.py::test_that_fails_anyway", "passes": False} in controls
