"""`rl-megatron doctor` on several ranks: they meet as the ranks of a run do, and a broken network is named."""

import json
import os

from tests.end_to_end.launch import TINY


def without_such_an_interface():
    os.environ["GLOO_SOCKET_IFNAME"] = "absent0"


def test_ranks_that_meet_are_timed_and_the_layout_is_checked(tmp_path, forks):
    first, second = forks.run_ranks(tmp_path, "doctor", *TINY, "parallel.tensor=2", "--json", ranks=2)
    answer = json.loads(first.out)
    found = {finding["check"]: finding for finding in answer["checks"]}
    assert found["communication"]["state"] == "ok" and "2 ranks meet over gloo" in found["communication"]["message"]
    assert found["layout"]["message"] == "2 rank(s), data-parallel degree 1"
    sizes = [transfer["bytes"] for transfer in answer["communication"]]
    assert sizes == sorted(sizes) and all(transfer["seconds"] > 0 for transfer in answer["communication"])
    assert second.out == "" and first.status == second.status == (1 if answer["problems"] else 0)


def test_a_network_interface_that_does_not_exist_is_a_problem(tmp_path, forks):
    ranks = forks.run_ranks(tmp_path, "doctor", ranks=2, before=without_such_an_interface)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "cannot reach the others" in ranks[0].out.replace("\n", " ") and "GLOO_SOCKET_IFNAME" in ranks[0].out
    assert "error: doctor: the ranks of" in ranks[0].err


def test_a_layout_that_does_not_fit_ends_all_ranks_with_1(tmp_path, forks):
    ranks = forks.run_ranks(tmp_path, "doctor", *TINY, "parallel.tensor=3", ranks=2)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "tensor" in ranks[0].out and "error: doctor: " in ranks[0].err
