"""Ranks that die are started again, and the metrics of the run are those of an undisturbed one."""

import os
import signal
from contextlib import ExitStack

import pytest

from tests.end_to_end.launch import INTERRUPTED, checkpoints, metrics
from tests.ports import free_port

RUN = (*INTERRUPTED, "train.save_every=2")


def newest(out) -> str:
    return max(checkpoints(out, "grpo"), default="")


@pytest.mark.parametrize("kills", [((1, "step-000002"),), ((1, "step-000002"), (0, "step-000004"))], ids=["one", "two"])
def test_torchrun_starts_the_ranks_again_after_each_kill(tmp_path, forks, whole, kills):
    out = tmp_path / "out"
    with forks.launch(tmp_path, *RUN, ranks=2, restarts=len(kills), with_torchrun=True) as running:
        for rank, step in kills:
            running.wait_until(lambda step=step: step <= newest(out), step)
            os.kill(running.ranks()[rank], signal.SIGKILL)
        finished = running.finish()
    assert finished.status == 0, finished.err
    assert finished.err.count("2 rank(s): tensor 2") == 1 + len(kills)
    assert metrics(out) == whole


@pytest.mark.change
@pytest.mark.parametrize("meets_by", ["c10d", "static"])
def test_two_launchers_start_their_ranks_again_after_a_kill(tmp_path, forks, whole, meets_by):
    """Two nodes on the loopback address, which meet by either rendezvous of torchrun."""
    out, port = tmp_path / "out", free_port()
    with ExitStack() as nodes:
        launchers = []
        for number in range(2):
            directory = tmp_path / f"node{number}"
            directory.mkdir()
            options = {
                "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restarts"),
                "static": ("--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port)),
            }[meets_by]
            options = ("--nnodes", "2", "--local-addr", "127.0.0.1", *options)
            launcher = forks.launch(directory, *RUN, f"output_dir={out}", ranks=1, restarts=1, meeting=options)
            launchers.append(nodes.enter_context(launcher))
        launchers[0].wait_until(lambda: newest(out) >= "step-000002", "the first save")
        (pid,) = launchers[1].ranks().values()
        os.kill(pid, signal.SIGKILL)
        finished = [launcher.finish() for launcher in launchers]
    assert [node.status for node in finished] == [0, 0], finished
    assert "".join(node.err for node in finished).count("2 rank(s): tensor 2") == 2
    assert metrics(out) == whole


STOP_AT_THE_END = """
import os, signal
from pathlib import Path
import torch.distributed as dist

def leave_and_stop(destroy=dist.destroy_process_group):
    destroy()
    if os.environ["RANK"] == "1" and not Path("stopped").exists():
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

dist.destroy_process_group = leave_and_stop
"""


@pytest.mark.change
def test_a_rank_that_stops_after_the_last_collective_is_killed(tmp_path, forks):
    (tmp_path / "stop_at_the_end.py").write_text(STOP_AT_THE_END)
    run = (*INTERRUPTED, "train.steps=1", "plugins=[stop_at_the_end]")
    with forks.launch(tmp_path, *run, ranks=2, restarts=1, seconds_to_follow=2.0) as running:
        finished = running.finish()
    assert finished.status == 0, finished.err
    assert "rank 1 (process " in finished.err and "has not ended 2 s after other ranks ended well" in finished.err
    assert "nothing was trained: out is unchanged" in finished.out
