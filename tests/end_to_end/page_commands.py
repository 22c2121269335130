"""Run the commands of a documentation page: in forks where that is possible, with SLURM's commands replaced.

A README of examples/ also has the lines that its commands print, and how far a metric rises or falls.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.docs.learning import check_learning, watching
from tests.docs.tables import TOO_SHORT_TO_LEARN
from tests.end_to_end.launch import TIMEOUT, Finished, Forks, metrics
from tests.forkserver import REPOSITORY, environment
from tests.ports import free_port

# What sbatch, srun and scontrol do here: all nodes are this machine, and sbatch waits for the end of the job.
SLURM = {
    "sbatch": """
        [ "$1" = -N ] || exit 2
        export SLURM_JOB_NUM_NODES=$2 SLURM_JOB_NODELIST="node[1-$2]" SLURM_SUBMIT_DIR=$PWD
        shift 2
        exec bash "$@"
        """,
    "srun": """
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        while [ "${1#--}" != "$1" ]; do
            case "$1" in
                --nodelist=*) nodes=${1#*=} ;;
                --het-group=*) list=SLURM_JOB_NODELIST_HET_GROUP_${1#*=} nodes=$(scontrol show hostnames "${!list}") ;;
            esac
            shift
        done
        for name in TERM USR2; do trap 'kill -'$name' "${tasks[@]}" 2>/dev/null' $name; done
        number=0
        for node in ${nodes//,/ }; do
            SLURMD_NODENAME=$node SLURM_NODEID=$number "$@" & tasks+=($!)
            number=$((number + 1))
        done
        for task in "${tasks[@]}"; do
            while kill -0 "$task" 2>/dev/null; do wait "$task" || true; done
            wait "$task" || status=$?
            if [ "${status:-0}" != 0 ]; then kill "${tasks[@]}" 2>/dev/null; exit "$status"; fi
        done
        """,
    "scontrol": """
        case "$2" in
            hostnames) for node in $(seq ${3//[!0-9]/ }); do echo "node$node"; done ;;
            node) [ -n "$3" ] && echo "   NodeAddr=127.0.0.1 NodeHostName=$3" ;;
        esac
        """,
}

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_CHANGE = re.compile(r"(held-out )?`(\w+)` (rises above|falls below) ([\d.]*\d)")


def blocks(page: str, language: str) -> list[str]:
    """Return the contents of the page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """Return the lines of the page's bash blocks."""
    return [line for block in blocks(page, "bash") for line in block.splitlines()]


def check_readme(readme: str, printed: str, directory: Path) -> None:
    """Check that commands print the lines of a README's text block, and that a metric changes as the README says.

    Numbers differ between machines, so that the lines are compared without them. The README says what holds for the
    numbers: "`reward` rises above 0.5" compares the first and the last steps of the last stage.

    Args:
        readme: The text of the README.
        printed: What its commands have printed, in order.
        directory: Where they ran.
    """
    (expected,) = blocks(readme, "text")
    lines = iter(_NUMBER.sub("0", printed).splitlines())
    for line in expected.splitlines():
        assert any(_NUMBER.sub("0", line) in other for other in lines), f"{line!r} is not printed, in this order"
    for held_out, name, change, limit in _CHANGE.findall(readme):
        kind = "eval" if held_out else "train"
        *_, output_dir = re.findall(r"^Written to (.*)$", printed, re.MULTILINE)
        steps = [line for line in metrics(directory / output_dir) if line["kind"] == kind]
        values = [line[name] for line in steps if line["stage"] == steps[-1]["stage"] and name in line]
        count = 1 if held_out else min(5, len(values) // 2)
        first, last = (sum(some) / count for some in (values[:count], values[-count:]))
        low, high = (first, last) if change == "rises above" else (last, first)
        assert low < float(limit) < high, (
            f"{name} changes from {first} to {last}, but the README says: {change} {limit}"
        )


def repository_in(directory: Path) -> Path:
    """Make `directory` look like the repository's root to a command, and return it."""
    for name in ("examples", "scripts", "rl_megatron", ".venv-vllm", ".venv-tinker"):
        (directory / name).symlink_to(REPOSITORY / name)
    return directory


def run(command: str, directory: Path, forks: Forks) -> Finished:
    """Run one line of a page in `directory`, and check that it learns if it trains.

    Raises:
        AssertionError: It trains, and its steps after the first learn nothing.
    """
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
    script = ()
    if arguments[0].endswith(".py"):
        script, arguments = (partial(_run_script, *arguments),), []
    with forks.start(directory, *arguments, ranks=ranks, before=watching(directory, *script)) as running:
        finished = running.finish()
    if finished.status == 0:
        check_learning(command, directory, TOO_SHORT_TO_LEARN)
    return finished


def _run_script(path: str, *arguments: str) -> None:
    """Run a script in place of the command, and end the process."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
    sys.exit(0)


def _sbatch(arguments: list[str], directory: Path) -> Finished:
    bin_directory = directory / "bin"
    write_slurm(bin_directory)
    variables = {"PATH": f"{bin_directory}:{os.environ['PATH']}", "VENV": sys.prefix, "SLURM_JOB_ID": "7"}
    variables["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        [bin_directory / "sbatch", *arguments],
        cwd=directory, env=environment() | variables, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def write_slurm(directory: Path) -> None:
    """Write the stand-ins for SLURM's commands into a new directory."""
    directory.mkdir()
    for name, body in SLURM.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (directory / name).chmod(0o755)
