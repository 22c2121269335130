"""The reference point of KTO, the balance of labels, and the evaluation on held-out answers."""

import re
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.algorithms.kto import (
    HeldoutLabelled,
    add_reference_point,
    describe_imbalance,
    estimate_reference_point,
    mismatch_answers,
)
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.losses import KTOLossConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.ranks import Ranks
from tests.unit.algorithms.fakes import ONE_RANK


def answers():
    """Three sequences, with prompts of 1, 2 and 3 tokens, and answers of 3, 1 and 2."""
    return BatchedDataDict(
        input_ids=torch.tensor([[10, 11, 12, 13, 0], [20, 21, 22, 0, 0], [30, 31, 32, 33, 34]]),
        input_lengths=torch.tensor([4, 3, 5]),
        token_mask=torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]]).float(),
        sample_mask=torch.ones(3),
        desirable=torch.tensor([1.0, 0.0, 1.0]),
    )


class Policy:
    """A policy whose logprob of a token is `factor` times its id. Its reference has the factor `reference_factor`."""

    reference = "itself"
    topology = ONE_RANK

    def __init__(self, factor=0.01, reference_factor=0.0):
        self.factor, self.reference_factor, self.asked = factor, reference_factor, []

    def get_logprobs(self, batch):
        self.asked.append(batch)
        return {"logprobs": self.factor * batch["input_ids"].float()}

    def get_reference_policy_logprobs(self, batch):
        return {"reference_logprobs": self.reference_factor * batch["input_ids"].float()}

    def train(self, batch, loss_fn, **_):
        return {"loss": batch["sample_mask"].sum().item()}


def test_a_prompt_gets_the_answer_of_the_sequence_before_it_as_in_trl():
    """TRL: KL_completion_ids = [completion_ids[-1]] + completion_ids[:-1]."""
    pairs = mismatch_answers(answers(), pad_id=9, max_length=5)
    assert pairs["input_ids"].tolist() == [[10, 33, 34, 9, 9], [20, 21, 11, 12, 13], [30, 31, 32, 22, 9]]
    assert pairs["token_mask"].tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 1, 0]]
    assert pairs["input_lengths"].tolist() == [3, 5, 4] and pairs["sample_mask"].tolist() == [1, 1, 1]


def test_mismatched_sequences_are_cut_at_the_models_length():
    pairs = mismatch_answers(answers(), pad_id=9, max_length=4)
    assert pairs["input_ids"].tolist() == [[10, 33, 34, 9], [20, 21, 11, 12], [30, 31, 32, 22]]
    assert pairs["token_mask"][1].tolist() == [0, 0, 1, 0]


def test_the_reference_point_is_the_mean_over_mismatched_answers_but_at_least_0():
    expected = ((0.33 + 0.34) + (0.11 + 0.13) + 0.22) / 3
    assert estimate_reference_point(answers(), Policy(), 9, 5, Ranks()) == pytest.approx(expected)
    assert estimate_reference_point(answers(), Policy(-0.01), 9, 5, Ranks()) == 0.0


def test_every_sequence_of_the_batch_gets_the_same_point_and_count():
    batch = answers()
    batch["sample_mask"][0] = 0.0
    batch = add_reference_point(batch, Policy(), 9, 5, Ranks())
    point = estimate_reference_point(answers(), Policy(), 9, 5, Ranks())
    assert batch["reference_point"].tolist() == pytest.approx([point] * 3)
    assert batch["num_desirable"].tolist() == [1.0] * 3
    assert batch["reference_policy_logprobs"].shape == batch["input_ids"].shape


@pytest.mark.parametrize(
    ("counts", "weights", "words"),
    [
        ((50, 50), {}, None),
        ((4, 3), {}, None),
        ((90, 10), {"undesirable_weight": 8.0}, None),
        ((50, 50), {"undesirable_weight": 0.0}, None),
        ((90, 10), {}, "90 desirable and 10 undesirable answers .* set loss.desirable_weight to 0.111 … 0.148"),
        ((10, 90), {}, "set loss.desirable_weight to 9 … 12"),
        ((7, 0), {}, "all 7 answers are desirable; .* with undesirable answers"),
        ((0, 7), {}, "all 7 answers are undesirable; .* with desirable answers"),
    ],
)
def test_labels_of_very_different_influence_are_warned_about(counts, weights, words):
    found = describe_imbalance(*counts, KTOLossConfig(**weights))
    if words is None:
        assert found is None
    else:
        assert re.search(words, found), found


def test_held_out_answers_are_compared_with_the_reference_point():
    """The rewards are 0.24, 0.22 and 0.67, and the point is 0.3767: the first is desirable and below it."""
    found, _ = HeldoutLabelled(answers(), 9, 5).evaluate(Policy())
    assert found == {"nll_per_token": 2.0, "label_accuracy": pytest.approx(2 / 3)}
    preferred_by_reference, _ = HeldoutLabelled(answers(), 9, 5).evaluate(Policy(0.01, 0.02))
    assert preferred_by_reference["label_accuracy"] == pytest.approx(1 / 3)
    without = Policy()
    without.reference = None
    assert HeldoutLabelled(answers(), 9, 5).evaluate(without)[0] == {"nll_per_token": 2.0}


def test_held_out_answers_without_a_desirable_one_are_refused():
    batch = answers()
    batch["desirable"] = torch.zeros(3)
    stage = SimpleNamespace(model=SimpleNamespace(max_sequence_length=5))
    with pytest.raises(ConfigError, match="none of the 3 held-out answers is desirable"):
        HeldoutLabelled.from_stage(stage, SimpleNamespace(batch=batch), SimpleNamespace(pad_id=0))
