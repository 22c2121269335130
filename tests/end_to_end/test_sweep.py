"""`--multirun`: jobs in directories of their own, on one rank and on several; a failed job does not end the sweep."""

import pytest

from tests.end_to_end.launch import TINY, metrics

GIVEN = (*(override for override in TINY if not override.startswith("train.steps")), "train.steps=4")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_job_is_reported_and_the_next_one_trains_as_if_it_ran_alone(tmp_path, forks, ranks):
    done = forks.run_ranks(tmp_path, "train", "--multirun", *GIVEN, "optimizer.lr=1e30,1e-3", ranks=ranks)
    assert [rank.status for rank in done] == [1] * ranks, done
    assert "job 2 of 2: optimizer.lr=0.001, in out/optimizer.lr=0.001" in done[0].err
    assert [rank.out.count("Sweep of 2 jobs") for rank in done] == [1, 0][:ranks]
    assert done[0].out.splitlines()[-6:] == [
        "  failed with status 1  out/optimizer.lr=1e+30",
        "  complete              out/optimizer.lr=0.001",
        "",
        "What you can do next:",
        "  List the checkpoints of a job:",
        "    rl-megatron inspect out/optimizer.lr=0.001",
    ]
    assert done[0].out.count("What you can do next") == 1
    alone = forks.run_ranks(tmp_path, "train", *GIVEN, "output_dir=alone", ranks=ranks)
    assert [rank.status for rank in alone] == [0] * ranks, alone
    assert metrics(tmp_path / "out" / "optimizer.lr=0.001") == metrics(tmp_path / "alone")


def test_a_mistake_in_a_later_job_is_found_before_the_first(tmp_path, forks):
    done = forks.run(tmp_path, "train", "-m", *GIVEN, "optimizer.lr=1e-3,-1")
    assert done.status == 2 and done.err.startswith("error: optimizer.lr=-1") and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_sweep_runs_under_the_launcher(tmp_path, forks):
    """Here the ranks meet in the launcher's own store."""
    with forks.launch(tmp_path, "train", "-m", *GIVEN, "train.seed=0,1", ranks=2) as running:
        done = running.finish()
    assert done.status == 0, done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train.seed=0", "train.seed=1"]
    assert done.out.count("Sweep of 2 jobs") == 1
