"""Common beginnings are found, kept in plans, and cut into segments that no two sequences read differently."""

from __future__ import annotations

import random
from itertools import chain, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.batching.rank_plan import plan_lengths
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.batching.shared_prefixes import MOST_LEVELS, PREFIX_SET, SharedPrefixes, find_shared_prefixes
from rl_megatron.batching.step_microbatches import find_prefixes
from rl_megatron.data.batch import BatchedDataDict

LAYOUT = SimpleNamespace(data=1, context=1, sequence_multiple=1)
COST = SequenceCost(1.0, 0.1)


def random_sequences(seed: int) -> tuple[list[list[int]], list[int]]:
    """Return short sequences of two different tokens, many of which begin alike, and the number of each one's set."""
    rng = random.Random(seed)
    sequences = [[rng.randint(0, 1) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(2, 12))]
    return sequences, [rng.randint(0, 2) for _ in sequences]


def collate(sequences: list[list[int]], **values: torch.Tensor) -> BatchedDataDict:
    width = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return BatchedDataDict(input_ids=ids, input_lengths=lengths, **values)


def count_shared(one: list[int], other: list[int]) -> int:
    """Return how many tokens two sequences may share: those that they have in common, but not the last of these."""
    common = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return max((min(len(one), len(other)) if common is None else common) - 1, 0)


def find(sequences: list[list[int]], sets: list[int], **values: torch.Tensor) -> SharedPrefixes:
    batch = collate(sequences, **values) | {PREFIX_SET: torch.tensor(sets)}
    return SharedPrefixes(find_shared_prefixes(batch, [len(sequence) for sequence in sequences]))


def assert_is_tree_of(tree: PrefixTree, sequences: list[list[int]]) -> None:
    """Each sequence is its path, and all sequences that share a token have the same tokens up to the next one."""
    read: dict[tuple[int, int], tuple[list[int], int | None]] = {}
    for sequence, path in zip(sequences, tree.paths, strict=True):
        position = 0
        for index in path:
            segment = tree.segments[index]
            assert segment.begin == position and segment.length > 0
            for place in range(segment.length):
                position += 1
                following = sequence[position] if position < len(sequence) else None
                before, next_token = read.setdefault((index, place), (sequence[:position], following))
                assert before == sequence[:position] and (following is None or next_token in (None, following))
                if next_token is None:
                    read[index, place] = before, following
        assert position == len(sequence)
        assert all(tree.segments[child].parent == parent for parent, child in pairwise(path))
    assert len(read) == tree.num_tokens
    for index, segment in enumerate(tree.segments):
        below = {index}
        for number, other in enumerate(tree.segments):
            if other.parent in below:
                below.add(number)
        assert below == set(range(index, segment.end)), "the segments below one follow it"


@pytest.mark.parametrize("block", range(5))
def test_sequences_of_a_set_share_all_but_the_last_token_that_they_have_in_common(block):
    for seed in range(100 * block, 100 * block + 100):
        sequences, sets = random_sequences(seed)
        prefixes, rng = find(sequences, sets), random.Random(seed)
        chosen = rng.sample(range(len(sequences)), rng.randint(1, len(sequences)))
        for numbers in (list(range(len(sequences))), chosen):
            texts = [sequences[number] for number in numbers]
            tree = prefixes.grow(numbers, [len(text) for text in texts])
            assert_is_tree_of(tree, texts)
            distinct = {
                (sets[number], *sequences[number][:place], "next", sequences[number][place])
                for number in numbers
                for place in range(1, len(sequences[number]))
            }
            assert tree.num_tokens == len(distinct) + len(numbers), "each token but a sequence's last is computed once"
        mask = np.isin(np.arange(len(sequences)), chosen)
        kept = SharedPrefixes(prefixes.select(mask))
        texts = [sequence for sequence, is_chosen in zip(sequences, mask, strict=True) if is_chosen]
        again = kept.grow(range(len(texts)), [len(text) for text in texts])
        assert again == prefixes.take(np.flatnonzero(mask)).grow(range(len(texts)), [len(text) for text in texts])
        assert_is_tree_of(again, texts)


def test_tokens_that_the_model_computes_differently_are_not_shared():
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    assert find(sequences, [0, 0]).shared.tolist() == [0, 3]
    assert find(sequences, [0, 1]).shared.tolist() == [0, 0]
    assert find(sequences, [0, 0], temperature=torch.tensor([1.0, 0.5])).shared.tolist() == [0, 0]
    by_token = torch.tensor([[1.0, 1.0, 1.0, 0.5, 1.0], [1.0, 1.0, 1.0, 0.7, 1.0]])
    assert find(sequences, [0, 0], temperature=by_token).shared.tolist() == [0, 2]
    experts = torch.zeros(2, 5, 3, 2, dtype=torch.int16)
    experts[1, 1, 2] = 7
    assert find(sequences, [0, 0], **{ROUTED_EXPERTS: experts}).shared.tolist() == [0, 1]


def test_a_batch_knows_what_its_sequences_share_whatever_is_selected_or_joined():
    sequences = [[1, 2, 3, 9], [5, 6, 7], [1, 2, 3, 8], [1, 2, 4]]
    values = collate(sequences) | {PREFIX_SET: torch.tensor([0, 1, 0, 0])}
    batch = Batch.from_whole(values)
    assert PREFIX_SET not in batch and batch.prefixes is not None
    assert batch.prefixes.grow([0, 1, 2, 3], [4, 3, 4, 3]).num_tokens == 14 - 2 - 1
    left = batch.select(torch.tensor([True, True, False, True]))
    assert left.prefixes.grow([0, 1, 2], [4, 3, 3]).num_tokens == 10 - 1
    both = Batch.join([left, batch])
    assert both.prefixes.grow(range(7), both.lengths.tolist()).num_tokens == 9 + 11
    assert Batch.from_whole(collate(sequences)).prefixes is None


def plan(lengths, shared_with_previous, sets, num_shards=1, tokens=64, kind="packed", group_size=1):
    """Return the plan of sequences, each of which shares tokens with the one before it, and what they share."""
    generator = iter(range(1000, 100000))
    sequences: list[list[int]] = []
    for number, (length, shared) in enumerate(zip(lengths, shared_with_previous, strict=True)):
        begin = sequences[-1][: shared + 1] if shared else []
        sequences.append(begin + [next(generator) for _ in range(length - len(begin))])
        assert shared == 0 or sets[number] == sets[number - 1]
    batching = Batching(kind, 4, tokens, share_prefixes=True)
    prefixes = find(sequences, sets)
    return plan_lengths(lengths, max(lengths), batching, LAYOUT, num_shards, group_size, COST, prefixes), prefixes


GROUPS = ([20] * 12, [0, 15, 15, 15] * 3, [0] * 4 + [1] * 4 + [2] * 4)


@pytest.mark.parametrize("kind", ["packed", "dynamic", "padded"])
def test_groups_stay_together_and_packs_keep_to_their_limit(kind):
    planned, prefixes = plan(*GROUPS, kind=kind, tokens=80)
    assert planned.shares_prefixes
    packs = planned.plan.sequences[0]
    assert sorted(chain.from_iterable(packs)) == list(range(12))
    for pack, slots in zip(packs, planned.plan.slots[0], strict=True):
        assert prefixes.grow(pack, [20] * len(pack)).num_tokens == slots <= 80
        assert {number // 4 for number in pack} == {pack[0] // 4} or len(pack) % 4 == 0
    assert sum(planned.plan.slots[0]) == 12 * 20 - 9 * 15
    assert planned.efficiency == pytest.approx(240 / 105)


def test_a_group_is_divided_where_that_balances_ranks():
    lengths, shared, sets = [40] * 8, [0, *[10] * 7], [0] * 8
    planned, _ = plan(lengths, shared, sets, num_shards=2, tokens=400)
    assert planned.shares_prefixes
    assert [sum(map(len, shard)) for shard in planned.plan.sequences] == [4, 4]
    assert planned.plan.shard_imbalance == pytest.approx(0.0)


def test_a_group_that_does_not_fit_a_pack_is_divided():
    planned, _ = plan([20] * 4, [0, 15, 15, 15], [0] * 4, tokens=26)
    assert planned.shares_prefixes and planned.plan.slots[0] == [25, 25]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8])
def test_every_rank_gets_as_many_packs_whatever_the_sizes_of_groups(num_shards):
    rng, shared_in = random.Random(num_shards), 0
    for _ in range(60):
        prompts, samples = rng.randint(1, 12), rng.choice([1, 2, 4, 8])
        prompt, response = rng.randint(2, 30), rng.randint(1, 30)
        lengths = [prompt + rng.randint(1, response) for _ in range(prompts * samples)]
        sets = [number // samples for number in range(len(lengths))]
        shared = [prompt - 1 if number % samples else 0 for number in range(len(lengths))]
        planned, _ = plan(lengths, shared, sets, num_shards, tokens=rng.randint(max(lengths), 4 * max(lengths)))
        shared_in += planned.shares_prefixes
        assert len({len(shard) for shard in planned.plan.sequences}) == 1
        numbers = chain.from_iterable(chain.from_iterable(planned.plan.sequences))
        assert sorted(numbers) == list(range(len(planned.lengths)))
    assert shared_in > 10


def test_shared_tokens_are_whole_zigzag_slices():
    layout = SimpleNamespace(data=1, context=2, sequence_multiple=4)
    sequences = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 20], [1, 2, 3, 30, 31, 32]]
    batch = Batch.from_whole(collate(sequences) | {PREFIX_SET: torch.zeros(3, dtype=torch.long)})
    prefixes = find_prefixes(batch, Batching("packed", tokens=64, share_prefixes=True), layout)
    tree = prefixes.grow([0, 1, 2], [10, 8, 6])
    assert [(segment.begin, segment.length) for segment in tree.segments] == [(0, 4), (4, 6), (4, 4), (0, 6)]


def test_an_empty_sequence_shares_nothing():
    batch = collate([[1, 2, 3], [1, 2, 4], [0]]) | {PREFIX_SET: torch.zeros(3, dtype=torch.long)}
    batch["input_lengths"][2] = 0
    assert Batch.from_whole(batch).prefixes.grow([0, 1, 2], [3, 3, 1]).num_tokens == 1 + 2 + 2 + 1


def test_a_set_with_too_many_levels_is_divided():
    lengths = [3 * number for number in range(1, 101)]
    planned, prefixes = plan(lengths, [0, *(length - 1 for length in lengths[:-1])], [0] * 100, tokens=10_000)
    assert planned.shares_prefixes
    assert prefixes.grow(range(100), lengths).depth == 50 < MOST_LEVELS


@pytest.mark.parametrize("sets", [torch.zeros(3), torch.zeros(3, 1, dtype=torch.long), [0, 0, 0]], ids=str)
def test_sets_are_a_whole_number_for_each_sequence(sets):
    batch = collate([[1, 2], [1, 2], [1, 3]]) | {PREFIX_SET: sets}
    with pytest.raises(ValueError, match="prefix_set must be a tensor of integers, one for each of the 3 sequences"):
        Batch.from_whole(batch)


def test_sequences_without_a_common_beginning_are_planned_as_ever():
    lengths = [20, 13, 7, 20]
    planned, _ = plan(lengths, [0] * 4, [0] * 4)
    assert not planned.shares_prefixes
    assert planned == plan_lengths(lengths, 20, Batching("packed", 4, 64), LAYOUT, 1, cost=COST)


def test_pairs_stay_in_order_and_share_their_prompt():
    lengths, shared, sets = [20, 18, 16, 20], [0, 12, 0, 12], [0, 0, 1, 1]
    planned, _ = plan(lengths, shared, sets, num_shards=2, group_size=2)
    assert planned.shares_prefixes
    assert [list(chain.from_iterable(shard)) for shard in planned.plan.sequences] == [[0, 1], [2, 3]]


def test_a_sequence_shares_less_than_it_has_and_no_more_than_the_one_before():
    with pytest.raises(ValueError, match="its last token has to be its own"):
        PrefixTree.build([5, 4], [0, 4])
    with pytest.raises(ValueError, match="which has fewer"):
        PrefixTree.build([3, 9], [0, 5])
