"""Groups that are made while a policy trains, with an engine that a test controls: weights, losses and failures."""

import asyncio
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.generation.interfaces import Completion, EngineLost, Served, WeightSpan
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rewards.scorer import RewardFailed
from rl_megatron.rollouts.async_rollouts import AsyncRollouts
from rl_megatron.rollouts.group_queue import TOO_OLD, QueueRules
from rl_megatron.rollouts.runner import RolloutFailed, RolloutRules, RolloutRunner
from rl_megatron.rollouts.scored import FailureRule, ScoredRollouts, build_tasks
from rl_megatron.rollouts.worker import completion
from rl_megatron.topology.ranks import Ranks
from tests.unit.algorithms.fakes import Characters
from tests.unit.rollouts.engines import NO_LIMITS, SAMPLING
from tests.unit.rollouts.test_runner import prompts

GROUP = 2


class Engine:
    """An engine whose requests take random times, with the versions that it has meanwhile; it can be lost.

    Requests from number `slow` on take half a second. `during_sync` is called when new weights arrive.
    """

    def __init__(self, seconds=0.01, slow=1000):
        self.version, self.is_lost, self.seconds, self.slow = 0, False, seconds, slow
        self.policy_version, self.served, self.during_sync = 0, None, lambda: None
        self.num_running = self.num_repeated = 0

    def sync(self):
        self.version = self.policy_version
        self.during_sync()
        self.served = Served(self.version)
        return {}

    async def submit(self, request):
        self.num_running += 1
        began, chance = self.version, random.Random(request.seed)
        try:
            is_slow = int(request.request_id.split("-")[1]) >= self.slow
            await asyncio.sleep(0.5 if is_slow else chance.random() * self.seconds)
        finally:
            self.num_running -= 1
        if self.is_lost:
            self.num_repeated += 1
            raise EngineLost("the engine has ended")
        spans = (WeightSpan(began, 0, 1), WeightSpan(self.version, 1, 2))
        if began == self.version:
            spans = (WeightSpan(began, 0, 2),)
        return Completion(request.request_id, (65, 66), (-1.0, -2.0), spans, "length")


class Scores:
    """A scorer that may raise, and that says in which thread it was called."""

    def __init__(self, error=None):
        self.error, self.threads = error, set()

    def start(self): ...

    def close(self): ...

    reads_sequences = False

    def score_samples(self, samples):
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return torch.arange(len(samples)).float(), RewardMetrics()


@pytest.fixture
def made():
    """`made(engine, …)`: the groups that an engine makes; they are closed after the test."""
    closing = []

    def make(engine, worker=completion, scorer=None, waits=False, fails_run=True, on_failure=None, **rules):
        runner = RolloutRunner(worker, RolloutRules(NO_LIMITS, fails_run=fails_run), Characters(), Ranks(), 60.0)
        scorer = scorer or Scores()
        all_prompts, check = prompts(100), SimpleNamespace(run=lambda engine, prompts: {})
        engine.synced = SyncedEngine(engine, check, Ranks(), lambda metrics: None)
        found = AsyncRollouts(
            ScoredRollouts(runner, scorer, Characters(), on_failure=on_failure), scorer,
            QueueRules(**{"per_step": 3, "num_steps": 9, **rules}),
            lambda number: build_tasks([all_prompts[number]] * GROUP, 7, number * GROUP),
            engine.synced, lambda: engine.policy_version, SAMPLING, waits,
        )  # fmt: skip
        closing.extend([found, runner])
        return found

    yield make
    for each in closing:
        each.close()


def take(rollouts, engine, step):
    """Return the groups of a step, which begins with weights of the version before its number."""
    engine.policy_version = step - 1
    return rollouts.take(step, [])


def test_steps_get_the_groups_of_the_stream_with_their_ages(made):
    engine = Engine()
    rollouts = made(engine, max_age=2)
    numbers, ages = [], []
    for step in range(1, 10):
        groups = take(rollouts, engine, step)
        numbers += [group.number for group in groups.used]
        ages += [age for group in groups.used for age in group.ages]
        assert all(step - 1 - min(group.versions) == max(group.ages) for group in groups.used)
        assert all(len(group.results) == GROUP for group in groups.used)
    assert numbers == list(range(27)) and max(ages) <= 2
    assert rollouts.queue.num_running == rollouts.queue.num_ready == 0, "nothing is made for a tenth step"


def run_out_under_new_weights(rollouts, engine):
    """Let all requests of step 1 end under new weights, and return the groups of step 2."""

    def wait():
        while rollouts.queue.num_running:
            time.sleep(0.01)

    engine.during_sync = wait
    return take(rollouts, engine, 2)


def test_a_completion_may_end_with_new_weights_before_the_sync_returns(made):
    engine = Engine(slow=3 * GROUP)
    rollouts = made(engine, max_age=1)
    take(rollouts, engine, 1)
    assert engine.num_running == 3 * GROUP
    groups = run_out_under_new_weights(rollouts, engine)
    assert sum(group.num_partial for group in groups.used) == 3 * GROUP
    assert {age for group in groups.used for age in group.ages} == {1}


def test_a_group_is_as_old_as_its_oldest_token(made):
    """Those that have tokens of steps 1 and 2, and that step 2 does not take, are too old for step 3."""
    engine = Engine(slow=3 * GROUP)
    rollouts = made(engine, max_age=1, over_sampling=2.0)
    take(rollouts, engine, 1)
    groups = run_out_under_new_weights(rollouts, engine)
    assert [group.number for group in groups.used] == [3, 4, 5]
    assert groups.dropped == dict.fromkeys((6, 7, 8), TOO_OLD)


def test_new_weights_wait_for_requests_if_they_are_told_to(made):
    engine = Engine(seconds=0.2)
    rollouts, running = made(engine, max_age=2, waits=True), []
    engine.during_sync = lambda: running.append((engine.version, engine.num_running))
    for step in range(1, 5):
        groups = take(rollouts, engine, step)
        assert not any(group.num_partial for group in groups.used)
    new = dict(reversed(running))  # the first sync of each version
    assert new == dict.fromkeys(range(4), 0)


def test_a_sync_of_the_same_weights_waits_for_no_request(made):
    engine = Engine(slow=3 * GROUP)
    take(made(engine, max_age=1, waits=True), engine, 1)
    engine.synced.sync()
    assert engine.num_running == 3 * GROUP


def test_requests_of_an_engine_that_was_lost_are_repeated(made):
    engine = Engine(seconds=0.05)
    rollouts, restored = made(engine, max_age=1), []
    engine.is_lost = True

    def restore():
        if engine.num_repeated:
            restored.append(engine.num_repeated)
            engine.is_lost = False

    engine.during_sync = restore
    groups = take(rollouts, engine, 1)
    assert len(groups.used) == 3 and restored and restored[0] >= 1


@pytest.mark.parametrize("where", ["worker", "reward"])
def test_a_failure_ends_the_wait(made, where):
    async def fails(client, record, sampling):
        raise OSError("the world has ended")

    engine, error = Engine(), RewardFailed("no judge")
    rollouts = made(engine, max_age=1, **({"worker": fails} if where == "worker" else {"scorer": Scores(error)}))
    kind, message = (RolloutFailed, "the world has ended") if where == "worker" else (RewardFailed, "no judge")
    with pytest.raises(kind, match=message):
        take(rollouts, engine, 1)


def test_dynamic_sampling_drops_a_group_that_differs_only_by_a_failure(made):
    failures = [OSError("the world has ended")]

    async def fails_once(client, record, sampling):
        if failures:
            raise failures.pop()
        return await completion(client, record, sampling)

    class FromOne(Scores):
        def score_samples(self, samples):
            return torch.arange(len(samples)) + 1.0, RewardMetrics()

    engine = Engine()
    rules = {"max_age": 1, "drops_equal": True, "rounds": 2}
    rollouts = made(engine, worker=fails_once, scorer=FromOne(), fails_run=False, **rules)
    groups = take(rollouts, engine, 1)
    assert len(groups.used) == 3 and not failures
    assert all(result.trajectory for group in groups.used for result in group.results)


@pytest.mark.parametrize(("group", "stays"), [(2, False), (3, True)])
def test_dynamic_sampling_compares_the_samples_that_did_not_fail(made, monkeypatch, group, stays):
    """With one failure, a group of two has one sample left, and a group of three has two that differ."""
    monkeypatch.setattr("tests.unit.rollouts.test_async_rollouts.GROUP", group)
    failures = [OSError("the world has ended")]

    async def fails_once(client, record, sampling):
        if failures:
            raise failures.pop()
        return await completion(client, record, sampling)

    rule = FailureRule(masks_group=False, least_samples=2)
    rules = {"max_age": 1, "drops_equal": True, "rounds": 2}
    rollouts = made(engine := Engine(), worker=fails_once, fails_run=False, on_failure=rule, **rules)
    groups = take(rollouts, engine, 1)
    failed = [result for of_group in groups.used for result in of_group.results if not result.trajectory]
    assert len(groups.used) == 3 and not failures and bool(failed) == stays
    assert len(groups.equal) == (not stays)


def test_groups_that_are_dropped_are_cancelled(made):
    async def some_are_slow(client, record, sampling):
        await asyncio.sleep(3600 if record["number"] % 4 == 3 else 0)
        return await completion(client, record, sampling)

    engine, scorer = Engine(), Scores()
    rollouts = made(engine, worker=some_are_slow, scorer=scorer, max_age=0, over_sampling=2.0, keeps_unfinished=False)
    dropped = {}
    for step in range(1, 4):
        groups = take(rollouts, engine, step)
        assert len(groups.used) == 3 and all(group.number % 4 != 3 for group in groups.used)
        dropped |= groups.dropped
    assert any(number % 4 == 3 for number in dropped)
    assert scorer.threads and threading.main_thread().name not in scorer.threads, "training does not wait for scores"
    assert rollouts.queue.num_running + rollouts.queue.num_ready <= 6, "none is left that was dropped"
