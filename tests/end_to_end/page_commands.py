"""Run the commands of a documentation page: in forks where that is possible, with SLURM's commands replaced."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.end_to_end.launch import TIMEOUT, Finished, Forks
from tests.forkserver import REPOSITORY, environment

# What sbatch, srun and scontrol do here: all nodes are this machine, and sbatch waits for the end of the job.
SLURM = {
    "sbatch": """
        [ "$1" = -N ] || exit 2
        export SLURM_JOB_NUM_NODES=$2 SLURM_JOB_NODELIST="node[1-$2]" SLURM_SUBMIT_DIR=$PWD
        shift 2
        exec bash "$@"
        """,
    "srun": """
        while [ "${1#--}" != "$1" ]; do shift; done
        for node in $(seq "$SLURM_JOB_NUM_NODES"); do
            SLURMD_NODENAME=node$node SLURM_NODEID=$((node - 1)) "$@" & nodes+=($!)
        done
        for node in "${nodes[@]}"; do wait "$node" || exit 1; done
        """,
    "scontrol": """
        case "$2" in
            hostnames) for node in $(seq "$SLURM_JOB_NUM_NODES"); do echo "node$node"; done ;;
            node) [ -n "$3" ] && echo "   NodeAddr=127.0.0.1 NodeHostName=$3" ;;
        esac
        """,
}


def blocks(page: str, language: str) -> list[str]:
    """Return the contents of the page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """Return the lines of the page's bash blocks."""
    return [line for block in blocks(page, "bash") for line in block.splitlines()]


def repository_in(directory: Path) -> Path:
    """Make `directory` look like the repository's root to a command, and return it."""
    for name in ("examples", "scripts", "rl_megatron"):
        (directory / name).symlink_to(REPOSITORY / name)
    return directory


def run(command: str, directory: Path, forks: Forks) -> Finished:
    """Run one line of a page in `directory`."""
    words = shlex.split(command)
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    program, *arguments = words
    if program == "rm":
        assert arguments[0] == "-r"
        shutil.rmtree(directory / arguments[1])
        return Finished(0, "", "")
    if program == "sbatch":
        return _sbatch(arguments, directory)
    ranks = 1
    if program == "scripts/train.sh":
        ranks = int(variables.pop("NPROC_PER_NODE"))
    elif program == "torchrun":
        assert arguments[0] == "--nproc-per-node"
        ranks = int(arguments[1])
        arguments = arguments[4:] if arguments[2:4] == ["-m", "rl_megatron"] else arguments[2:]
    else:
        assert program in ("python", "rl-megatron"), command
    assert not variables, command
    before = None
    if arguments[0].endswith(".py"):
        before, arguments = partial(_run_script, *arguments), []
    with forks.start(directory, *arguments, ranks=ranks, before=before) as running:
        return running.finish()


def _run_script(path: str, *arguments: str) -> None:
    """Run a script in place of the command, and end the process."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
    sys.exit(0)


def _sbatch(arguments: list[str], directory: Path) -> Finished:
    bin_directory = directory / "bin"
    bin_directory.mkdir()
    for name, body in SLURM.items():
        (bin_directory / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (bin_directory / name).chmod(0o755)
    variables = {"PATH": f"{bin_directory}:{os.environ['PATH']}", "VENV": sys.prefix, "SLURM_JOB_ID": _free_job_id()}
    done = subprocess.run(
        [bin_directory / "sbatch", *arguments],
        cwd=directory, env=environment() | variables, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def _free_job_id() -> str:
    """Return a job's number whose port (20000 and the last four digits, in scripts/train.slurm) is free."""
    for job in range(os.getpid() % 5000, 10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                return str(job)
    raise AssertionError("no port from 20000 to 29999 is free")
