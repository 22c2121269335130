"""Rank 0 acts and every rank hears of it, or all ranks act and hear of the failure of one."""

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.ranks import Ranks


class Foreseen(RuntimeError):
    """An error that every rank is to raise."""


def heard(call):
    """Return what a call of a method of the ranks returns, or the kind and the message of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def fail(kind, message="no"):
    raise kind(message)


def fail_on(rank, ranks):
    return fail(ConfigError, "missing") if rank in (ranks.rank, None) else 5


def everything():
    """Return what each method of the ranks of this process returns."""
    ranks, asked = Ranks.detect(), []
    return {
        "leads": ranks.leads,
        "gather": ranks.gather(ranks.rank),
        "share": ranks.share(lambda: asked.append(ranks.rank) or {"from": ranks.rank}),
        "asked": asked,
        "share an error": heard(lambda: ranks.share(lambda: fail(Foreseen), (Foreseen,))),
        "run": ranks.run_on_rank0(lambda: f"of {ranks.rank}"),
        "run an error": heard(lambda: ranks.run_on_rank0(lambda: fail(ConfigError))),
        "try": ranks.try_on_rank0(lambda: None),
        "try an error": ranks.try_on_rank0(lambda: fail(KeyError)),
        "try with words": ranks.try_on_rank0(lambda: fail(KeyError), lambda error: "in words"),
        "all": ranks.all_or_none(lambda: fail_on(9, ranks)),
        "all fail": heard(lambda: ranks.all_or_none(lambda: fail_on(None, ranks))),
    }


OF_RANK_0 = {
    "leads": True,
    "gather": [0, 1],
    "share": {"from": 0},
    "asked": [0],
    "share an error": ("Foreseen", "no"),
    "run": "of 0",
    "run an error": ("ConfigError", "no"),
    "try": None,
    "try an error": "KeyError: 'no'",
    "try with words": "in words",
    "all": 5,
    "all fail": ("ConfigError", "missing"),
}


@pytest.mark.fast
def test_every_rank_hears_what_rank_0_does_and_whether_all_succeed(ranks):
    first, second = ranks.run(2, everything)
    assert first == OF_RANK_0
    assert second == OF_RANK_0 | {"leads": False, "asked": [], "run": None}


def test_a_process_without_a_group_is_rank_0_of_one():
    assert everything() == OF_RANK_0 | {"gather": [0]}


def one_fails():
    ranks = Ranks.detect()
    return (
        heard(lambda: ranks.all_or_none(lambda: fail_on(1, ranks))),
        heard(lambda: ranks.share(lambda: lambda: 1)),
        ranks.find_first_failure("late" if ranks.rank == 1 else None),
    )


@pytest.mark.fast
def test_what_one_rank_cannot_do_or_send_every_rank_reports(ranks):
    first, second = ranks.run(2, one_fails)
    assert first == second
    of_all, unsent, failure = first
    assert of_all == ("ConfigError", "missing (on rank 1)") and failure == "late (on rank 1)"
    assert unsent[0] == "RuntimeError" and "cannot be sent to other ranks" in unsent[1]
