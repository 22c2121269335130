"""Steps that wait for their trajectories and steps that do not: prompts and seeds, ages, and what checkpoints keep."""

import time
from contextlib import ExitStack
from itertools import cycle, repeat
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data import training_data
from rl_megatron.generation.interfaces import Completion, Served, WeightSpan
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.rollouts.runner import RolloutRules, RolloutRunner
from rl_megatron.rollouts.worker import completion
from rl_megatron.topology.ranks import Ranks
from tests.unit.algorithms import fakes
from tests.unit.algorithms.fakes import EOS, ONE_RANK, Characters, Echo, Problems, ScoredHere, sampling
from tests.unit.rollouts.engines import NO_LIMITS

PER_STEP = SIZE = 2  # groups of a step, and samples of a group
OPTIONS = (
    "algorithm=grpo", f"algorithm.prompts_per_step={PER_STEP}", f"algorithm.samples_per_prompt={SIZE}", "train.steps=9",
    "generation.engine=transformers", "rollout.async_enabled=true",
)  # fmt: skip
AGE_0, AGE_1 = "rollout.max_trajectory_age_steps=0", "rollout.max_trajectory_age_steps=1"  # the first one waits


class Policy:
    """A policy of a single process."""

    topology = ONE_RANK

    def __init__(self):
        self.model = SimpleNamespace(version=1)

    @property
    def weight_version(self):
        return self.model.version


class Ones:
    """An engine that answers with the next of `answers`, always "1" at first, and keeps what it is asked."""

    def __init__(self, policy):
        self.policy, self.asked, self.served, self.answers = policy, set(), None, repeat("1")

    def sync(self):
        self.served = Served(self.policy.weight_version)
        return {}

    async def submit(self, request):
        self.asked.add(("".join(map(chr, request.prompt)), request.seed))
        answer = next(self.answers)
        spans = (WeightSpan(0 if self.served is None else self.served.version, 0, 2),)
        return Completion(request.request_id, (ord(answer), EOS), (-1.0, -1.0), spans, "stop")

    def complete(self, requests):
        self.asked |= {("".join(map(chr, request.prompt)), request.seed) for request in requests}
        return [
            Completion(request.request_id, (ord("1"), EOS), (-1.0, -1.0), (WeightSpan(1, 0, 2),), "stop")
            for request in requests
        ]


@pytest.fixture
def made(monkeypatch, tmp_path):
    """`made(*overrides)`: a sampler, its stage, and the engine; all are closed after the test."""
    monkeypatch.setattr(training_data, "build_source", lambda stage: Problems(Echo()))
    scorer = ScoredHere(Echo())
    monkeypatch.setattr(scorer, "close", lambda: None, raising=False)
    monkeypatch.setattr("rl_megatron.rollouts.sampler.Scorer", lambda *arguments, **options: scorer)
    with ExitStack() as closing:

        def make(*overrides):
            config, policy, kept = load_config([*OPTIONS, *overrides]).first, Policy(), {}
            waits = not config.rollout.is_asynchronous or config.rollout.replay is not None
            engine = Ones(policy)
            check = SimpleNamespace(run=lambda engine, prompts: {})
            engine.sleep = lambda: None
            synced = engine if waits else SyncedEngine(engine, check, Ranks(), lambda metrics: None)
            stage, _, sampler = sampling(
                config, synced, scorer, policy=policy, kept=kept, keep=kept.__setitem__, rollout_files=tmp_path,
                next_batch_number=2, close_at_end=lambda part: closing.callback(part.close), name="grpo",
            )  # fmt: skip
            stage.policy, stage.engine = policy, synced
            return sampler, stage, engine

        yield make


def test_groups_have_the_prompts_and_the_seeds_of_a_synchronous_run(made):
    """All rewards are equal, so that a step makes the groups of all its rounds."""
    rounds = ("algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=3")
    synchronous, _, wanted = made(AGE_0, *rounds)
    synchronous.draw(1)
    first_round = set(wanted.asked)
    synchronous.draw(1, 0)
    assert wanted.asked == first_round and len(first_round) == PER_STEP * SIZE
    for round_ in (1, 2):
        synchronous.draw(1, round_)
    first_step = set(wanted.asked)
    for step in (2, 3):
        for round_ in range(3):
            synchronous.draw(step, round_)
    sampler, _, engine = made(*rounds)
    sampler.collect(1)
    assert first_step <= engine.asked <= wanted.asked and len(first_step) == 3 * PER_STEP * SIZE


def test_groups_of_a_later_step_begin_with_the_weights_that_an_evaluation_syncs(made):
    sampler, stage, engine = made(AGE_1)
    for step in (1, 2, 3):
        _, outcome = sampler.collect(step)
        assert outcome["trajectory_age_max"] <= 1 and outcome["dropped_groups"] == 0
        stage.policy.model.version += 1
        stage.engine.sync()
        began = time.monotonic()
        while len(engine.asked) < (step + 2) * PER_STEP * SIZE:
            assert time.monotonic() - began < 10, "groups of the step after the next one have not begun"
            time.sleep(0.01)


MIXED = (
    "algorithm=opd", "loss=clipped_pg", "loss.reference_policy_kl_penalty=0", "data=files", "data.path=null",
    "data.prompt_template='{question}'", f"algorithm.prompts_per_step={PER_STEP}",
    f"algorithm.samples_per_prompt={SIZE}",
    "data.mix=[{path: upper.jsonl, name: upper}, {path: lower.jsonl, name: lower}]",
    "algorithm.teachers=[{path: x, data_sets: [lower]}, {path: y, data_sets: [upper]}]",
)  # fmt: skip


def data_sets_fit(rollouts) -> bool:
    """Return whether the data set of each prompt is the one that has it, and the step has prompts of both."""
    is_lower = rollouts["input_ids"][:, 0] >= ord("a")
    return torch.equal(rollouts.facts["data_set"], is_lower.int()) and 0 < is_lower.sum() < len(is_lower)


@pytest.fixture
def of_two_files(monkeypatch, made):
    """What `made` is, with a mixture of prompts in upper and in lower case."""
    monkeypatch.setattr(
        training_data, "build_source",
        lambda stage: Problems(Echo(prompts=tuple("ABCD" if stage.data.path == "upper.jsonl" else "abcd"))),
    )  # fmt: skip
    return made


@pytest.mark.parametrize("age", [AGE_0, AGE_1])
def test_completions_have_the_data_sets_of_their_prompts(of_two_files, age):
    sampler, stage, _ = of_two_files(age, *MIXED, "rollout.save_every=1")
    for step in (1, 2):
        rollouts, _ = sampler.collect(step)
        assert data_sets_fit(rollouts)
        rollouts["advantages"] = torch.zeros(rollouts["input_ids"].shape)
        sampler.keep(step, rollouts)
    replay = f"rollout.replay={stage.rollout_files}"
    assert data_sets_fit(of_two_files(*MIXED, replay)[0].collect(2)[0])
    renamed = [option.replace("upper]", "capitals]").replace("name: upper", "name: capitals") for option in MIXED]
    with pytest.raises(ConfigError, match="step 2 has samples of the data set 'upper', which data.mix=.'capitals',"):
        of_two_files(*renamed, replay)[0].collect(2)


def test_completions_of_a_failed_group_have_a_data_set(of_two_files, monkeypatch):
    async def fails_for_a(client, record, sampling):
        if client.prompt.ids[0] in b"aA":
            raise OSError("the world has ended")
        return await completion(client, record, sampling)

    rules, ranks = RolloutRules(NO_LIMITS, fails_run=False), Ranks()
    monkeypatch.setattr(
        fakes, "runner_of_completions", lambda: RolloutRunner(fails_for_a, rules, Characters(), ranks, 60.0)
    )
    sampler, _, _ = of_two_files(AGE_0, *MIXED, "algorithm.prompts_per_step=8", "rollout.on_failure=mask_group")
    rollouts, _ = sampler.collect(1)
    assert rollouts["sample_mask"].sum() == 6 * SIZE and data_sets_fit(rollouts)


def test_a_group_of_failures_is_replaced_and_counted(made, monkeypatch):
    """It is the only group that dynamic sampling drops, and has no sample whose reward could be compared."""
    failures = [OSError("the world has ended")] * SIZE

    async def fails_at_first(client, record, sampling):
        if failures:
            raise failures.pop()
        return await completion(client, record, sampling)

    rules, ranks = RolloutRules(NO_LIMITS, fails_run=False), Ranks()
    monkeypatch.setattr(
        fakes, "runner_of_completions", lambda: RolloutRunner(fails_at_first, rules, Characters(), ranks, 60.0)
    )
    sampler, _, engine = made("algorithm.dynamic_sampling=true", "rollout.on_failure=mask_group")
    engine.answers = cycle("01")
    rollouts, outcome = sampler.collect(1)
    assert rollouts.trajectories.num_trajectories == PER_STEP * SIZE and rollouts["sample_mask"].all()
    assert outcome["failed_trajectories"] == SIZE and outcome["dropped_groups"] == 1
    assert outcome["reward"] == 0.5 and not failures


def test_a_resumed_sampler_continues_with_the_groups_that_are_left(made):
    sampler, stage, _ = made()
    sampler.collect(1)
    state = stage.kept["sampler"].state_dict()
    wanted, _ = sampler.collect(2)
    resumed, stage, _ = made()
    stage.policy.model.version = 5
    stage.kept["sampler"].load_state_dict(state)
    assert stage.policy.weight_version == 1, "the log continues with the same versions"
    found, _ = resumed.collect(2)
    assert torch.equal(found["input_ids"], wanted["input_ids"])
    first, _ = made()[0].collect(1)
    assert not torch.equal(first["input_ids"], wanted["input_ids"])


def test_a_step_of_the_log_is_learned_from_again_and_not_written_again(made):
    sampler, stage, _ = made()
    wanted, metrics = sampler.collect(1)
    wanted["advantages"] = torch.zeros(wanted["input_ids"].shape)
    sampler.keep(1, wanted)
    files = {path: path.read_bytes() for path in stage.rollout_files.iterdir()}
    assert {path.name for path in files} == {"log.jsonl", "step-000001.parquet"}
    resumed, _, engine = made()
    found, again = resumed.collect(1)
    assert torch.equal(found["input_ids"], wanted["input_ids"]) and again == metrics and not engine.asked
    resumed.keep(1, found)
    assert files == {path: path.read_bytes() for path in stage.rollout_files.iterdir()}


def test_a_step_that_makes_its_own_rounds_continues_with_the_seed_of_the_checkpoint(made):
    sampler, _, _ = made(AGE_0)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    with pytest.raises(ConfigError, match=f"next_seed is 7 in the checkpoint, and {state['next_seed']} now"):
        sampler.load_state_dict({"next_seed": 7})
