"""GRPO's collection of rollouts, step by step, with an engine that gives scripted answers."""

from types import SimpleNamespace

import pytest

from rl_megatron.algorithms.advantage_estimators import estimate_advantages
from rl_megatron.algorithms.grpo import grpo
from rl_megatron.algorithms.on_policy_distillation import on_policy_distillation
from rl_megatron.algorithms.teachers import Teachers
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.data import training_data
from rl_megatron.data.order import ShuffledEpochs
from rl_megatron.timing import use_timer
from tests.unit.algorithms.fakes import (
    ONE_RANK,
    Characters,
    Echo,
    Problems,
    ScoredHere,
    Scripted,
    decoded,
    sampling,
)

SIZE = 2
DIFFER, EQUAL = ["1", "0"], ["1", "1"]


@pytest.fixture
def collecting(monkeypatch):
    """`collecting(answers, *overrides)`: (collect, engine), the engine answering each prompt with its next answer."""

    def make(answers, *overrides):
        config = load_config(
            ["algorithm=grpo", "algorithm.prompts_per_step=2", f"algorithm.samples_per_prompt={SIZE}", *overrides]
        ).first
        monkeypatch.setattr(training_data, "build_source", lambda stage: Problems(Echo()))
        engine = Scripted({prompt: list(texts) for prompt, texts in answers.items()})
        _, _, sampler = sampling(config, engine, ScoredHere(Echo()))
        return sampler.collect, engine

    return make


def always(texts, repeats=40):
    return {prompt: list(texts) * repeats for prompt in "abcd"}


def test_a_step_takes_one_round_without_dynamic_sampling(collecting):
    collect, engine = collecting(always(EQUAL))
    rollouts, outcome = collect(1)
    assert len(engine.calls) == 1
    assert rollouts.size == 4
    assert outcome["informative_groups"] == 0.0
    assert "sampling_rounds" not in outcome


def test_prompts_and_seeds_depend_on_the_step_alone(collecting):
    first, engine = collecting(always(DIFFER))
    for step in (1, 2, 3):
        first(step)
    again, later = collecting(always(DIFFER))
    again(3)
    assert later.calls == engine.calls[2:]
    assert len({seed for _, seed in engine.calls}) == 3
    other, seeded = collecting(always(DIFFER), "train.seed=1")
    other(1)
    assert seeded.calls[0][1] not in {seed for _, seed in engine.calls}


def test_an_epoch_sees_every_problem(collecting):
    collect, engine = collecting(always(DIFFER))
    collect(1), collect(2)
    assert {prompt for words, _ in engine.calls for prompt in words} == set("abcd")


def test_dynamic_sampling_samples_until_the_step_is_full(collecting):
    """Only "a" and "c" ever differ: of the two rounds that see all four prompts, one group each is kept."""
    answers = always(EQUAL) | {"a": DIFFER * 40, "c": DIFFER * 40}
    collect, engine = collecting(answers, "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=4")
    rollouts, outcome = collect(1)
    assert rollouts.size == 4
    assert {chr(ids[0]) for ids in rollouts["input_ids"].tolist()} <= {"a", "c"}
    assert sorted(decoded(rollouts, Characters())) == ["0", "0", "1", "1"]
    assert outcome["sampling_rounds"] == len(engine.calls) <= 4
    assert outcome["informative_groups"] == pytest.approx(2 / (2 * len(engine.calls))), "of all that were sampled"
    assert len({seed for _, seed in engine.calls}) == len(engine.calls)


def test_dynamic_sampling_stops_as_soon_as_the_step_is_full(collecting):
    collect, engine = collecting(always(DIFFER), "algorithm.dynamic_sampling=true")
    rollouts, outcome = collect(1)
    assert rollouts.size == 4
    assert outcome["sampling_rounds"] == len(engine.calls) == 1
    assert outcome["informative_groups"] == 1.0


def test_dynamic_sampling_stops_after_its_rounds_with_the_groups_it_has(collecting):
    answers = always(EQUAL) | {"a": DIFFER * 40}
    collect, engine = collecting(answers, "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=2")
    rollouts, outcome = collect(1)
    assert outcome["sampling_rounds"] == len(engine.calls) == 2
    assert rollouts.size == 2
    assert {chr(ids[0]) for ids in rollouts["input_ids"].tolist()} == {"a"}


def test_a_step_without_any_informative_group_still_has_rollouts_and_no_gradient(collecting):
    collect, _ = collecting(always(EQUAL), "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=3")
    rollouts, outcome = collect(1)
    assert outcome["sampling_rounds"] == 3
    assert outcome["informative_groups"] == 0.0
    assert rollouts.size == 4
    assert estimate_advantages(rollouts, GRPOConfig(samples_per_prompt=SIZE), None).count_nonzero() == 0


def test_steps_do_not_share_rounds(collecting):
    """The prompts and seeds of a step's rounds do not depend on how many rounds the steps before took."""
    options = "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=3"
    eager, engine = collecting(always(DIFFER), *options)
    eager(1), eager(2)
    slow, slow_engine = collecting(always(EQUAL), *options)
    slow(1), slow(2)
    assert slow_engine.calls[0] == engine.calls[0]
    assert slow_engine.calls[3] == engine.calls[1]
    assert len({seed for _, seed in slow_engine.calls}) == 6
    order = ShuffledEpochs(4, seed=0)
    assert [words[::SIZE] for words, _ in slow_engine.calls] == [
        ["abcd"[i] for i in order.items(2 * n, 2)] for n in range(6)
    ]


def policy_with_a_reference():
    """Return a policy that gives every sampled token e^-1, and whose reference gives it e^-1.5."""
    return SimpleNamespace(
        weight_version=1,
        topology=ONE_RANK,
        distribute=lambda batch, groups=None: batch,
        freeze_reference=lambda: None,
        get_logprobs=lambda batch: {"logprobs": -1.0 * batch["token_mask"]},
        get_reference_policy_logprobs=lambda batch: {"reference_logprobs": -1.5 * batch["token_mask"]},
    )


def test_the_kl_in_the_reward_is_recorded(monkeypatch):
    overrides = ["algorithm=grpo", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2"]
    overrides += ["algorithm.advantage_estimator=reinforce_plus_plus", "loss.use_kl_in_reward=true"]
    monkeypatch.setattr(training_data, "build_source", lambda stage: Problems(Echo()))
    records = []
    config = load_config([*overrides, "loss.reference_policy_kl_type=k1"]).first
    loop, policy, sampler = sampling(
        config,
        Scripted(dict.fromkeys("abcd", DIFFER * 2)),
        ScoredHere(Echo()),
        policy=policy_with_a_reference(),
        steps=lambda: [1],
        train=lambda step, rollouts, loss_fn: {"loss": 1.0},
        record=lambda step, report: records.append(report),
    )
    with use_timer(loop.timer):
        grpo(loop, policy, sampler, config.algorithm)
    assert records[0]["reward_kl"] == 0.5
    phases = [path[0] for path in loop.timer.collect().seconds if path]
    assert phases == ["environment", "reward", "logprobs", "reference", "advantages"]


@pytest.mark.parametrize("name", ["grpo", "on_policy_distillation"])
def test_the_engine_releases_its_memory_before_the_policy_learns(monkeypatch, name):
    monkeypatch.setattr(training_data, "build_source", lambda stage: Problems(Echo()))
    teachers = SimpleNamespace(find_whole_teacher=lambda loss_fn: None, add_topk=lambda batch, loss_fn: batch)
    monkeypatch.setattr(Teachers, "load", lambda *arguments: teachers)
    done, sizes = [], ["algorithm.prompts_per_step=2", f"algorithm.samples_per_prompt={SIZE}"]
    more = ["loss=distillation", "algorithm.teachers=[{path: teacher}]"] if name == "on_policy_distillation" else []
    engine = Scripted(always(DIFFER))
    monkeypatch.setattr(engine, "sleep", lambda: done.append("sleep"), raising=False)
    config = load_config([f"algorithm={name}", *sizes, *more]).first
    loop, policy, sampler = sampling(
        config,
        engine,
        ScoredHere(Echo()),
        policy=policy_with_a_reference(),
        steps=lambda: [1, 2],
        train=lambda step, rollouts, loss_fn, **options: done.append("train") or {"loss": 1.0},
        record=lambda step, report: None,
    )
    train = {"grpo": grpo, "on_policy_distillation": on_policy_distillation}[name]
    train(loop, policy, sampler, config.algorithm)
    assert done == ["sleep", "train"] * 2
