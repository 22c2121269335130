"""How far the decoding of sequences is, as the ranks that show it hear of it."""

import pytest

from rl_megatron import log
from rl_megatron.generation.decoding_progress import DecodingProgress


@pytest.fixture
def heard():
    reports = []
    log.watch_progress(lambda *report: reports.append(report))
    yield reports
    log.watch_progress(None)


def test_it_grows_with_the_shares_of_running_sequences(heard):
    clock = iter(range(100)).__next__
    progress = DecodingProgress(8, clock=clock)
    progress.update(0, lambda: 1.5, 4)
    progress.update(2, lambda: 1.0, 2)
    progress.finish_batch(8)
    assert heard == [(1, 8, "sequences", "4 running"), (3, 8, "sequences", "2 running"), (8, 8, "sequences", "")]


def test_a_rank_stands_for_those_that_share_the_work(heard):
    progress = DecodingProgress(10, share=4)  # three on each rank, two of them repeated
    progress.update(1, lambda: 1.0, 2)
    progress.finish_batch(3)
    assert [report[:2] for report in heard] == [(8, 10), (10, 10)]


def test_it_is_not_told_more_often_than_people_read(heard):
    progress = DecodingProgress(2, clock=lambda: 0.0)
    for _ in range(1, 50):
        progress.update(0, lambda: 1.0, 2)
    assert len(heard) == 1


def test_nothing_is_counted_where_nobody_watches():
    def unread() -> float:
        raise AssertionError("the shares were read")

    DecodingProgress(2).update(0, unread, 1)
    DecodingProgress(2).finish_batch(2)
