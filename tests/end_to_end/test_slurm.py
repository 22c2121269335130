"""Real SLURM jobs on two nodes end early, are queued again, and survive a killed rank.

They run where `sinfo` answers and `RL_MEGATRON_SLURM_TESTS=1` is set, because they need two idle nodes for a quarter of
an hour.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.launch import TINY_GRPO, checkpoints, metrics

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.change,
    pytest.mark.skipif(os.environ.get("RL_MEGATRON_SLURM_TESTS") != "1", reason="RL_MEGATRON_SLURM_TESTS=1 is not set"),
]
STEPS = 240
RUN = (
    "train", *TINY_GRPO, f"train.steps={STEPS}", "train.save_every=40", "train.eval_every=0",
    "parallel.tensor=2",
)  # fmt: skip
_LIMIT_SECONDS = 1200


def submit(directory, *options, **variables):
    """Submit a job of two nodes, and return its number."""
    directory.mkdir(exist_ok=True)
    kept = {"PATH": os.environ["PATH"], "REPO": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}
    submitted = subprocess.run(
        ["sbatch", "-N", "2", "--parsable", f"--output={directory}/job.txt", *options,
         str(REPOSITORY / "scripts" / "train.slurm"), *RUN, f"output_dir={directory}/out"],
        cwd=directory, env=kept, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(submitted.stdout.strip().partition(";")[0])


def facts(job):
    """Return what SLURM says of a job."""
    shown = subprocess.run(["scontrol", "show", "job", "-o", str(job)], check=True, capture_output=True, text=True)
    return dict(re.findall(r"(\w+)=(\S+)", shown.stdout))


def wait_for(job, directory, condition=lambda found: found["JobState"] not in ("PENDING", "RUNNING", "COMPLETING")):
    """Wait until a condition on the facts of a job holds, by default its end; return the facts.

    SLURM lets a job that is queued again wait for two minutes, in which its nodes forget the end of its last start.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not condition(found := facts(job)):
        output = directory / "job.txt"
        said = output.read_text() if output.is_file() else ""
        assert time.monotonic() < deadline, f"{found}\n{said}"
        assert "FAILED" not in found["JobState"], said
        time.sleep(1)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the metrics of a job that nothing disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    job = submit(directory, "--time=20")
    assert wait_for(job, directory)["JobState"] == "COMPLETED", (directory / "job.txt").read_text()
    return metrics(directory / "out")


def test_a_job_with_a_short_time_limit_is_queued_again_until_it_is_complete(tmp_path, whole):
    job = submit(tmp_path, "--time=2", "--signal=B:USR1@60", REQUEUE="1")
    found = wait_for(job, tmp_path)
    said = (tmp_path / "job.txt").read_text()
    assert found["JobState"] == "COMPLETED" and int(found["Restarts"]) > 0, said
    assert "the same command continues the run (exit status 75)" in said and "queueing job" in said
    assert metrics(tmp_path / "out") == whole


def test_ranks_on_two_nodes_are_started_again_after_one_was_killed(tmp_path, whole):
    job = submit(tmp_path, "--time=20", MAX_RESTARTS="2")
    wait_for(job, tmp_path, lambda _: "step-000040" in checkpoints(tmp_path / "out", "grpo"))
    os.kill(rank_of(tmp_path, 1), signal.SIGKILL)
    found, said = wait_for(job, tmp_path), (tmp_path / "job.txt").read_text()
    assert found["JobState"] == "COMPLETED" and found["Restarts"] == "0", said
    assert said.count("resuming after step") == 1, said
    assert metrics(tmp_path / "out") == whole


def rank_of(directory, rank):
    """Return the process of a rank of the job that runs in `directory`."""
    for process in psutil.process_iter(["cmdline"]):
        is_of_job = f"output_dir={directory}/out" in (process.info["cmdline"] or [])
        if is_of_job and process.environ().get("RANK") == str(rank):
            return process.pid
    raise AssertionError(f"there is no rank {rank} in {directory}")
