"""The answers of several servers, as a weight sync hears them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from rl_megatron.topology.ranks import Ranks
from rl_megatron.weight_sync.process_group import CollectiveFailed
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused, WeightServers


class Answering:
    """A server whose answer to each path is a value, an exception, or None, which means that it never answers."""

    def __init__(self, name: str, answer):
        self.name, self._answer, self.heard = name, answer, []

    def request(self, method, path, body=None, timeout_seconds=None) -> Future:
        self.heard.append((method, path, body))
        future = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer is not None:
            future.set_result(self._answer)
        return future


def answering(*answers) -> list[Answering]:
    return [Answering(f"server {index}", answer) for index, answer in enumerate(answers)]


def together(each, **options) -> WeightServers:
    return WeightServers(each, Ranks(), **{"timeout_seconds": 10.0} | options)


def servers(*answers, **options) -> WeightServers:
    return together(answering(*answers), **options)


def test_each_server_gets_its_body_and_the_answers_are_in_the_servers_order():
    each = answering("a", "b")
    asked = together(each)
    assert asked.post("/path", [{"x": 1}, {"x": 2}]) == ("a", "b")
    assert asked.get("/other") == ("a", "b")
    assert each[1].heard == [("POST", "/path", {"x": 2}), ("GET", "/other", None)]


def test_a_request_can_be_for_some_servers_only():
    each = answering("a", "b", "c")
    asked = together(each)
    assert asked.post("/path", to=[True, False, True]) == ("a", "c")
    assert [len(server.heard) for server in each] == [1, 0, 1]


class Unjoinable:
    """A process group that this rank cannot join."""

    def is_over(self, seconds):
        return True

    def wait(self):
        raise CollectiveFailed("no peer came")


def test_a_group_that_cannot_be_joined_is_no_group():
    with pytest.raises(CollectiveFailed, match="no peer came"):
        servers("a").meet(Unjoinable())


def test_a_server_may_answer_a_little_after_a_collective_has_failed():
    late = Answering("late", None)
    asked, future = together([late], seconds_after_a_break=5.0), Future()
    late.request = lambda *arguments: future

    def fail():
        threading.Timer(0.3, lambda: future.set_exception(ServerRefused("the weights do not fit"))).start()
        raise CollectiveFailed("a peer left")

    with pytest.raises(ServerDied, match="the process group .* failed: a peer left"):
        asked.post("/path", meanwhile=fail)
    assert future.done()


def test_a_dead_server_is_noticed_while_another_one_is_silent():
    began = time.monotonic()
    with pytest.raises(ServerDied, match="connection refused"):
        servers(None, ServerDied("server 1: connection refused")).post("/path")
    assert time.monotonic() - began < 1


def test_a_death_is_reported_rather_than_an_error_of_another_server():
    with pytest.raises(ServerDied, match="gone"):
        servers(ServerRefused("500"), ServerDied("gone")).post("/path")
    with pytest.raises(ServerRefused, match="failed at /path: 500: no such backend"):
        servers("fine", ServerRefused("500: no such backend")).post("/path")


def test_a_silent_server_counts_as_dead_after_a_broken_collective():
    def breaks():
        raise CollectiveFailed("a peer left")

    with pytest.raises(ServerDied, match="server 0 did not answer /path in time"):
        servers(None, seconds_after_a_break=0.1).post("/path", meanwhile=breaks)
    with pytest.raises(ServerDied, match="process group of the policy and the servers failed: a peer left"):
        servers("fine").post("/path", meanwhile=breaks)


def test_ranks_do_not_wait_for_servers_that_have_answered_without_joining():
    class NeverOver:
        def is_over(self, seconds):
            time.sleep(seconds)
            return False

    asked = servers("fine", timeout_seconds=60.0, seconds_after_a_break=0.1)
    with pytest.raises(ServerDied, match="some of their workers did not join"):
        asked.post("/path", meanwhile=lambda: asked.meet(NeverOver()))


def test_workers_have_five_seconds_to_join_after_their_servers_have_answered(monkeypatch):
    now = [0.0]

    class NeverOver:
        def is_over(self, seconds):
            now[0] += seconds
            return False

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    asked = servers("fine", timeout_seconds=60.0)
    with pytest.raises(ServerDied, match="some of their workers did not join"):
        asked.post("/path", meanwhile=lambda: asked.meet(NeverOver()))
    assert 5 < now[0] < 6


def test_an_unexpected_error_of_a_request_is_a_death_that_names_the_server():
    with pytest.raises(ServerDied, match="server 0: KeyError"):
        servers(KeyError("x")).post("/path")
