"""`rl-megatron serve`: a job in which some nodes run servers and the others train."""

import os
import subprocess
import sys

import psutil
import pytest

from rl_megatron.config.loading.load import from_yaml
from rl_megatron.generation.sglang import launch
from tests.end_to_end.launch import TIMEOUT, TINY_GRPO, metrics
from tests.end_to_end.page_commands import write_slurm
from tests.forkserver import REPOSITORY, environment
from tests.ports import free_port
from tests.stand_ins import python_with_sglang

OPTIONS = (
    *TINY_GRPO, "train.eval_every=0", "train.steps=2", "generation.engine=sglang",
    "generation.sglang.enable_deterministic_inference=true", "rollout.async_enabled=true",
)  # fmt: skip


@pytest.mark.change
def test_a_slurm_job_trains_with_the_servers_of_another_node(tmp_path):
    """All nodes are this machine, and SGLang is a stand-in."""
    write_slurm(tmp_path / "bin")
    port = free_port()
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VENV": sys.prefix, "ENGINE_NODES": "1",
        "REPO": str(REPOSITORY), "SLURM_JOB_ID": "7",
        "SERVER_PORT": str(port), "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    command = [tmp_path / "bin" / "sbatch", "-N", "2", REPOSITORY / "scripts" / "train.slurm", "train", *OPTIONS]
    command.append(f"generation.sglang.python={python_with_sglang(tmp_path)}")
    job = subprocess.run(
        command, cwd=tmp_path, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert job.returncode == 0 and "1 server(s) are ready" in job.stdout, job.stdout
    assert [line["step"] for line in metrics(tmp_path / "out") if line["kind"] == "train"] == [1, 2]
    config = from_yaml((tmp_path / "out" / "config.yaml").read_text(), "config.yaml")
    assert config.first.generation.sglang.server_nodes == (f"127.0.0.1:{port}",)
    assert servers_at(port) == []


def servers_at(port):
    """Return the processes of the servers of a port."""
    found = psutil.process_iter(["cmdline"])
    words = {process: process.info["cmdline"] or [] for process in found}
    return [each for each, line in words.items() if str(launch.__file__) in line[:3] and str(port) in line]
