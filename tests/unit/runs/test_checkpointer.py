"""Policy and critic are saved together, one step at a time; a failed save does not end training."""

import errno
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.loading.load import load_config
from rl_megatron.runs.checkpointer import Checkpointer
from tests.unit.algorithms.fakes import ONE_RANK


@dataclass
class Model:
    name: str
    log: list
    fails: set = field(default_factory=set)  # (what, step)
    written: bool = False
    topology: ClassVar = ONE_RANK

    def begin_checkpoint(self, directory, step, **kept):
        self._do("begin", step)
        self.log.append((self.name, "begin", step))
        return Saving(self, step)

    def _do(self, what, step):
        if (what, step) in self.fails:
            raise SaveFailed(f"{self.name} cannot {what} {step}")


@dataclass
class Saving:
    model: Model
    step: int

    def is_written(self):
        return self.model.written

    def finish(self):
        self.model._do("finish", self.step)
        self.model.log.append((self.model.name, "finish", self.step))
        return f"{self.model.name} {self.step}"

    def abandon(self):
        self.model.log.append((self.model.name, "abandon", self.step))


@pytest.fixture
def make(tmp_path, monkeypatch):
    def build(log, critic_fails=(), policy_fails=(), finish_writing=lambda: None, **train):
        monkeypatch.setattr(
            "rl_megatron.runs.checkpointer.delete_older",
            lambda where, *_: log.append(("delete older", where.name)),
        )
        settings = replace(load_config([]).first.train, **train)
        models = Model("policy", log, set(policy_fails)), Model("critic", log, set(critic_fails))
        return Checkpointer(Path(tmp_path / "ppo"), settings, *models, finish_writing=finish_writing), models

    return build


def test_a_save_is_completed_when_both_have_been_written(make):
    log = []
    checkpointer, (policy, critic) = make(log)
    checkpointer.poll()
    checkpointer.save(1, last=False)
    checkpointer.poll()
    critic.written = True
    checkpointer.poll()
    assert log == [("critic", "begin", 1), ("policy", "begin", 1)]
    policy.written = True
    checkpointer.poll()
    checkpointer.poll()
    assert log[2:] == [("critic", "finish", 1), ("policy", "finish", 1), ("delete older", "ppo")]


def test_saves_run_one_at_a_time_and_the_last_is_completed(make):
    log = []
    checkpointer, _ = make(log)
    checkpointer.save(1, last=False)
    checkpointer.save(2, last=True)
    assert [entry for entry in log if entry[0] == "policy"] == [
        ("policy", "begin", 1), ("policy", "finish", 1), ("policy", "begin", 2), ("policy", "finish", 2),
    ]  # fmt: skip
    assert log.index(("policy", "finish", 1)) < log.index(("critic", "begin", 2))


def test_without_async_save_no_save_is_left_in_progress(make):
    log = []
    checkpointer, _ = make(log, async_save=False)
    checkpointer.save(1, last=False)
    assert log == [
        ("critic", "begin", 1), ("policy", "begin", 1), ("critic", "finish", 1), ("policy", "finish", 1),
        ("delete older", "ppo"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ({"policy_fails": {("begin", 1)}}, [("critic", "abandon", 1)]),
        ({"critic_fails": {("finish", 1)}}, [("policy", "abandon", 1), ("delete older", "ppo")]),
        ({"policy_fails": {("finish", 1)}}, [("critic", "finish", 1), ("delete older", "ppo")]),
    ],
)
def test_if_one_save_fails_the_other_is_deleted_and_training_goes_on(make, logged, fails, expected):
    """A critic's checkpoint without the policy's is deleted; a warning names the failure."""
    log = []
    checkpointer, _ = make(log, **fails)
    checkpointer.save(1, last=False)
    checkpointer.complete()
    assert [entry for entry in log if entry[1] != "begin"] == expected
    (message,) = [message for message in logged if "cannot" in message]
    assert "training continues, and there is no checkpoint yet" in message
    checkpointer.save(2, last=True)
    assert ("policy", "finish", 2) in log


def test_the_last_save_has_to_succeed(make):
    checkpointer, _ = make([], policy_fails={("finish", 3)})
    with pytest.raises(SaveFailed, match="policy cannot finish 3"):
        checkpointer.save(3, last=True)


def test_a_checkpoint_has_the_metrics_of_its_steps(make, logged):
    """As long as lines of metrics wait for space, none begins."""
    log, space = [], [False, True]

    def finish_writing():
        if not space.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpointer, _ = make(log, finish_writing=finish_writing)
    checkpointer.save(1, last=False)
    assert log == []
    (message,) = logged
    assert message.startswith("the checkpoint of step 1 was not saved, because metrics are not written: OSError")
    assert "bytes free of" in message and "training continues" in message
    checkpointer.save(2, last=True)
    assert ("policy", "finish", 2) in log


class Exports:
    """Logs what an exporter is asked for."""

    def __init__(self, log):
        self.log = log

    def __getattr__(self, name):
        return lambda *arguments, **options: self.log.append(("exporter", name, *map(str, arguments)))


def test_a_save_begins_after_the_export_before_it_and_replaces_its_own(make):
    log = []
    checkpointer, _ = make(log, async_save=True)
    checkpointer.exporter = Exports(log)
    checkpointer.save(1, last=False)
    checkpointer.save(2, last=False)
    assert [entry[1:] for entry in log if entry[0] in ("exporter", "policy")] == [
        ("wait",), ("discard", "1"), ("begin", 1), ("finish", 1), ("begin", "policy 1"),
        ("wait",), ("discard", "2"), ("begin", 2),
    ]  # fmt: skip
