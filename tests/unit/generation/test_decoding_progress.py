"""How far the decoding of sequences is, as the ranks that show it hear of it."""

import pytest
import torch

from rl_megatron import log
from rl_megatron.generation.decoding_progress import DecodingProgress


@pytest.fixture
def heard():
    reports = []
    log.watch_progress(lambda *report: reports.append(report))
    yield reports
    log.watch_progress(None)


def running(*states):
    return torch.tensor(states, dtype=torch.bool)


def test_it_grows_within_a_batch_and_from_batch_to_batch(heard):
    clock = iter(range(100)).__next__
    progress = DecodingProgress(8, clock=clock)
    progress.token_added(1, 4, running(1, 1, 1, 1))
    progress.token_added(2, 4, running(1, 0, 1, 0))
    progress.batch_ended(4)
    progress.token_added(1, 4, running(0, 1, 1, 1))
    progress.batch_ended(4)
    assert heard == [
        (1, 8, "sequences", "token 1/4"),
        (3, 8, "sequences", "token 2/4"),
        (4, 8, "sequences", ""),
        (5, 8, "sequences", "token 1/4"),
        (8, 8, "sequences", ""),
    ]


def test_a_rank_stands_for_those_that_share_the_work(heard):
    progress = DecodingProgress(10, share=4)  # three on each rank, two of them repeated
    progress.token_added(3, 6, running(0, 1, 1))
    progress.batch_ended(3)
    assert [report[:2] for report in heard] == [(8, 10), (10, 10)]


def test_it_is_not_told_more_often_than_people_read(heard):
    progress = DecodingProgress(2, clock=lambda: 0.0)
    for token in range(1, 50):
        progress.token_added(token, 50, running(1, 1))
    assert len(heard) == 1


def test_nothing_is_counted_where_nobody_watches():
    class Unread:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    DecodingProgress(2).token_added(1, 4, Unread())
    DecodingProgress(2).batch_ended(2)
