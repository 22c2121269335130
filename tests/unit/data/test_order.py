import pytest

from rl_megatron.data.order import ShuffledEpochs, check_batch_size, epoch_order

PINNED = [5, 6, 7, 3, 9, 2, 4, 8, 1, 0]


def test_every_epoch_has_a_different_permutation():
    orders = {(seed, epoch): epoch_order(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 9
    assert orders[1, 2] == epoch_order(50, 1, 2).tolist()


def test_the_order_is_pinned():
    """A run resumed with a later version of this code must draw the same items: changing this breaks every resume."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == PINNED
    assert ShuffledEpochs(10, seed=0).items(0, 4) == PINNED[:4]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7])
def test_every_item_once_per_epoch(batch_size):
    epochs = ShuffledEpochs(7, seed=3)
    drawn = [item for step in range(21) for item in epochs.items(step * batch_size, batch_size)]
    for start in range(0, len(drawn) - 6, 7):
        assert sorted(drawn[start : start + 7]) == list(range(7))
    assert drawn[:7] != drawn[7:14]


def test_resuming_needs_only_the_place():
    running = ShuffledEpochs(11, seed=5)
    items = [running.items(start, 4) for start in range(0, 120, 4)]
    assert ShuffledEpochs(11, seed=5).items(116, 4) == items[29]
    assert running.items(8, 4) == items[2], "and places can be asked for in any order"
    assert ShuffledEpochs(11, seed=6).items(0, 4) != items[0]


def test_a_batch_needs_as_many_different_items():
    check_batch_size(4, 4)
    for num_items, batch_size in ((3, 4), (0, 1), (3, 0)):
        with pytest.raises(
            ValueError, match=f"{batch_size} different items from {num_items}: lower train.global_batch_size"
        ):
            check_batch_size(num_items, batch_size)
