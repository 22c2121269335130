"""Advantage estimators: registered ones, and a user's function by import string."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.algorithms.advantage_estimators import ADVANTAGES, AdvantagesFailed, estimated_advantages
from rl_megatron.algorithms.advantages import group_relative
from rl_megatron.config.advantages import ESTIMATORS, parameters_of
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from tests.unit.algorithms.fakes import whole


@pytest.fixture
def rollouts():
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]]).float()
    return BatchedDataDict({"rewards": torch.tensor([1.0, 0.0, 0.5, 0.5]), "token_mask": mask})


@pytest.fixture
def estimator(tmp_path, monkeypatch):
    """`estimator(code, *overrides)`: GRPO's settings with the function `mine` of a file with this code."""
    monkeypatch.chdir(tmp_path)

    def load(code, *overrides):
        (tmp_path / "mine.py").write_text(code)
        chosen = ["algorithm=grpo", "algorithm.samples_per_prompt=2", "algorithm.advantage_estimator=mine.py:mine"]
        return load_config([*chosen, *overrides]).first.algorithm

    return load


def test_the_declared_parameters_are_those_of_the_registered_functions():
    assert set(ADVANTAGES) == set(ESTIMATORS)
    assert all(parameters_of(ADVANTAGES[name], name) == ESTIMATORS[name] for name in ADVANTAGES)


def test_the_advantages_of_samples_are_those_of_their_tokens(estimator, rollouts):
    mine = estimator("def mine(rewards, group_size, normalize_std):\n    return rewards * group_size + normalize_std\n")
    found = estimated_advantages(whole(rollouts), mine, build_loss("clipped_pg"))
    assert torch.equal(found, (rollouts["rewards"] * 2 + 1)[:, None] * rollouts["token_mask"])


def test_a_function_of_tokens_gets_the_reward_at_the_last_and_may_return_anything_at_masked_ones(estimator, rollouts):
    mine = estimator("def mine(token_rewards, **others):\n    return token_rewards + 1 / others['token_mask']\n")
    assert estimated_advantages(whole(rollouts), mine, build_loss("clipped_pg"))[0].tolist() == [0.0, 1.0, 2.0, 0.0]


def test_the_default_is_group_relative(rollouts):
    settings = load_config(["algorithm=grpo", "algorithm.samples_per_prompt=2"]).first.algorithm
    found = estimated_advantages(whole(rollouts), settings, build_loss("clipped_pg"))
    assert torch.equal(found, group_relative(rollouts["rewards"], 2)[:, None] * rollouts["token_mask"])


@pytest.mark.parametrize(
    ("code", "overrides", "message"),
    [
        ("def mine(values): ...", [], "mine.py:mine needs 'values', which it will not get; .*token_rewards"),
        ("class mine: ...", [], "mine.py:mine is a class; an advantage estimator is a function"),
        ("def mine(rewards): ...", ["algorithm.leave_one_out=true"], "algorithm.leave_one_out=true has no effect"),
        ("def mine(rewards): ...", ["loss.use_kl_in_reward=true"], "loss.use_kl_in_reward=true has no effect: alg"),
        ("def mine(rewards, group_size): ...", ["algorithm.samples_per_prompt=1"], "samples_per_prompt=1 leaves"),
        ("def other(rewards): ...", [], "mine.py has no 'mine'"),
    ],
)
def test_a_function_that_does_not_suit_is_refused_when_the_configuration_is_loaded(estimator, code, overrides, message):
    with pytest.raises(ConfigError, match=message):
        estimator(code, *overrides)


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="no advantage estimator 'group_relativ'; did you mean 'group_relative'"):
        load_config(["algorithm=grpo", "algorithm.advantage_estimator=group_relativ"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("rewards.sum()", r"mine.py:mine returned \(\); it must return a tensor \(4,\)$"),
        ("7", r"mine.py:mine returned int; it must"),
        ("rewards / 0", "returned advantages that are not finite"),
        ("{}['x']", r"raised KeyError: 'x' \(.*mine.py:2\)"),
    ],
)
def test_a_wrong_result_is_named_and_ends_the_run_with_status_1(estimator, rollouts, body, message):
    mine = estimator(f"def mine(rewards):\n    return {body}\n")
    with pytest.raises(AdvantagesFailed, match=message):
        estimated_advantages(whole(rollouts), mine, build_loss("clipped_pg"))
    assert issubclass(AdvantagesFailed, RunFailed)


def test_a_function_gets_the_scores_of_each_reward_function_with_their_weights(estimator, rollouts):
    code = """
def mine(component_rewards, component_weights):
    return sum(component_weights[name] * scores for name, scores in component_rewards.items())
"""
    functions = "reward.functions=[{name: exact_match, label: exact, weight: 0.5}]"
    config = load_config(["algorithm=grpo", functions]).first
    rollouts |= {
        "component_reward.exact": torch.tensor([2.0, 4.0, 0.0, 8.0]),
        "component_reward.environment": torch.tensor([0.0, 1.0, 0.0, 0.0]),
    }
    mine = estimator(code)
    assert mine.reads_components and not config.algorithm.reads_components
    found = estimated_advantages(whole(rollouts), mine, build_loss("clipped_pg"), config.reward)
    assert torch.equal(found, torch.tensor([1.0, 3.0, 0.0, 4.0])[:, None] * rollouts["token_mask"])
