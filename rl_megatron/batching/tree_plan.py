"""Plan packs in which sequences share the tokens of their common beginnings.

Sequences of a set that are in one pack are computed as a tree. Large trees save the most, but costs are balanced better
with small ones. So sets are planned whole, then in halves, in quarters and so on, and the plan is used whose costliest
shard costs the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rl_megatron.batching.balance import Groups, balance_shards
from rl_megatron.batching.config import PackingPlanArgs
from rl_megatron.batching.microbatch_plan import MicrobatchPlan
from rl_megatron.batching.packing import pack_sequences, round_up
from rl_megatron.batching.shared_prefixes import SharedPrefixes

_LEAST_GAIN = 0.02
"""The share of the costliest shard's cost that trees must save. Each level of a tree costs a few calls of kernels."""


@dataclass(frozen=True)
class _Tree:
    """Sequences of one set in a pack.

    Attributes:
        groups: The indices of the sequences that stay together.
        tokens: The tokens of all sequences.
        slots: The tokens of the tree, with the padding of each segment.
        cost: The cost of the tree.
    """

    groups: list[list[int]]
    tokens: int
    slots: int
    cost: float

    @property
    def sequences(self) -> list[int]:
        """Return the indices of all sequences."""
        return list(chain.from_iterable(self.groups))


def plan_trees(
    lengths: Sequence[int], prefixes: SharedPrefixes, num_shards: int, args: PackingPlanArgs, unshared: MicrobatchPlan
) -> MicrobatchPlan | None:
    """Return the best plan of trees, or None if trees do not save enough. `slots` has shared tokens once.

    Args:
        lengths: The number of tokens of each sequence, and then of each padding sequence.
        prefixes: What the sequences have in common, in multiples of `args.sequence_length_pad_multiple`. Padding
            sequences have nothing in common.
        num_shards: The number of data-parallel ranks.
        args: The limit of a pack, the size of groups that stay together, and the cost of a sequence.
        unshared: The plan without trees.
    """
    sets = _list_sets(len(lengths), prefixes, args.group_size)
    size = max(map(len, sets))
    best, best_cost = None, (1 - _LEAST_GAIN) * _cost_most(unshared)
    while size >= 1 and (size > 1 or args.group_size > 1):
        trees = [tree for members in sets for tree in _cut(members, size, lengths, prefixes, args)]
        size //= 2
        if max(tree.slots for tree in trees) > args.max_tokens_per_microbatch:
            continue
        trees = _cut_until_packs_are_filled(trees, num_shards, lengths, prefixes, args)
        if trees is None:
            continue
        plan = _plan(trees, lengths, num_shards, args)
        if _cost_most(plan) < best_cost:
            best, best_cost = plan, _cost_most(plan)
    return best


def _list_sets(num_sequences: int, prefixes: SharedPrefixes, group_size: int) -> list[list[list[int]]]:
    """Return the sets of groups, in order. A group belongs to the set of its first sequence."""
    sets: dict[int, list[list[int]]] = {}
    num_real = len(prefixes.shared)
    for first in range(0, num_sequences, group_size):
        set_ = int(prefixes.chain[first]) if first < num_real else first
        sets.setdefault(set_, []).append(list(range(first, first + group_size)))
    for groups in sets.values():
        if len(groups) > 1:
            groups.sort(key=lambda group: prefixes.position[group[0]])
    return list(sets.values())


def _cut(
    groups: list[list[int]], size: int, lengths: Sequence[int], prefixes: SharedPrefixes, args: PackingPlanArgs
) -> list[_Tree]:
    """Return trees of a set's groups, of at most `size` groups each, and fewer if they would not fit a pack."""
    count = -(-len(groups) // size)
    bounds = [len(groups) * number // count for number in range(count + 1)]
    trees = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        tree = _grow(groups[start:stop], lengths, prefixes, args)
        if tree.slots > args.max_tokens_per_microbatch and stop - start > 1:
            trees += _cut(groups[start:stop], (stop - start + 1) // 2, lengths, prefixes, args)
        else:
            trees.append(tree)
    return trees


def _cut_until_packs_are_filled(
    trees: list[_Tree], num_shards: int, lengths: Sequence[int], prefixes: SharedPrefixes, args: PackingPlanArgs
) -> list[_Tree] | None:
    """Return at least one tree for each pack, after cutting the largest ones if there are fewer.

    The result is None if there are too few groups.
    """
    while True:
        packs = pack_sequences([tree.slots for tree in trees], args.max_tokens_per_microbatch)
        missing = round_up(len(packs), num_shards) - len(trees)
        if missing <= 0:
            return trees
        largest = sorted((tree for tree in trees if len(tree.groups) > 1), key=lambda tree: -tree.slots)[:missing]
        if not largest:
            return None
        kept = [tree for tree in trees if not any(tree is other for other in largest)]
        halves = [_cut(tree.groups, -(-len(tree.groups) // 2), lengths, prefixes, args) for tree in largest]
        trees = [*kept, *chain.from_iterable(halves)]


def _grow(groups: list[list[int]], lengths: Sequence[int], prefixes: SharedPrefixes, args: PackingPlanArgs) -> _Tree:
    """Return the tree of the sequences of groups."""
    num_real, sequences = len(prefixes.shared), list(chain.from_iterable(groups))
    order, shared = prefixes.arrange([index if index < num_real else -1 for index in sequences])
    own_lengths = [lengths[sequences[index]] for index in order]
    slots = sum(round_up(length, args.sequence_length_pad_multiple) for length in own_lengths) - sum(shared)
    cost = sum(map(args.cost, own_lengths)) - sum(map(args.cost, shared))
    return _Tree(groups, sum(own_lengths), slots, cost)


def _plan(trees: list[_Tree], lengths: Sequence[int], num_shards: int, args: PackingPlanArgs) -> MicrobatchPlan:
    groups = Groups([tree.slots for tree in trees], [tree.cost for tree in trees], args.max_tokens_per_microbatch)
    packs = [[[trees[index] for index in pack] for pack in shard] for shard in balance_shards(groups, num_shards)]
    slots = [[sum(tree.slots for tree in pack) for pack in shard] for shard in packs]
    return MicrobatchPlan(
        [[list(chain.from_iterable(tree.sequences for tree in pack)) for pack in shard] for shard in packs],
        lengths=slots,
        tokens=[[sum(tree.tokens for tree in pack) for pack in shard] for shard in packs],
        slots=slots,
        costs=[[sum(tree.cost for tree in pack) for pack in shard] for shard in packs],
    )


def _cost_most(plan: MicrobatchPlan) -> float:
    """Return the cost of the costliest shard."""
    return max(map(sum, plan.costs))
