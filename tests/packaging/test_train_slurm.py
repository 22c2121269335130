"""What scripts/train.slurm makes of the ends of its nodes, with stand-ins for SLURM's commands and for the nodes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.page_commands import SLURM

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.slurm"


@pytest.mark.parametrize(
    ("statuses", "status", "is_queued"),
    [((75, 75), 75, True), ((0, 0), 0, False), ((75, 1), 1, False), ((2, 75), 1, False)],
    ids=["saved", "complete", "a node failed", "the first node failed"],
)
def test_a_job_is_queued_again_if_all_nodes_ended_early(tmp_path, statuses, status, is_queued):
    """srun ends the other nodes when one ends with another status than 0, so that no node may end with 75."""
    done = job(tmp_path, statuses)
    assert done.returncode == status, done.stderr
    assert ("queueing job 7 again" in done.stdout) == is_queued == (tmp_path / "requeued").exists()
    assert list(tmp_path.glob("*.saved")) == []


def job(directory, statuses):
    """Run the script as a job of two nodes, whose ranks end with these statuses."""
    of_nodes = " ".join(map(str, statuses))
    write(directory / "scripts" / "train.sh", f'statuses=({of_nodes}); exit "${{statuses[$SLURM_NODEID]}}"')
    commands = SLURM | {"scontrol": f'[ "$1" = requeue ] && touch {directory}/requeued\n{SLURM["scontrol"]}'}
    for name, text in commands.items():
        write(directory / "bin" / name, text)
    variables = {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(directory), "REPO": str(directory),
        "REQUEUE": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(directory),
    }  # fmt: skip
    return subprocess.run(["bash", SCRIPT, "train"], env=variables, capture_output=True, text=True)


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
