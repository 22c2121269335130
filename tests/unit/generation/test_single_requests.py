"""Single requests to an engine's processes: each goes to the least loaded one, and ends if nobody waits for it."""

import pytest

from rl_megatron.generation.interfaces import Completion, EngineFailed, EngineLost, Request, Sampling
from rl_megatron.generation.transformers.pending_requests import PendingRequests
from rl_megatron.generation.transformers.process import EngineRequests

ABORTED = Completion("a", (), (), (), "abort")


class Process:
    """A process that records the messages to it."""

    def __init__(self, index):
        self.index, self.name, self.sent, self.has_ended = index, f"engine {index}", [], False

    def send(self, kind, method, arguments):
        if self.has_ended:
            raise BrokenPipeError
        self.sent.append((kind, method, *arguments))


def request(name):
    return Request(name, (1, 2), Sampling(4), 7)


def test_a_request_that_is_aborted_ends_in_the_process_that_has_it():
    first, second = processes = Process(0), Process(1)
    requests = EngineRequests(processes)
    future, other = requests.put(request("a")), requests.put(request("b"))
    requests.abort("a")
    requests.abort("unknown")
    assert first.sent == [("request", "add", request("a")), ("request", "abort", "a")]
    assert second.sent == [("request", "add", request("b"))]
    with pytest.raises(ValueError, match="request id 'a' belongs to a request that has no completion yet"):
        requests.put(request("a"))
    requests.take(first, [ABORTED], None)
    assert future.result() == ABORTED and not other.done()
    requests.put(request("a"))


def test_requests_fail_with_their_process():
    first, second = processes = Process(0), Process(1)
    requests = EngineRequests(processes)
    lost, failed = requests.put(request("a")), requests.put(request("b"))
    requests.take(second, ["b"], "no memory")
    first.has_ended = True
    requests.abort("a")
    requests.end(first)
    with pytest.raises(EngineFailed, match="engine 1: no memory"):
        failed.result()
    with pytest.raises(EngineLost, match="engine 0 has ended"):
        lost.result()
    assert requests.has_lost_a_process
    with pytest.raises(EngineLost, match="engine 0 has ended"):
        requests.put(request("c"))


def test_an_aborted_request_that_waits_is_answered_and_forgotten():
    answers = []
    pending = PendingRequests(lambda *answer: answers.append(answer), lambda: None)
    pending.add(request("a"))
    pending.abort("unknown")
    assert pending.can_advance and not answers
    pending.abort("a")
    assert answers == [([ABORTED], None)] and not pending.can_advance
