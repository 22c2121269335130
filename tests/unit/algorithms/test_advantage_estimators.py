"""Advantage estimators: registered ones, and a user's function by import string."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.algorithms.advantage_estimators import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantagesFailed,
    estimate_advantages,
    register_advantage,
)
from rl_megatron.algorithms.advantages import group_relative
from rl_megatron.config.advantages import ESTIMATORS, OPTIONS
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


class Watched(AdvantageInputs):
    """Inputs that note which of them are read."""

    def __init__(self, *args, **options):
        self.read = set()
        super().__init__(*args, **options)

    def __getattribute__(self, name):
        if not name.startswith("_") and name not in ("read", "index"):
            self.read.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_estimator_is_declared_and_reads_what_is_declared(rollouts, name):
    rollouts |= {"component_reward.exact": rollouts["rewards"], "input_ids": torch.zeros(4, 4, dtype=torch.long)}
    inputs = Watched(rollouts, 2)
    ADVANTAGES[name](inputs)
    declared = ESTIMATORS[name]
    assert inputs.read & {"token_rewards", "component_rewards", "rollouts", *OPTIONS} == declared.reads
    assert declared.least_samples == (2 if "group_size" in inputs.read else 1)
    of_samples = inputs.read <= {"rewards", "group_size", "sample_mask", *OPTIONS}
    assert declared.together == ("sequence" if of_samples else "group" if "group_size" in inputs.read else "trajectory")


def test_the_advantages_of_samples_are_those_of_their_tokens(estimator, rollouts):
    mine = estimator("def mine(inputs):\n    return inputs.rewards * inputs.group_size + inputs.normalize_std\n")
    found = estimate_advantages(whole(rollouts), mine, build_loss("clipped_pg"))
    assert torch.equal(found, (rollouts["rewards"] * 2 + 1)[:, None] * rollouts["token_mask"])


def test_a_function_of_tokens_gets_the_reward_at_the_last_and_may_return_anything_at_masked_ones(estimator, rollouts):
    mine = estimator("def mine(inputs):\n    return inputs.token_rewards + 1 / inputs.token_mask\n")
    assert estimate_advantages(whole(rollouts), mine, build_loss("clipped_pg"))[0].tolist() == [0.0, 1.0, 2.0, 0.0]


def test_the_default_is_group_relative(rollouts):
    settings = load_config(["algorithm=grpo", "algorithm.samples_per_prompt=2"]).first.algorithm
    found = estimate_advantages(whole(rollouts), settings, build_loss("clipped_pg"))
    assert torch.equal(found, group_relative(rollouts["rewards"], 2)[:, None] * rollouts["token_mask"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def mine(rewards): ...",
            r"mine.py:mine takes \(rewards\); an advantage .* one argument, \(inputs\), .*inputs.rew",
        ),
        ("def mine(rewards, group_size): ...", r"mine.py:mine takes \(rewards, group_size\); .* takes one argument"),
        ("def mine(inputs, other): ...", r"mine.py:mine takes \(inputs, other\); .* takes one argument"),
        ("def mine(**others): ...", r"mine.py:mine takes \(\*\*others\); .* takes one argument"),
        ("def mine(*, inputs): ...", r"mine.py:mine takes \(\*, inputs\); .* takes one argument"),
        ("class mine: ...", "mine.py:mine is a class; an advantage estimator is a function"),
        ("def other(inputs): ...", "mine.py has no 'mine'"),
    ],
)
def test_a_function_that_does_not_suit_is_refused_when_the_configuration_is_loaded(estimator, code, message):
    with pytest.raises(ConfigError, match=message):
        estimator(code)


def test_a_function_may_have_further_parameters_with_defaults_and_may_read_every_key(estimator, rollouts):
    keys = ["algorithm.leave_one_out=true", "loss.use_kl_in_reward=true", "rollout.on_failure=mask_sample"]
    code = "def mine(inputs, scale=2):\n    return scale * inputs.rewards * inputs.leave_one_out\n"
    found = estimate_advantages(whole(rollouts), estimator(code, *keys), build_loss("clipped_pg"))
    assert torch.equal(found, 2 * rollouts["rewards"][:, None] * rollouts["token_mask"])


def test_a_plugin_registers_a_function_of_the_inputs():
    with pytest.raises(ConfigError, match=r"advantage estimator 'old' takes \(rewards\); an advantage"):
        register_advantage("old")(lambda rewards: rewards)
    register_advantage("new")(lambda inputs: inputs.rewards)
    try:
        assert load_config(["algorithm=grpo", "algorithm.advantage_estimator=new"]).first.algorithm.least_samples == 1
    finally:
        del ADVANTAGES["new"], ESTIMATORS["new"]


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="no advantage estimator 'group_relativ'; did you mean 'group_relative'"):
        load_config(["algorithm=grpo", "algorithm.advantage_estimator=group_relativ"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("inputs.rewards.sum()", r"mine.py:mine returned \(\); it must return a tensor \(4,\) or \(4, 4\)$"),
        ("7", r"mine.py:mine returned int; it must"),
        ("inputs.rewards / 0", "returned advantages that are not finite"),
        ("{}['x']", r"raised KeyError: 'x' \(.*mine.py:2\)"),
    ],
)
def test_a_wrong_result_is_named_and_ends_the_run_with_status_1(estimator, rollouts, body, message):
    mine = estimator(f"def mine(inputs):\n    return {body}\n")
    with pytest.raises(AdvantagesFailed, match=message):
        estimate_advantages(whole(rollouts), mine, build_loss("clipped_pg"))
    assert issubclass(AdvantagesFailed, RunFailed)


def test_a_function_gets_the_scores_of_each_reward_function_with_their_weights(estimator, rollouts):
    code = """
def mine(inputs):
    return sum(inputs.component_weights[name] * scores for name, scores in inputs.component_rewards.items())
"""
    functions = "reward.functions=[{name: exact_match, label: exact, weight: 0.5}]"
    config = load_config(["algorithm=grpo", functions]).first
    rollouts |= {
        "component_reward.exact": torch.tensor([2.0, 4.0, 0.0, 8.0]),
        "component_reward.environment": torch.tensor([0.0, 1.0, 0.0, 0.0]),
    }
    mine = estimator(code)
    assert mine.reads_components and not config.algorithm.reads_components
    found = estimate_advantages(whole(rollouts), mine, build_loss("clipped_pg"), config.reward)
    assert torch.equal(found, torch.tensor([1.0, 3.0, 0.0, 4.0])[:, None] * rollouts["token_mask"])
