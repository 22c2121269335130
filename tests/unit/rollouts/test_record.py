"""The log of an asynchronous run: what was written is read, cut lines are not, and both is on disk."""

from __future__ import annotations

import os

import pytest

from rl_megatron.rollouts.record import LoggedGroup, LoggedStep, RolloutLog
from tests.synced_files import note_syncs


def step(number: int) -> LoggedStep:
    group = LoggedGroup(number=number * 2, location="prompts.jsonl:3", ages=[0, 1], versions=[number - 1, number])
    return LoggedStep(number, [group], {number * 2 + 1: "too old"}, {"reward": number / 8})


@pytest.fixture
def log(tmp_path):
    log = RolloutLog(tmp_path / "stage")
    for number in (1, 2, 3):
        log.append(step(number))
    return log


def test_steps_are_read_as_they_were_written(log, tmp_path):
    assert log.read() == RolloutLog(tmp_path / "stage").read() == {number: step(number) for number in (1, 2, 3)}
    assert log.read()[2].ended == [4, 5]
    assert RolloutLog(tmp_path / "other").read() == {}


def test_a_line_that_was_cut_off_is_replaced_by_the_next_step(log, tmp_path):
    path = tmp_path / "stage" / "log.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert list(log.read()) == [1, 2]
    log.append(step(4))
    assert log.read() == {number: step(number) for number in (1, 2, 4)}


def test_steps_after_the_one_that_a_run_goes_back_to_are_forgotten(log, tmp_path):
    log.forget(1)
    assert log.read() == {1: step(1)}
    log.append(step(2))
    assert log.read() == {1: step(1), 2: step(2)}
    RolloutLog(tmp_path / "other").forget(1)
    assert not (tmp_path / "other").exists()


def test_a_step_is_on_disk_when_it_is_written(log, tmp_path, monkeypatch):
    path, synced = tmp_path / "stage" / "log.jsonl", note_syncs(monkeypatch)
    log.append(step(4))
    assert synced == [(str(path), path.stat().st_size)]
    log.forget(2)
    assert synced[1:] == [(f"{path}.{os.getpid()}.incomplete", path.stat().st_size)]
