"""Which rank hangs, by rule: the silent one, the one behind, the one that does not wait, or that waits elsewhere."""

import json
from dataclasses import replace

import pytest

from rl_megatron.observability.liveness import Beat, Place
from rl_megatron.observability.watchdog import RankState, describe_hang, diagnose, format_ranks

LIMIT = 10.0
TRAIN = Place("grpo", 1, 7, 20, "train", 4, 2, 8, "microbatches")
WAITING = Beat("node0", 4100, 50, TRAIN, 30.0, "all_reduce", "rl_megatron/training/metrics.py:40", 12)
WORKING = replace(WAITING, collective=None, at="my_loss.py:9")


def ranks(*beats, silent=()):
    """Return what is known of ranks with these heartbeats; `silent` is (rank, seconds) of those that stopped."""
    seconds = dict(silent)
    return [RankState(rank, replace(beat, pid=4100 + rank), seconds.get(rank, 0.0)) for rank, beat in enumerate(beats)]


def named(*beats, silent=()):
    diagnosis = diagnose(ranks(*beats, silent=silent), LIMIT)
    assert diagnosis is not None
    return diagnosis.rank


def test_nothing_is_wrong_while_one_rank_goes_on():
    assert diagnose(ranks(WAITING, WAITING, replace(WORKING, seconds=3.0)), LIMIT) is None


def test_the_rank_that_fell_silent_first_is_named_before_any_rank_that_is_behind():
    behind = replace(WORKING, place=TRAIN._replace(step=6))
    assert named(WAITING, behind, WAITING, WAITING, silent=[(2, 14.0), (3, 11.0)]) == 2


def test_a_rank_that_is_late_by_less_than_the_limit_is_not_silent():
    going_on = replace(WORKING, seconds=0.0)
    assert diagnose(ranks(going_on, going_on, silent=[(1, 9.0)]), LIMIT) is None


def test_a_rank_on_which_the_run_has_ended_is_neither_silent_nor_behind():
    ended = replace(WAITING, has_ended=True, place=Place())
    assert diagnose(ranks(replace(WORKING, seconds=0.0), ended, silent=[(1, 99.0)]), LIMIT) is None
    assert diagnose(ranks(ended, ended, silent=[(0, 99.0)]), LIMIT) is None


@pytest.mark.parametrize(
    "place",
    [
        TRAIN._replace(stage="sft", stage_number=0, step=20, phase_number=9),
        TRAIN._replace(step=6, phase_number=9),
        TRAIN._replace(phase="logprobs", phase_number=2, done=7),
        TRAIN._replace(done=1),
    ],
)
def test_the_rank_that_is_furthest_behind_is_named(place):
    assert named(WAITING, WAITING, replace(WAITING, place=place)) == 2


def test_of_ranks_at_the_same_place_that_which_does_not_wait_is_named():
    assert named(WAITING, WORKING, WAITING) == 1


def test_a_pipeline_stage_that_waits_with_fewer_microbatches_is_not_named_for_the_one_before_it():
    waits = replace(WAITING, collective="wait of recv_forward", place=TRAIN._replace(done=1))
    assert named(WORKING, waits) == 0


@pytest.mark.parametrize("other", [{"collective": "broadcast"}, {"at": "my_loss.py:9"}, {"sequence": 11}])
def test_of_ranks_that_all_wait_that_in_another_collective_is_named(other):
    assert named(WAITING, WAITING, replace(WAITING, **other), WAITING) == 2


def test_no_rank_is_named_if_nothing_tells_them_apart():
    assert named(WAITING, WAITING) is None
    assert named(WORKING, WORKING) is None


def test_a_single_rank_that_does_not_go_on_is_named():
    assert named(WORKING) == 0


def test_sixteen_thousand_ranks_are_judged_and_described_shortly():
    many = ranks(*[WAITING] * 9000, WORKING, *[WAITING] * 7383)
    diagnosis = diagnose(many, LIMIT)
    assert diagnosis is not None and diagnosis.rank == 9000
    assert len(describe_hang(diagnosis, many, "")) < 500


def test_the_paragraph_says_who_where_since_when_and_what_the_others_do():
    states = ranks(WAITING, WORKING, WAITING, replace(WAITING, at="rl_megatron/topology/topology.py:3"))
    diagnosis = diagnose(states, LIMIT)
    assert diagnosis is not None
    assert describe_hang(diagnosis, states, "The end.") == (
        "hang: rank 1 on node0 (process 4101) has made no progress for 30 s, while others wait for it in a collective: "
        "stage grpo, step 7 of 20, phase train, 2 of 8 microbatches, at my_loss.py:9. "
        "Ranks 0 and 2 are in all_reduce, called at rl_megatron/training/metrics.py:40; "
        "rank 3 is in all_reduce, called at rl_megatron/topology/topology.py:3. The end."
    )


def test_a_heartbeat_is_the_same_after_the_store():
    assert Beat.from_json(WAITING.to_json().encode()) == WAITING
    assert Beat.from_json(b"") == Beat() and json.loads(WAITING.to_json())["pid"] == 4100


def test_ranks_are_listed_one_by_one_only_if_they_are_few():
    assert [format_ranks(each) for each in ([3], [0, 2], list(range(20)))] == [
        "rank 3",
        "ranks 0 and 2",
        "20 ranks (0 … 19)",
    ]
