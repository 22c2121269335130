"""`torchrun --max-restarts`: a rank that dies does not end the run, and the metrics are those of an undisturbed one."""

import os
import signal

from tests.end_to_end.launch import TINY, Command, checkpoints, metrics

RUN = (
    "train", "algorithm=grpo", *TINY, "train.steps=8", "train.save_every=2", "train.eval_every=0", "parallel.tensor=2",
)  # fmt: skip


def test_a_run_with_a_killed_rank_ends_well_with_the_metrics_of_an_undisturbed_run(tmp_path, forks):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    done = forks.run_ranks(tmp_path / "whole", *RUN, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    out = tmp_path / "killed" / "out"
    with Command(tmp_path / "killed", *RUN, ranks=2, restarts=1, with_torchrun=True) as running:
        running.wait_until(lambda: "step-000002" <= max(checkpoints(out, "grpo"), default=""), "the first save")
        os.kill(running.ranks()[1], signal.SIGKILL)
        finished = running.finish()
    assert finished.status == 0, finished.err
    assert finished.err.count("2 rank(s): tensor 2") == 2, "the ranks start twice"
    assert metrics(out) == metrics(tmp_path / "whole" / "out")
