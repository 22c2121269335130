"""Many workers at the same time: rounds, failures, retries, limits of time, and tokens that were changed."""

import asyncio
import random
import re
import resource
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.records import Record
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rollouts.batch import build_component_keys
from rl_megatron.rollouts.runner import RolloutFailed
from rl_megatron.rollouts.scored import FailureRule, ScoredRollouts, Scores, build_tasks
from rl_megatron.rollouts.trajectory import HistoryFull, Segment, TokenLimits, TokensDiffer
from rl_megatron.rollouts.worker import completion, load_worker
from rl_megatron.topology.ranks import Ranks
from tests.unit.algorithms.fakes import Characters
from tests.unit.rollouts.engines import SAMPLING, RandomTokens, run

TOKENIZER = Characters()


def prompts(number):
    records = [Record({"number": i}, f"x:{i}") for i in range(number)]
    return [EncodedPrompt([1 + i % 100, 2], Problem(str(i), ""), each) for i, each in enumerate(records)]


async def two_turns(client, record, sampling):
    history = client.history()
    await history.complete(sampling)
    history.extend([{"role": "user", "content": "ab"}])
    await history.complete(sampling)
    return [history.trajectory()]


def test_all_requests_of_a_turn_are_one_round_however_long_a_worker_takes():
    async def slow(client, record, sampling):
        history = client.history()
        for _ in range(3):
            await asyncio.sleep(random.random() / 50)
            await history.complete(sampling)
        return [history.trajectory()]

    one, other = RandomTokens(range(1, 9)), RandomTokens(range(1, 9))
    first, second = (run(slow, prompts(20), engine, TOKENIZER) for engine in (one, other))
    assert [len(requests) for requests in one.rounds] == [20, 20, 20]
    assert one.rounds == other.rounds and first == second
    assert [request.request_id for request in one.rounds[1]] == [f"7-{number}.1" for number in range(20)]


def test_so_many_tasks_run_at_the_same_time_as_are_allowed():
    engine = RandomTokens(range(1, 9))
    results = run(two_turns, prompts(7), engine, TOKENIZER, concurrency=3)
    assert len(results) == 7 and max(map(len, engine.rounds)) == 3
    assert all(result.trajectory for result in results)


def test_a_worker_that_fails_is_tried_again_and_its_failure_names_the_task():
    async def fails_once(client, record, sampling):
        if record["number"] == 2 and not client.name.endswith("r1"):
            raise OSError("the environment is gone")
        return await completion(client, record, sampling)

    results = run(fails_once, prompts(4), RandomTokens(range(1, 9)), TOKENIZER, retries=1)
    assert [result.attempts for result in results] == [1, 1, 2, 1]
    with pytest.raises(RolloutFailed, match=r"trajectory 7-2 \(x:2\): the rollout worker raised OSError: the environ"):
        run(fails_once, prompts(4), RandomTokens(range(1, 9)), TOKENIZER)
    masked = run(fails_once, prompts(4), RandomTokens(range(1, 9)), TOKENIZER, fails_run=False)
    assert [bool(result.trajectory) for result in masked] == [True, True, False, True]


async def _leaves(client, record, sampling):
    raise SystemExit(3)


async def _awaits_what_is_cancelled(client, record, sampling):
    other = asyncio.ensure_future(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(other.cancel)
    await other


async def _keeps_a_function(client, record, sampling):
    history = client.history()
    await history.complete(sampling)
    return [history.trajectory(metadata={"score": lambda: 1})]


async def _nests(client, record, sampling):
    nested = []
    for _ in range(5000):
        nested = [nested]
    history = client.history()
    await history.complete(sampling)
    return [history.trajectory(metadata={"parsed": nested})]


async def _has_no_number(client, record, sampling):
    history = client.history()
    await history.complete(sampling)
    history.add_reward(float("nan"))
    return [history.trajectory()]


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        (_leaves, "it raised SystemExit: 3"),
        (_awaits_what_is_cancelled, "a task that it awaited was cancelled"),
        (_keeps_a_function, r"metadata\['score'\]"),
        (_nests, "nested too deeply"),
        (_has_no_number, "a reward is nan"),
    ],
)
def test_whatever_a_worker_does_is_a_failure_of_its_task_alone(worker, message):
    async def first_only(client, record, sampling):
        return await (worker if record["number"] == 0 else two_turns)(client, record, sampling)

    results = run(first_only, prompts(3), RandomTokens(range(1, 9)), TOKENIZER, fails_run=False, retries=1)
    assert results[0].attempts == 2 and re.search(message, results[0].failure)
    assert [result.failure for result in results[1:]] == [None, None]


def test_a_failure_that_ends_the_run_does_not_wait_for_others():
    async def fails_or_waits(client, record, sampling):
        if record["number"] == 0:
            raise OSError("the world has ended")
        await asyncio.sleep(3600)

    with pytest.raises(RolloutFailed, match="the world has ended"):
        run(fails_or_waits, prompts(3), RandomTokens(range(1, 9)), TOKENIZER)


def test_a_request_that_nobody_waits_for_ends_with_its_attempt():
    asked = []

    async def forgets_a_request(client, record, sampling):
        history = client.history()
        if not asked:
            asked.append(asyncio.ensure_future(client.complete([65], sampling)))
            await asyncio.sleep(0)
            raise OSError("once")
        await history.complete(sampling)
        return [history.trajectory()]

    engine = RandomTokens(range(1, 9))
    (result,) = run(forgets_a_request, prompts(1), engine, TOKENIZER, retries=1)
    assert result.attempts == 2 and asked[0].cancelled()
    assert [[request.request_id for request in requests] for requests in engine.rounds] == [["7-0r1"]]


def test_requests_at_the_same_time_share_the_limit_of_tokens():
    async def asks_twice(client, record, sampling):
        answers = await asyncio.gather(*(client.complete([65], sampling) for _ in range(2)))
        assert sum(len(answer.ids) for answer in answers) == 12
        with pytest.raises(HistoryFull):
            client.fitting(1, sampling)
        return []

    engine = RandomTokens(range(1, 9), stops=0.0)
    (result,) = run(asks_twice, prompts(1), engine, TOKENIZER, limits=TokenLimits(10**6, 12), fails_run=False)
    assert [request.sampling.max_new_tokens for request in engine.rounds[0]] == [8, 4]
    assert "it returned []" in result.failure


def test_a_worker_that_ignores_its_end_is_left_behind(caplog):
    async def ignores_its_end(client, record, sampling):
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    (result,) = run(
        ignores_its_end, prompts(1), RandomTokens(range(1, 9)), TOKENIZER, fails_run=False, timeout_seconds=0.1,
        seconds_to_end=0.1,
    )  # fmt: skip
    assert "took longer than rollout.timeout_seconds=0.1" in result.failure
    assert "continues although it was cancelled" in caplog.text


def test_an_engine_that_fails_ends_the_run():
    class Broken(RandomTokens):
        def complete(self, requests):
            raise EngineFailed("the engine has ended")

    before = threading.active_count()
    with pytest.raises(EngineFailed, match="the engine has ended"):
        run(two_turns, prompts(3), Broken([1]), TOKENIZER)
    assert threading.active_count() == before


def test_a_limit_of_time_does_not_count_the_engine():
    class Slow(RandomTokens):
        def complete(self, requests):
            time.sleep(0.4)
            return super().complete(requests)

    async def hangs(client, record, sampling):
        history = client.history()
        await history.complete(sampling)
        await asyncio.sleep(60 if record["number"] == 1 else 0)
        return [history.trajectory()]

    results = run(hangs, prompts(3), Slow(range(1, 9)), TOKENIZER, timeout_seconds=0.2, fails_run=False)
    assert [bool(result.trajectory) for result in results] == [True, False, True]
    assert "took longer than rollout.timeout_seconds=0.2" in results[1].failure


@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_token_that_was_changed_is_named(place):
    """Tokens 0 and 1 are the prompt, token 2 was sampled, tokens 3 and 4 are another's, and token 5 was sampled."""

    async def corrupts(client, record, sampling):
        (trajectory,) = await two_turns(client, record, sampling)
        (segment,) = trajectory.segments
        ids = list(segment.ids)
        ids[place] += 1
        return [replace(trajectory, segments=(Segment(ids, segment.turns),))]

    turn = 1 if place == 0 else 2
    with pytest.raises(RolloutFailed, match=rf"turn {turn}: token {place + 1} .*\d+, but the engine "):
        run(corrupts, prompts(1), RandomTokens(range(1, 9), stops=1.0), TOKENIZER)


def test_a_completion_of_nobody_is_refused():
    async def invents(client, record, sampling):
        (trajectory,) = await completion(client, record, sampling)
        (segment,) = trajectory.segments
        turn = segment.turns[0]
        forged = replace(turn, completion=replace(turn.completion, request_id="another"))
        return [replace(trajectory, segments=(Segment(segment.ids, (forged,)),))]

    with pytest.raises(RolloutFailed, match="the engine was given no request 'another'"):
        run(invents, prompts(1), RandomTokens(range(1, 9)), TOKENIZER)


def test_a_segment_is_refused_whose_turns_overlap():
    async def keep(client, record, sampling):
        kept.extend(await two_turns(client, record, sampling))
        return kept

    kept = []
    run(keep, prompts(1), RandomTokens(range(1, 9)), TOKENIZER)
    segment = kept[0].segments[0]
    with pytest.raises(TokensDiffer, match="turn 2 is given as tokens"):
        Segment(segment.ids, segment.turns[::-1])


def test_a_segment_is_refused_whose_tokens_are_not_the_sampled_ones():
    (result,) = run(two_turns, prompts(1), RandomTokens(range(1, 9)), TOKENIZER)
    segment = result.trajectory.segments[0]
    start = segment.turns[1].start
    other = [*segment.ids[:start], segment.ids[start] + 1, *segment.ids[start + 1 :]]
    with pytest.raises(TokensDiffer, match=f"turn 2: token {start + 1} of the segment is {other[start]}"):
        Segment(other, segment.turns)


def test_every_task_has_a_seed_of_its_own_that_follows_from_its_number():
    tasks = build_tasks(prompts(4), seed=7)
    assert len({task.seed for task in tasks}) == 4
    assert [task.seed for task in build_tasks(prompts(2), seed=7, first=2)] == [task.seed for task in tasks[2:]]
    assert {task.seed for task in build_tasks(prompts(4), seed=8)}.isdisjoint(task.seed for task in tasks)


def test_another_attempt_draws_other_tokens():
    async def fails_once(client, record, sampling):
        found = await completion(client, record, sampling)
        if not client.name.endswith("r1"):
            raise OSError("the environment is gone")
        return found

    engine = RandomTokens(range(1, 9))
    run(fails_once, prompts(1), engine, TOKENIZER, retries=1)
    (first,), (second,) = engine.rounds
    assert first.seed != second.seed


def test_limits_of_tokens_shorten_completions_and_end_trajectories():
    async def long(client, record, sampling):
        history = client.history()
        try:
            while True:
                await history.complete(sampling)
                history.extend([{"role": "user", "content": "ab"}])
        except HistoryFull:
            return [history.trajectory(truncated=True)]

    engine = RandomTokens(range(1, 9), stops=0.0)
    (result,) = run(long, prompts(1), engine, TOKENIZER, limits=TokenLimits(25, 10**6))
    lengths = [turn.end - turn.start for turn in result.trajectory.turns]
    assert lengths == [8, 8, 3] and len(result.trajectory.segments[0].ids) == 25
    (result,) = run(long, prompts(1), engine, TOKENIZER, limits=TokenLimits(10**6, 10))
    assert [turn.end - turn.start for turn in result.trajectory.turns] == [8, 2]


@pytest.mark.change
def test_a_thousand_trajectories_with_faults_are_all_accounted_for():
    """Of each group of four, all are learned from or none."""

    async def faulty(client, record, sampling):
        chance, history = random.Random(record["number"]), client.history()
        for _ in range(3):
            await asyncio.sleep(chance.random() / 100)
            fault = chance.random()
            if fault < 0.02:
                raise RuntimeError("a fault")
            if fault < 0.035:
                await asyncio.sleep(3600)
            await history.complete(sampling)
            history.extend([{"role": "user", "content": "x" * chance.randint(0, 200)}])
        return [history.trajectory(reward=1.0)]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tasks = prompts(1000)
    results = run(faulty, tasks, RandomTokens(range(1, 9)), TOKENIZER, timeout_seconds=2.0, fails_run=False)
    failed = [number for number, result in enumerate(results) if result.failure]
    assert len(results) == 1000 and 50 < len(failed) < 200
    of_results = {"run": lambda *arguments: results, "ranks": Ranks()}
    runner = SimpleNamespace(makes_turns=True, leads=True, **of_results)
    score = lambda samples: (torch.zeros(len(samples)), RewardMetrics())  # noqa: E731
    scorer = SimpleNamespace(score_samples=score, reads_sequences=False)
    batch = ScoredRollouts(runner, scorer, TOKENIZER).make(None, tasks, SAMPLING, 0, group_size=4).batch
    groups = (batch["sample_mask"] > 0).view(-1, 4)
    assert (groups.all(1) | ~groups.any(1)).all()
    assert {number // 4 for number in failed} == set((~groups.any(1)).nonzero()[:, 0].tolist())
    assert batch["token_mask"][batch["sample_mask"] == 0].sum() == 0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 500, "MiB"


def test_nothing_is_learned_from_the_group_of_a_failed_trajectory():
    results = run(completion, tasks := prompts(4), RandomTokens(range(1, 9)), TOKENIZER)
    results[1] = replace(results[1], trajectory=None, failure="it broke")
    runner = SimpleNamespace(makes_turns=True, ranks=Ranks(), run=lambda *arguments: results)
    scorer = SimpleNamespace(
        score_samples=lambda samples: (torch.arange(1.0, 1.0 + len(samples)), RewardMetrics()), reads_sequences=False
    )
    made = ScoredRollouts(runner, scorer, TOKENIZER).make(None, tasks, SAMPLING, 0, group_size=2)
    assert made.num_failed == 1
    assert made.batch["sample_mask"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert made.batch["token_mask"].any(dim=1).tolist() == [False, False, True, True]
    assert made.batch["rewards"].tolist() == [0.0, 0.0, 2.0, 3.0]


def scored_with_failures(failed, rule, group_size=4, number=8):
    """Return `number` samples with the rewards 1, 2, …, of which some failed."""
    results = run(completion, tasks := prompts(number), RandomTokens(range(1, 9)), TOKENIZER)
    for place in failed:
        results[place] = replace(results[place], trajectory=None, failure=f"sample {place} broke")
    runner = SimpleNamespace(makes_turns=True, ranks=Ranks(), run=lambda *arguments: results)
    scorer = SimpleNamespace(
        score_samples=lambda samples: (torch.arange(1.0, 1.0 + len(samples)), RewardMetrics()), reads_sequences=False
    )
    rollouts = ScoredRollouts(runner, scorer, TOKENIZER, with_components=True, on_failure=rule)
    return rollouts.make(None, tasks, SAMPLING, 0, group_size=group_size)


def test_a_failed_sample_alone_is_left_out_of_its_group(logged):
    made = scored_with_failures([1], FailureRule(masks_group=False, least_samples=2))
    assert made.batch["sample_mask"].tolist() == [1.0, 0.0] + [1.0] * 6
    assert made.batch["token_mask"].any(dim=1).tolist() == [True, False] + [True] * 6
    assert made.batch["rewards"].tolist() == [1.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert made.batch["component_reward.environment"].isnan().tolist() == [False, True] + [False] * 6
    assert made.metrics.values() | {"failed_trajectories": 1, "masked_groups": 0} == made.metrics.values()
    assert not any("nothing is learned" in message for message in logged)


def test_a_group_of_which_too_few_are_left_is_masked_and_named(logged):
    rule = FailureRule(masks_group=False, least_samples=2)
    made = scored_with_failures([0, 2, 3], rule)
    assert made.batch["sample_mask"].tolist() == [0.0] * 4 + [1.0] * 4
    assert made.batch["token_mask"].any(dim=1).tolist() == [False] * 4 + [True] * 4
    assert made.metrics.values()["masked_groups"] == 1 and made.num_failed == 3
    message = "only 1 of the 4 samples of a prompt succeeded, but at least 2 are needed; nothing is learned from them. "
    assert [each for each in logged if "nothing is" in each] == [f"{message}The first failure: sample 0 broke"]
    alone = scored_with_failures([0, 2, 3], replace(rule, least_samples=1))
    assert alone.batch["sample_mask"].tolist() == [0.0, 1.0, 0.0, 0.0] + [1.0] * 4
    assert alone.metrics.values()["masked_groups"] == 0


def test_a_run_ends_if_too_few_samples_of_every_group_are_left():
    rule = FailureRule(masks_group=False, least_samples=2)
    with pytest.raises(RolloutFailed, match="too many trajectories of every group failed, .*: sample 0 broke"):
        scored_with_failures([0, 1, 2, 5, 6, 7], rule)


def test_the_reward_of_an_environment_is_added_if_one_trajectory_has_it():
    results = run(completion, tasks := prompts(2), RandomTokens(range(1, 9)), TOKENIZER)
    results[1] = replace(results[1], trajectory=replace(results[1].trajectory, reward=0.5))
    runner = SimpleNamespace(makes_turns=True, ranks=Ranks(), run=lambda *arguments: results)
    scorer = SimpleNamespace(score_samples=lambda samples: (torch.ones(2), RewardMetrics()), reads_sequences=False)
    made = ScoredRollouts(runner, scorer, TOKENIZER).make(None, tasks, SAMPLING, 0, group_size=2)
    assert made.batch["rewards"].tolist() == [1.0, 1.5]


def test_batches_have_the_score_of_each_reward_function_if_they_are_asked_for():
    results = run(completion, tasks := prompts(4), RandomTokens(range(1, 9)), TOKENIZER)
    of_results = {"run": lambda *arguments: results, "ranks": Ranks()}
    runner = SimpleNamespace(makes_turns=True, leads=True, **of_results)
    metrics = RewardMetrics({"exact": [1.0, None, 0.5, 0.0]})
    scorer = SimpleNamespace(score_samples=lambda samples: (torch.ones(4), metrics), reads_sequences=False)
    made = ScoredRollouts(runner, scorer, TOKENIZER, with_components=True).make(None, tasks, SAMPLING, 0, group_size=2)
    assert made.batch["component_reward.exact"].nan_to_num(-1.0).tolist() == [1.0, -1.0, 0.5, 0.0]
    assert made.batch["component_reward.environment"].tolist() == [0.0] * 4
    plain = ScoredRollouts(runner, scorer, TOKENIZER).make(None, tasks, SAMPLING, 0, group_size=2)
    assert not any(key.startswith("component_reward.") for key in plain.batch)


def test_scores_of_an_environment_stay_with_their_trajectories_if_only_some_parts_have_them():
    parts = [
        Scores(
            [], torch.ones(2, dtype=torch.bool), torch.zeros(2), RewardMetrics({"exact": [1.0, 2.0]})
        ),  # asynchronous runs keep no samples
        Scores(
            [],
            torch.ones(2, dtype=torch.bool),
            torch.zeros(2),
            RewardMetrics({"exact": [3.0, 4.0], "environment": [0.5, 0.0]}),
        ),
    ]
    joined = Scores.join(parts).metrics.scores
    assert joined == {"exact": [1.0, 2.0, 3.0, 4.0], "environment": [None, None, 0.5, 0.0]}
    keys = build_component_keys(joined, torch.tensor([True, True, True, False]), has_turns=True)
    assert keys["component_reward.environment"].nan_to_num(-1.0).tolist() == [0.0, 0.0, 0.5, -1.0]


def test_a_worker_is_a_function_or_a_class_with_arguments(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "async def plain(client, record, sampling, turns=1): ...\n"
        "def blocking(client, record, sampling): ...\n"
        "class Game:\n"
        "    def __init__(self, size): self.size = size\n"
        "    async def rollout(self, client, record, sampling): return self.size\n"
    )
    assert load_worker("completion", {}) is completion
    assert load_worker(f"{path}:plain", {"turns": 2}).keywords == {"turns": 2}
    assert asyncio.run(load_worker(f"{path}:Game", {"size": 3})(None, {}, SAMPLING)) == 3
    for name, kwargs, message in (
        ("completio", {}, "there is no rollout worker 'completio'"),
        (f"{path}:plain", {"size": 2}, "got an unexpected keyword argument 'size'"),
        (f"{path}:blocking", {}, "is not a coroutine function; write `async def rollout"),
        (f"{path}:Game", {}, "cannot be made with rollout.worker_kwargs: raised TypeError"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            load_worker(name, kwargs)
