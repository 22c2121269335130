"""Warnings of loss spikes, reward collapses and equal rewards: they come when they should, and not otherwise."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.config.loading.load import load_config
from rl_megatron.runs.anomalies import Anomalies, describe_sequences
from tests.unit.algorithms.fakes import Characters

TRAIN = load_config([]).first.train


def warnings_of(losses=(), rewards=(), samples=(), **keys):
    """Return the warnings of a run, as (step, words)."""
    anomalies, found = Anomalies(replace(TRAIN, **keys)), []
    for step in range(1, max(map(len, (losses, rewards, samples))) + 1):
        metrics = {name: series[step - 1] for name, series in (("loss", losses), ("reward", rewards)) if series}
        found += [(step, what) for what in anomalies.check_step(step, metrics, samples[step - 1] if samples else None)]
    return found


def falling(steps, noise=0.1, seed=0):
    """Return a loss that falls from 6 to 2 with noise, as in pretraining."""
    generator = random.Random(seed)
    return [2 + 4 * math.exp(-step / 30) + generator.gauss(0, noise) for step in range(steps)]


def rising(steps, noise=0.08, seed=0):
    """Return a reward that rises from 0 to 0.8 with noise, and never leaves [0, 1]."""
    generator = random.Random(seed)
    return [min(1.0, max(0.0, 0.8 * (1 - math.exp(-step / 60)) + generator.gauss(0, noise))) for step in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_usual_curves_give_no_warning(seed):
    assert warnings_of(losses=falling(400, seed=seed)) == []
    assert warnings_of(losses=[random.Random(seed).gauss(0, 0.02) for _ in range(400)]) == [], "a policy gradient"
    assert warnings_of(rewards=rising(400, seed=seed)) == []
    few = random.Random(seed)
    assert warnings_of(rewards=[few.choice([0, 0, 0, 1 / 16, 2 / 16]) for _ in range(400)]) == [], "rare rewards"
    assert warnings_of(losses=[0.0] * 40 + [0.02, -0.02] * 40) == [], "no gradient, and then a small one"


def test_a_loss_spike_is_reported_at_its_step():
    losses = falling(200)
    losses[150] = 9.0
    ((step, words),) = warnings_of(losses=losses)
    assert step == 151 and words.startswith("the loss 9 is a spike: the median of the 50 steps before is 2.")


def test_a_kind_is_reported_once_in_a_window():
    losses = falling(300)
    for index in (100, 101, 120, 149, 150, 260):
        losses[index] = 50.0
    assert [step for step, _ in warnings_of(losses=losses)] == [101, 151, 261]


def test_a_threshold_and_the_window_decide():
    losses = falling(200)
    losses[150] = 9.0
    assert warnings_of(losses=losses, loss_spike_deviations=100.0) == []
    assert warnings_of(losses=losses, anomaly_window=0) == []
    early = falling(200)
    early[5] = 50.0
    assert warnings_of(losses=early) == [], "there is nothing to compare with yet"


def test_a_reward_that_falls_to_a_fraction_has_collapsed():
    rewards = rising(200) + [0.05] * 10
    ((step, words),) = warnings_of(rewards=rewards)
    assert step == 203, "three of the last five steps are low"
    assert words.startswith("the reward has collapsed: the median of the last 5 steps is 0.05")
    assert warnings_of(rewards=rewards, reward_collapse_fraction=0.01) == []
    assert len(warnings_of(rewards=[-1 + 0.01 * value for value in rewards[:200]] + [-2.0] * 10)) == 1


def test_one_low_reward_is_no_collapse():
    rewards = rising(200)
    rewards[150] = 0.0
    assert warnings_of(rewards=rewards) == []


def test_rewards_that_are_all_equal_are_reported_after_some_steps():
    equal, different = torch.zeros(8), torch.tensor([0.0, 1.0])
    ((step, words),) = warnings_of(samples=[different, *[equal] * 12])
    assert step == 11 and words.startswith("all rewards are 0 in 10 steps in a row")
    assert warnings_of(samples=[equal, equal, different] * 10, equal_rewards_steps=3) == []
    assert warnings_of(samples=[torch.zeros(1)] * 30) == [], "one sample has nothing to differ from"


def batch_of(texts, **more):
    ids = torch.zeros(len(texts), 100, dtype=torch.long)
    for index, text in enumerate(texts):
        ids[index, : len(text)] = torch.tensor([ord(character) for character in text])
    return Batch.from_whole({"input_ids": ids, "input_lengths": torch.tensor([len(text) for text in texts]), **more})


def test_sequences_are_named_by_place_data_and_beginning():
    batch = batch_of(["one", "two\nlines", "x" * 90])
    shown = describe_sequences(batch, Characters(), lambda: ["a.jsonl:4", "", "a.jsonl:9"])
    assert shown == f"sequences 0 (a.jsonl:4): 'one', 1: 'two lines', 2 (a.jsonl:9): '{'x' * 59}…'"
    assert describe_sequences(Batch.from_whole(batch_of(list("abcdefgh"))), Characters(), list).endswith(
        "5: 'f' and 2 more"
    )


def test_of_rollouts_each_prompt_is_named_once():
    batch = batch_of(["1+1=2", "1+1=3", "2+2=4", "2+2=5"], prompt_lengths=torch.tensor([4, 4, 4, 4]))
    locations = SimpleNamespace()  # never called
    assert describe_sequences(batch, Characters(), locations) == "samples of prompts 0: '1+1=', 2: '2+2='"
