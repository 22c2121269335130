"""A whole batch: what every rank knows of it, and its padding sequences."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.microbatch import PADDING


def values() -> dict:
    return {
        "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0]]), "input_lengths": torch.tensor([3, 2, 1]),
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0], [1, 0, 0]]), "sample_mask": torch.ones(3),
        "rewards": torch.tensor([0.5, 1.5, 2.5]), "names": ["a", "b", "c"], "trajectory": torch.tensor([4, 4, 7]),
    }  # fmt: skip


def test_padding_sequences_repeat_the_first_of_their_step_without_weight_wherever_they_lie():
    found = Batch.from_whole(values()).take_sequences([PADDING, 2, PADDING], width=2, first=1)
    assert found["input_ids"].tolist() == [[4, 5], [6, 0], [4, 5]]
    assert found["names"] == ["b", "c", "b"] and found["rewards"].tolist() == [1.5, 2.5, 1.5]
    assert found["input_lengths"].tolist() == [1, 1, 1] and found["sample_mask"].tolist() == [0, 1, 0]
    assert found["token_mask"].tolist() == [[0, 0], [1, 0], [0, 0]]


def test_facts_are_those_of_all_sequences_and_the_callers_dictionary_stays():
    given = values()
    batch = Batch.from_whole(given)
    facts = {name: fact.tolist() for name, fact in batch.facts.items()}
    assert facts == {
        "input_lengths": [3, 2, 1], "rewards": [0.5, 1.5, 2.5], "trajectory": [0, 0, 1], "sampled_tokens": [2, 1, 1],
        "sample_mask": [True] * 3,
    }  # fmt: skip
    assert batch["trajectory"].tolist() == [0, 0, 1] and given["trajectory"].tolist() == [4, 4, 7]
    without = Batch.from_whole({"input_ids": given["input_ids"]})
    assert without.lengths.tolist() == [3, 3, 3] and without.is_whole and without.ranks.is_alone


def test_sequences_that_disagree_on_their_number_are_refused():
    with pytest.raises(ValueError, match="keys disagree on the number of sequences"):
        Batch.from_whole(values() | {"rewards": torch.ones(2)})
