import random
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.batching.balance import Groups, balance_shards
from rl_megatron.batching.config import DynamicPlanArgs, PackingPlanArgs
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch_plan import plan_dynamic_batching, plan_sequence_packing
from rl_megatron.batching.packing import ALGORITHMS

QUADRATIC = SequenceCost(per_token=1.0, per_pair=1e-3)


def pack(lengths, num_shards, capacity, **args):
    return plan_sequence_packing(lengths, num_shards, PackingPlanArgs(capacity, **args))


def flat(table):
    return list(chain.from_iterable(table))


def fewest_packs(lengths, capacity):
    """Return a bound below which no packing is: that of Martello and Toth (1990).

    For each k, sequences of more than half a pack have one each, and those from k on fill at most the gaps beside them.
    """
    bound = 0
    for k in {0, *(length for length in lengths if 2 * length <= capacity)}:
        alone = sum(length > capacity - k for length in lengths)
        large = [length for length in lengths if capacity - k >= length > capacity / 2]
        small = sum(length for length in lengths if capacity / 2 >= length >= k)
        gaps = len(large) * capacity - sum(large)
        bound = max(bound, alone + len(large) + max(0, -(-(small - gaps) // capacity)))
    return bound


@st.composite
def problems(draw):
    """Draw (lengths, shards, capacity, args); every group fits alone, and the shards divide the number of groups."""
    num_shards, group_size = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    multiple = draw(st.sampled_from([1, 4]))
    num_sequences = num_shards * group_size * draw(st.integers(1, 12))
    longest = draw(st.sampled_from([1, 7, 40, 200]))
    lengths = draw(st.lists(st.integers(0, longest), min_size=num_sequences, max_size=num_sequences))
    fitting = max(
        sum(-(-length // multiple) * multiple for length in lengths[start : start + group_size])
        for start in range(0, num_sequences, group_size)
    )
    capacity = max(fitting, 1) + draw(st.sampled_from([0, 1, 50, 1000]))
    cost = draw(st.sampled_from([SequenceCost(), QUADRATIC, SequenceCost(0.0, 1.0)]))
    return lengths, num_shards, capacity, {
        "group_size": group_size, "sequence_length_pad_multiple": multiple, "cost": cost
    }  # fmt: skip


def check_promises(plan, lengths, num_shards, capacity, args):
    """Check what every plan must satisfy.

    Every sequence is in one package, groups are whole and in order, packages are within the capacity and not empty, and
    every shard has the same number of packages.
    """
    group_size, multiple = args["group_size"], args["sequence_length_pad_multiple"]
    assert sorted(flat(flat(plan.sequences))) == list(range(len(lengths)))
    for members in flat(plan.sequences):
        assert members and members == sorted(members)
        assert all(start % group_size == 0 for start in members[::group_size])
        assert members == [start + place for start in members[::group_size] for place in range(group_size)]
    assert len(plan.sequences) == num_shards and len(set(map(len, plan.sequences))) == 1
    padded = [-(-length // multiple) * multiple for length in lengths]
    sums = [[sum(padded[member] for member in members) for members in shard] for shard in plan.sequences]
    assert plan.lengths == plan.slots == sums
    assert max(flat(plan.lengths)) <= capacity
    assert sum(flat(plan.tokens)) == sum(lengths)
    costs = [[sum(args["cost"](padded[member]) for member in members) for members in shard] for shard in plan.sequences]
    assert flat(plan.costs) == pytest.approx(flat(costs))
    for shard in plan.costs:
        assert all(later <= earlier + 1e-9 * shard[0] for earlier, later in pairwise(shard)), "a later one costs more"


class TestPacking:
    @settings(max_examples=300, deadline=None)
    @given(problems(), st.sampled_from(["balanced", *ALGORITHMS]))
    def test_promises(self, problem, algorithm):
        lengths, num_shards, capacity, args = problem
        plan = pack(lengths, num_shards, capacity, algorithm=algorithm, **args)
        check_promises(plan, lengths, num_shards, capacity, args)
        assert plan == pack(tuple(lengths), num_shards, capacity, algorithm=algorithm, **args)

    @settings(max_examples=300, deadline=None)
    @given(problems())
    def test_balanced_is_not_worse_than_full_packages_dealt_to_shards(self, problem):
        lengths, num_shards, capacity, args = problem
        balanced = pack(lengths, num_shards, capacity, **args)
        filled = pack(lengths, num_shards, capacity, algorithm="modified_first_fit_decreasing", **args)
        assert len(balanced.sequences[0]) <= len(filled.sequences[0])
        if len(balanced.sequences[0]) == len(filled.sequences[0]):
            assert balanced.shard_imbalance <= max(filled.shard_imbalance + 1e-9, 1e-3)

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 2**32), st.integers(1, 16), st.integers(3, 40), st.sampled_from([SequenceCost(), QUADRATIC]))
    def test_many_short_sequences_leave_no_imbalance(self, seed, num_shards, sequences_per_pack, cost):
        source = random.Random(seed)
        lengths = [source.randint(1, 2048 // sequences_per_pack) for _ in range(20 * sequences_per_pack * num_shards)]
        plan = pack(lengths, num_shards, 1024, cost=cost)
        assert plan.shard_imbalance < 0.002 and plan.microbatch_imbalance < 0.1
        # The least, rounded up to the shards. Packs leave gaps, and those that hold only three leave more.
        least = -(-fewest_packs(lengths, 1024) // num_shards)
        assert 0 <= len(plan.sequences[0]) - least <= (1 if sequences_per_pack > 3 else 2)

    def test_the_least_number_of_packs_that_divides_over_the_shards(self):
        lengths = [300] * 40  # 12,000 tokens, 3 to a pack of 1,000: 14 packs
        assert len(pack(lengths, 4, 1000).sequences[0]) == 4
        assert len(pack(lengths, 2, 1000).sequences[0]) == 7

    def test_a_tight_packing_is_found_where_spreading_evenly_fails(self):
        """The packages are 5 + 4 + 1 and 4 + 3 + 3.

        Filling the cheapest package first gives 5 + 3 + 1 and 4 + 4, which have no space for the last 3.
        """
        assert pack([5, 4, 4, 3, 3, 1], 2, 10).lengths == [[10], [10]]

    def test_packages_trade_a_costly_group_for_a_cheaper_one(self):
        """Filling the cheapest package first gives 5 + 4 + 3 + 3 and 5 + 4 + 3 + 1; a 4 for a 3 evens them."""
        groups = Groups(lengths=[1] * 8, costs=[5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 1.0], capacity=4)
        assert [[groups.cost(pack) for pack in shard] for shard in balance_shards(groups, 2)] == [[14.0], [14.0]]

    def test_long_sequences_are_balanced_by_cheaper_packages(self):
        """A few long sequences cost more than any package of short ones, so that equal costs are impossible."""
        source = random.Random(0)
        lengths = [min(32768, int(source.lognormvariate(7.5, 1.2)) + 1) for _ in range(512)]
        args = {"cost": SequenceCost(1.0, 4.4e-5)}
        filled = pack(lengths, 8, 32768, algorithm="modified_first_fit_decreasing", **args)
        assert filled.shard_imbalance > 0.008
        assert pack(lengths, 8, 32768, **args).shard_imbalance < 0.001

    def test_the_cost_decides(self):
        """By tokens, a sequence of 8 costs as much as two of 4; by pairs of tokens, as much as four."""
        lengths = [8, 4, 4, 4, 4]
        by_tokens, by_pairs = (
            plan_sequence_packing(lengths, 2, PackingPlanArgs(16, cost=cost), allow_uneven=True)
            for cost in (SequenceCost(1.0, 0.0), SequenceCost(0.0, 1.0))
        )
        assert sorted(flat(by_tokens.lengths)) == [12, 12] and sorted(flat(by_pairs.lengths)) == [8, 16]
        assert by_tokens.shard_imbalance == by_pairs.shard_imbalance == 0

    def test_the_default_is_balanced(self):
        assert PackingPlanArgs(10).algorithm == "balanced"
        assert PackingPlanArgs(10).cost == SequenceCost()


class TestDegenerate:
    def test_all_equal(self):
        plan = pack([512] * 64, 4, 1024, cost=QUADRATIC)
        assert plan.lengths == [[1024] * 8] * 4
        assert plan.efficiency == 1 and plan.shard_imbalance == plan.microbatch_imbalance == 0

    def test_one_giant(self):
        plan = pack([1000] + [1] * 15, 4, 1000)
        assert sorted(flat(plan.sequences), key=len)[0] == [0]
        assert sorted(flat(plan.lengths)) == [5, 5, 5, 1000]
        assert plan.shard_imbalance == pytest.approx(4 * 1000 / 1015 - 1)

    def test_sequences_without_tokens(self):
        plan = pack([0] * 8, 4, 10)
        assert [len(members) for members in flat(plan.sequences)] == [2] * 4
        assert plan.efficiency == 1 and plan.shard_imbalance == 0
        assert all(flat(pack([9, 0, 0, 0], 4, 10).sequences)), "a package is empty"

    def test_many_tiny(self):
        plan = pack([1] * 10_000, 8, 4096)
        assert plan.lengths == [[1250]] * 8

    def test_every_group_fills_a_pack(self):
        assert pack([10] * 6, 3, 10).lengths == [[10, 10]] * 3

    def test_fewer_groups_than_shards_name_the_remedy(self):
        with pytest.raises(ValueError, match="2 sequences cannot fill 4 packs.*pad_to_multiple"):
            plan_sequence_packing([3, 4], 4, PackingPlanArgs(10), allow_uneven=True)

    def test_an_unknown_algorithm(self):
        with pytest.raises(ValueError, match="did you mean 'balanced'"):
            PackingPlanArgs(10, algorithm="balance")


class TestFigures:
    def test_the_figures_of_packing(self):
        """The sequences are padded to 4, 8, 4 and 8, so that two packages of 12 hold 16 tokens."""
        plan = pack([3, 5, 2, 6], 2, 12, sequence_length_pad_multiple=4, cost=SequenceCost(1.0, 0.5))
        assert plan.lengths == [[12], [12]] and plan.costs == [[52], [52]]
        assert plan.efficiency == 16 / 24 and plan.shard_imbalance == 0

    def test_the_imbalance_of_packing(self):
        """The first sequences are 9 and 8, one for each shard; the shard with the 8 gets the 4 next."""
        plan = pack([9, 8, 4, 1], 2, 9, algorithm="concatenative")
        assert plan.costs == [[9, 1], [8, 4]]
        assert plan.shard_imbalance == pytest.approx(12 / 11 - 1)
        assert plan.microbatch_imbalance == pytest.approx(4 / 2.5 - 1)

    def test_the_figures_of_dynamic_batching(self):
        """The shards get 1 and 2 tokens, then 5 and 6: each has a microbatch of width 2 and one of width 6."""
        args = DynamicPlanArgs(8, sequence_length_round=2, cost=SequenceCost(1.0, 1.0))
        plan = plan_dynamic_batching([1, 6, 2, 5], 8, 2, args)
        assert plan.slots == [[2, 6]] * 2 and plan.costs == [[6, 42]] * 2
        assert plan.efficiency == 14 / 16 and plan.shard_imbalance == plan.microbatch_imbalance == 0


class TestDynamicBatching:
    def test_no_shard_gets_the_shortest_of_every_place(self):
        plan = plan_dynamic_batching(list(range(1, 33)), 32, 4, DynamicPlanArgs(64))
        assert [sum(shard) for shard in plan.tokens] == [132] * 4

    @settings(max_examples=100, deadline=None)
    @given(st.integers(1, 5), st.data())
    def test_promises(self, num_shards, data):
        num_sequences = num_shards * data.draw(st.integers(1, 12))
        lengths = data.draw(st.lists(st.integers(0, 40), min_size=num_sequences, max_size=num_sequences))
        plan = plan_dynamic_batching(lengths, 40, num_shards, DynamicPlanArgs(80))
        assert sorted(flat(flat(plan.sequences))) == list(range(num_sequences))
        for members, width, slots in zip(flat(plan.sequences), flat(plan.lengths), flat(plan.slots), strict=True):
            assert max(lengths[member] for member in members) <= width and slots == len(members) * width <= 80
        assert all(shard == plan.slots[0] for shard in plan.slots)
