"""Ranks that were started with different configurations do not train."""

import os

from tests.end_to_end.launch import TINY, rl_megatron


def with_another_seed_on_rank_1(arguments):
    return rl_megatron([*arguments, "train.seed=7"] if os.environ["RANK"] == "1" else arguments)


def with_another_layout_on_rank_1(arguments):
    return rl_megatron([*arguments, "parallel.tensor=2"] if os.environ["RANK"] == "1" else arguments)


def refused(directory, forks, program):
    with forks.start(directory, "train", *TINY, ranks=2, program=program) as running:
        done = running.finish_ranks()
    assert [rank.status for rank in done] == [2, 2], done
    assert not (directory / "out").exists() and done[1].err == ""
    return done[0].err


def test_another_configuration_on_one_rank_is_refused_with_rank_and_key(tmp_path, forks):
    message = refused(tmp_path, forks, with_another_seed_on_rank_1)
    assert "rank 1 runs another configuration than rank 0" in message
    assert "train.seed is 7 on rank 1 and 0 on rank 0" in message


def test_another_layout_on_one_rank_is_refused_before_process_groups_are_built(tmp_path, forks):
    assert "parallel.tensor is 2 on rank 1 and 1 on rank 0" in refused(tmp_path, forks, with_another_layout_on_rank_1)
