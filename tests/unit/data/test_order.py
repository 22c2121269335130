import pytest

from rl_megatron.data.order import BatchSchedule, epoch_order

PINNED = [5, 6, 7, 3, 9, 2, 4, 8, 1, 0]


def test_every_epoch_has_a_different_permutation():
    orders = {(seed, epoch): epoch_order(50, seed, epoch).tolist() for seed in range(3) for epoch in range(3)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 9
    assert orders[1, 2] == epoch_order(50, 1, 2).tolist()


def test_the_order_is_pinned():
    """A run resumed with a later version of this code must draw the same items: changing this breaks every resume."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == PINNED
    assert BatchSchedule(10, 4, seed=0).items_at(0) == PINNED[:4]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7])
def test_every_item_once_per_epoch(batch_size):
    schedule = BatchSchedule(7, batch_size, seed=3)
    drawn = [item for step in range(21) for item in schedule.items_at(step)]
    for start in range(0, len(drawn) - 6, 7):
        assert sorted(drawn[start : start + 7]) == list(range(7))
    assert drawn[:7] != drawn[7:14]


def test_resuming_needs_only_the_step_number():
    running = BatchSchedule(11, 4, seed=5)
    items = [running.items_at(step) for step in range(30)]
    assert BatchSchedule(11, 4, seed=5).items_at(29) == items[29]
    assert running.items_at(2) == items[2], "and steps can be asked for in any order"
    assert BatchSchedule(11, 4, seed=6).items_at(0) != items[0]


def test_errors():
    with pytest.raises(ValueError, match="train.global_batch_size"):
        BatchSchedule(3, 4, seed=0)
    with pytest.raises(ValueError, match="from 0"):
        BatchSchedule(0, 1, seed=0)
    with pytest.raises(ValueError, match="-1"):
        BatchSchedule(3, 1, seed=0).items_at(-1)
