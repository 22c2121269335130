"""The microbatches of a rank.

Every sequence is in one microbatch, all ranks have as many microbatches, groups stay whole, and padding sequences have
zero loss weight.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.microbatch import PADDING, StepPlan
from rl_megatron.batching.rank_plan import RankPlan, sequence_lengths
from rl_megatron.batching.step_microbatches import plan_microbatches, plan_step
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.token_keys import declare_token_keys

LENGTHS = [9, 3, 12, 1, 7, 7, 2]
WIDTH = 12


def topology(data: int = 1, context: int = 1, tensor: int = 1):
    multiple = (2 * context if context > 1 else 1) * tensor
    return SimpleNamespace(data=data, context=context, sequence=tensor > 1, sequence_multiple=multiple)


def batch(lengths=LENGTHS) -> BatchedDataDict:
    sequences = torch.arange(len(lengths))
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).float()
    return BatchedDataDict(
        input_ids=sequences[:, None] * 100 + torch.arange(WIDTH), input_lengths=torch.tensor(lengths),
        token_mask=mask, sample_mask=torch.ones(len(lengths)),
    )  # fmt: skip


def plan_whole(values, batching: Batching, data: int = 1, rank: int = 0, group_size: int = 1, **degrees) -> StepPlan:
    return plan_step(
        Batch.from_whole(values), 0, len(values["input_ids"]), batching, topology(data, **degrees), rank, group_size
    )


def plans(batching: Batching, data: int = 1, lengths=LENGTHS, **options) -> list[RankPlan]:
    values = batch(lengths)
    steps = [plan_whole(values, batching, data, rank, **options) for rank in range(data)]
    return [plan_microbatches(Batch.from_whole(values), step) for step in steps]


KINDS = [Batching("padded", sequences=2), Batching("dynamic", tokens=16), Batching("packed", tokens=16)]


@pytest.mark.parametrize("data", [1, 2, 3])
@pytest.mark.parametrize("batching", KINDS, ids=lambda b: b.kind)
def test_every_sequence_is_in_one_microbatch_and_every_rank_has_as_many(batching, data):
    chosen_by_rank = [shapes.sequences for shapes in plan_whole(batch(), batching, data).ranks]
    microbatches = [planned.microbatches for planned in plans(batching, data)]
    assert len(set(map(len, microbatches))) == 1
    sequences = sorted(chain.from_iterable(chain.from_iterable(chosen_by_rank)))
    assert [number for number in sequences if number != PADDING] == list(range(len(LENGTHS)))
    total_weight = 0
    for of_rank, chosen in zip(microbatches, chosen_by_rank, strict=True):
        for microbatch, numbers in zip(of_rank, chosen, strict=True):
            assert microbatch.batch.size == len(numbers)
            for place, sequence in enumerate(numbers):
                weight = microbatch.batch["sample_mask"][place].item()
                assert weight == (sequence != PADDING)
                total_weight += weight
                if weight:
                    length = LENGTHS[sequence]
                    assert (
                        microbatch.batch["input_ids"][place, :length].tolist()
                        == batch()["input_ids"][sequence, :length].tolist()
                    )
                    assert microbatch.lengths is None or microbatch.lengths[place] == length
    assert total_weight == len(LENGTHS)


@pytest.mark.parametrize("degrees", [{}, {"context": 2}, {"tensor": 3}, {"context": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "packed"])
def test_no_microbatch_with_its_padding_exceeds_the_budget(kind, degrees):
    for tokens in (25, 31, 98):
        for planned in plans(Batching(kind, tokens=tokens), data=2, **degrees):
            for microbatch in planned.microbatches:
                size, length = microbatch.shape(topology(**degrees))
                assert size * length <= tokens


@pytest.mark.parametrize("batching", KINDS, ids=lambda b: b.kind)
@pytest.mark.parametrize("degrees", [{}, {"context": 2, "tensor": 2}], ids=str)
def test_efficiency_is_the_fraction_of_slots_with_tokens_on_all_ranks(batching, degrees):
    batching = replace(batching, tokens=40)
    found = plans(batching, data=4, **degrees)
    slots = sum(
        size * length
        for planned in found
        for size, length in (microbatch.shape(topology(**degrees)) for microbatch in planned.microbatches)
    )
    assert {planned.efficiency for planned in found} == {sum(LENGTHS) / slots}


def test_padding_sequences_have_one_token():
    for planned in plans(Batching("packed", tokens=40), data=4):
        for microbatch in planned.microbatches:
            found = microbatch.batch
            assert (found["input_lengths"] <= found["input_ids"].size(1)).all()
            assert (found["input_lengths"][found["sample_mask"] == 0] == 1).all()


OF_PAIRS = [Batching("padded", sequences=2), Batching("dynamic", tokens=48), Batching("packed", tokens=24)]


@pytest.mark.parametrize("batching", OF_PAIRS, ids=lambda b: b.kind)
@pytest.mark.parametrize("data", [1, 2])
def test_pairs_stay_together_in_order(batching, data):
    planned = plan_whole(batch(LENGTHS + [5]), batching, data, group_size=2)
    for shapes in planned.ranks:
        for sequences in shapes.sequences:
            assert len(sequences) % 2 == 0
            assert all(first % 2 == 0 for first in sequences[::2])
            assert [first + 1 for first in sequences[::2]] == sequences[1::2]


@pytest.mark.parametrize("batching", KINDS[1:], ids=lambda b: b.kind)
@pytest.mark.parametrize("features", [5, WIDTH, 30])
def test_only_tensors_with_one_value_per_token_are_cut(batching, features):
    """A user's tensor is whole, even if it is as wide as the tokens, unless the user says that it is one of tokens."""
    declare_token_keys("weights_of_a_test")
    wide = batch() | {"features": torch.rand(7, features), "weights_of_a_test": torch.rand(7, WIDTH, 2)}
    wide |= {"advantages": torch.ones(7), "names": list("abcdefg")}
    for microbatch in plan_microbatches(Batch.from_whole(wide), plan_whole(wide, batching)).microbatches:
        found = microbatch.batch
        assert found["features"].size(1) == features and found["advantages"].dim() == 1
        for key in ("token_mask", "weights_of_a_test"):
            assert found[key].shape[:2] == found["input_ids"].shape == (found.size, found["input_ids"].size(1))


@pytest.mark.parametrize("batching", KINDS[1:], ids=lambda b: b.kind)
def test_a_tensor_of_tokens_with_another_width_is_refused_by_name(batching):
    wrong = BatchedDataDict(batch() | {"advantages": torch.ones(7, WIDTH - 1)})
    with pytest.raises(ValueError, match=r"'advantages' has a value for each token, but its shape \(7, 11\)"):
        plan_microbatches(Batch.from_whole(wrong), plan_whole(wrong, batching))


def test_packed_sequences_are_padded_only_if_a_degree_requires_it():
    (plain,) = plans(Batching("packed", tokens=100))
    (microbatch,) = plain.microbatches
    assert microbatch.shape(topology()) == (1, sum(LENGTHS)) and plain.efficiency == 1.0
    (cut,) = plans(Batching("packed", tokens=100), context=2)
    (microbatch,) = cut.microbatches
    assert microbatch.shape(topology(context=2)) == (1, 12 + 4 + 12 + 4 + 8 + 8 + 4)
    # Sequence parallelism divides the package, not each sequence, so that only the last padded length grows.
    (both,) = plans(Batching("packed", tokens=100), context=2, tensor=2)
    assert both.microbatches[0].shape(topology(context=2, tensor=2)) == (1, 56)


@pytest.mark.parametrize(
    ("batching", "group_size", "message"),
    [
        (Batching("packed", tokens=11), 1, r"train.batching=packed, train.micro_batch_tokens=11: .* has 12 tokens"),
        (Batching("dynamic", tokens=11), 1, r"train.micro_batch_tokens=11: sequence \d needs 1 x 12"),
        (Batching("packed", tokens=12), 2, r"train.micro_batch_tokens=12: sequence \d has 13 tokens"),
        (Batching("dynamic", tokens=12), 2, r"train.micro_batch_tokens=12: sequence \d needs 2 x 7 tokens"),
    ],
)  # fmt: skip
def test_a_sequence_or_pair_over_the_budget_is_refused(batching, group_size, message):
    with pytest.raises(ConfigError, match=message):
        plans(batching, group_size=group_size, lengths=LENGTHS + [5])


def test_lengths_must_fit_the_width_and_include_all_unmasked_tokens():
    assert sequence_lengths(batch()) == LENGTHS
    assert sequence_lengths({"input_ids": torch.zeros(2, 5, dtype=torch.long)}) == [5, 5]
    with pytest.raises(ValueError, match=r"input_lengths\[2\]=13 does not fit sequences of 12 tokens"):
        sequence_lengths(batch() | {"input_lengths": torch.tensor([9, 3, 13, 1, 7, 7, 2])})
    lost = r"token_mask\[1, 3\] counts a token past the sequence's end: input_lengths\[1\]=3"
    with pytest.raises(ValueError, match=lost):
        sequence_lengths(batch() | {"token_mask": torch.ones(7, WIDTH)[:, :] * (torch.arange(WIDTH) < 9)})
