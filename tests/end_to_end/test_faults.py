"""Five faults of the campaign: runs of four ranks are killed or damaged, and recover."""

import json
import subprocess
import sys

import pytest

from tests.forkserver import REPOSITORY, environment

# Fast ones of two runs, one for each target. test_ending_early has more signals that ask a run to end, test_hangs
# stopped ranks, test_saves truncated files, and test_async asynchronous runs.
NUMBERS = (10, 41, 62, 87, 164)


@pytest.mark.change
def test_runs_recover_from_faults_of_all_kinds(tmp_path):
    """The campaign forks its runs, so that it needs a process of its own without threads."""
    command = [sys.executable, "-m", "benchmarks.faults", "--out", str(tmp_path), "--only", *map(str, NUMBERS)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "results-seed-0.jsonl").read_text().splitlines()]
    assert sorted(result["number"] for result in results) == sorted(NUMBERS)
    assert {result["target"] for result in results} == {"rank", "engine", "launcher", "disk", "file"}
    assert len({result["outcome"] for result in results}) == 3, "recovered, continued, and named"
