"""What scripts/train.slurm makes of a job's nodes and of their ends, with stand-ins for SLURM and for the nodes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.page_commands import SLURM

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.slurm"
# A node that serves says what it was told, and ends when it is asked to.
SERVES = """trap 'echo ended >>{directory}/served; exit 0' TERM
    echo "$SLURMD_NODENAME token=${RL_MEGATRON_SERVER_TOKEN:0:64} $*" >>{directory}/served
    while :; do sleep 0.05; done"""
# A node that trains ends as soon as all nodes that serve have said so: one address for each of them is its last word.
TRAINS = """nodes=${!#}
    nodes=${nodes//[^,]/}
    until [ "$(cat {directory}/served 2>/dev/null | wc -l)" -gt ${#nodes} ]; do sleep 0.02; done
    echo "$SLURMD_NODENAME $NNODES $*" >>{directory}/trained"""


@pytest.mark.parametrize(
    ("statuses", "status", "is_queued"),
    [((75, 75), 75, True), ((0, 0), 0, False), ((75, 1), 1, False), ((2, 75), 2, False)],
    ids=["saved", "complete", "a node failed", "the first node failed"],
)
def test_a_job_is_queued_again_if_all_nodes_ended_early(tmp_path, statuses, status, is_queued):
    """srun ends the other nodes when one ends with another status than 0, so that no node may end with 75."""
    of_nodes = " ".join(map(str, statuses))
    done = job(tmp_path, f'statuses=({of_nodes}); exit "${{statuses[$SLURM_NODEID]}}"')
    assert done.returncode == status, done.stderr
    assert ("queueing job 7 again" in done.stdout) == is_queued == (tmp_path / "requeued").exists()
    assert list(tmp_path.glob("tmp.*")) == []


def test_signals_reach_ranks_also_if_slurm_sends_them_to_the_first_process_of_a_task_alone(tmp_path):
    """With proctrack/cgroup it does, and that process is the shell which starts train.sh."""
    ranks = "trap 'exit 75' USR1; touch $TMPDIR/ready-$SLURM_NODEID; while :; do sleep 0.05; done"
    running = started(tmp_path, ranks)
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    assert running.wait(20) == 75


@pytest.mark.change
@pytest.mark.parametrize(
    ("variables", "trainers", "engines"),
    [
        ({"ENGINE_NODES": "1"}, ["node1", "node2"], ["node3"]),
        ({"ENGINE_NODES": "2"}, ["node1"], ["node2", "node3"]),
        (
            {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "node[1-2]",
             "SLURM_JOB_NODELIST_HET_GROUP_1": "node[3-4]"},
            ["node1", "node2"], ["node3", "node4"],
        ),
    ],
    ids=["one", "two", "a heterogeneous job"],
)  # fmt: skip
def test_some_nodes_serve_and_the_others_train_with_their_addresses(tmp_path, variables, trainers, engines):
    done = job(tmp_path, sides(tmp_path, TRAINS), "model=nano", SLURM_JOB_NODELIST="node[1-3]", **variables)
    assert done.returncode == 0, done.stderr
    served = (tmp_path / "served").read_text().splitlines()
    told = sorted(line for line in served if line != "ended")
    assert served.count("ended") == len(engines) == len(told)
    tokens = {line.split()[1] for line in told}
    assert len(tokens) == 1 and len(tokens.pop()) == len("token=") + 64
    words = "serve model=nano --host 0.0.0.0 --port 10007"
    assert [(line.split()[0], " ".join(line.split()[2:])) for line in told] == [(node, words) for node in engines]
    nodes = ",".join("127.0.0.1:10007" for _ in engines)
    wanted = [f"{node} {len(trainers)} train model=nano --server-nodes {nodes}" for node in trainers]
    assert sorted((tmp_path / "trained").read_text().splitlines()) == wanted


@pytest.mark.change
@pytest.mark.parametrize(
    ("division", "options"), [("auto", ""), ("auto:1", " --engine-nodes 1")], ids=["measured", "with a first choice"]
)
def test_the_run_may_choose_how_many_nodes_serve(tmp_path, division, options):
    asked = f'if [ "$1" = balance ]; then echo "$*" >>{tmp_path}/asked; echo 2; exit; fi'
    done = job(
        tmp_path, f"{asked}\n{sides(tmp_path, TRAINS)}", "model=nano", SLURM_JOB_NODELIST="node[1-3]",
        ENGINE_NODES=division, NPROC_PER_NODE="4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text() == f"balance model=nano --nodes 3 --ranks-per-node 4{options}\n"
    assert [line.split()[:2] for line in (tmp_path / "trained").read_text().splitlines()] == [["node1", "1"]]


def test_a_choice_that_the_run_refuses_ends_the_job(tmp_path):
    done = job(tmp_path, "exit 2", ENGINE_NODES="auto")
    assert done.returncode == 2 and not (tmp_path / "requeued").exists()


@pytest.mark.change
@pytest.mark.parametrize(("ranks", "status", "is_queued"), [(75, 75, True), (1, 1, False)], ids=["saved", "failed"])
def test_the_status_of_the_training_is_that_of_a_job_with_servers(tmp_path, ranks, status, is_queued):
    done = job(tmp_path, sides(tmp_path, f"{TRAINS}; exit {ranks}"), ENGINE_NODES="1")
    assert done.returncode == status and "ended" in (tmp_path / "served").read_text()
    assert is_queued == (tmp_path / "requeued").exists()


@pytest.mark.change
@pytest.mark.parametrize("status", [0, 1, 2])
def test_training_is_asked_to_save_and_the_job_fails_if_the_servers_end_before_it(tmp_path, status):
    ranks = "trap 'touch $TMPDIR/asked; exit 75' TERM; touch $TMPDIR/ready; while :; do sleep 0.05; done"
    servers = f"until [ -e $TMPDIR/ready ]; do sleep 0.02; done; exit {status}"
    done = job(tmp_path, sides(tmp_path, ranks, servers), ENGINE_NODES="1")
    assert done.returncode == (status or 1) and (tmp_path / "asked").exists()
    assert f"the servers ended with status {status} before the training did" in done.stderr
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ({"ENGINE_NODES": "2"}, ("train",), "ENGINE_NODES=2 leaves none of the job's 2 node(s) for training"),
        ({"ENGINE_NODES": "one"}, ("train",), "ENGINE_NODES=one is not a number of nodes, auto or auto:N"),
        ({"ENGINE_NODES": "-1"}, ("train",), "ENGINE_NODES=-1 is not a number of nodes"),
        ({"ENGINE_NODES": "1"}, ("certify",), "which only 'train' uses, and its first argument is 'certify'"),
        ({"SLURM_HET_SIZE": "3"}, ("train",), "the job has 3 components"),
        ({"SLURM_HET_SIZE": "2", "ENGINE_NODES": "1"}, ("train",), "in a heterogeneous job the second component has"),
        ({"SERVER_PORT": "http", "ENGINE_NODES": "1"}, ("train",), "SERVER_PORT=http is not a port"),
    ],
)
def test_a_wrong_division_of_nodes_is_refused_before_srun(tmp_path, variables, words, message):
    done = job(tmp_path, "touch $TMPDIR/started", command=words, **variables)
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "started").exists()


def sides(directory, trains, serves=SERVES):
    """Return a train.sh of which nodes with servers do one thing, and the others another."""
    trains, serves = (text.replace("{directory}", str(directory)) for text in (trains, serves))
    return f'if [ "$1" = serve ]; then {serves}\nelse {trains}\nfi'


def job(directory, train_sh, *words, command=("train",), **variables):
    """Run the script as a job of two nodes, with another train.sh; return how it ended."""
    return subprocess.run(
        ["bash", SCRIPT, *command, *words],
        env=prepared(directory, train_sh, variables), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def started(directory, train_sh):
    """Start the script as a job of two nodes, with another train.sh; the file `tasks` gets the tasks' processes."""
    environment = prepared(directory, f"echo $PPID >>{directory}/tasks; {train_sh}", {})
    return subprocess.Popen(["bash", SCRIPT, "train"], env=environment, stdout=subprocess.DEVNULL)


def prepared(directory, train_sh, variables):
    """Write train.sh and SLURM's commands, and return the environment of the script."""
    write(directory / "scripts" / "train.sh", train_sh)
    commands = SLURM | {"scontrol": f'[ "$1" = requeue ] && touch {directory}/requeued\n{SLURM["scontrol"]}'}
    for name, text in commands.items():
        write(directory / "bin" / name, text)
    return {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(directory), "REPO": str(directory),
        "REQUEUE": "1", "SERVER_PORT": "10007", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(directory),
    } | variables  # fmt: skip


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
