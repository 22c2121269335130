"""Runs whose loss is NaN in some batches: they leave these out, go back, or give up, as the configuration says."""

import json

import pytest

from tests.end_to_end.launch import TINY, metrics

RUN = ("train", "algorithm=sft", *TINY, "train.steps=6", "train.save_every=2", "train.async_save=false",
       "train.keep_checkpoints=9", "--config-dir", ".", "plugins=[bad_batches]")  # fmt: skip
# The loss of chosen batches is NaN on the ranks that have their first sequence.
BAD_BATCHES = """
from rl_megatron.runs.stage import Stage
from rl_megatron.losses import NLLLoss

class Bad(NLLLoss):
    def evaluate(self, *args, **inputs):
        loss, metrics = super().evaluate(*args, **inputs)
        return loss * float("nan"), metrics

def train(self, step, batch, loss_fn, model=None, before=Stage.train):
    is_bad = self.batch_number(step) in BATCHES
    return before(self, step, batch, Bad() if is_bad else loss_fn, model)

Stage.train = train
"""
# The batches of a run that never fails, and leaves out batches 3 and 4.
WITHOUT_THEM = """
from rl_megatron.runs.stage import Stage

Stage.batch_number = lambda self, step: step + 2 * (step > 2)
"""


def run(directory, forks, plugin, *overrides, ranks=2):
    directory.mkdir()
    (directory / "bad_batches.py").write_text(plugin)
    return forks.run_ranks(directory, *RUN, *overrides, ranks=ranks)


@pytest.fixture
def results(tmp_path, forks):
    def of(name, batches, *overrides):
        directory = tmp_path / name
        plugin = WITHOUT_THEM if batches is None else f"BATCHES = {batches}\n{BAD_BATCHES}"
        done = run(directory, forks, plugin, *overrides)
        lines = metrics(directory / "out")
        return done, lines, directory / "out" / "checkpoints" / "sft"

    return of


def test_a_run_goes_back_and_leaves_out_the_batches_since(results):
    done, lines, saved = results("back", (4,), "train.on_nonfinite=roll_back")
    assert [rank.status for rank in done] == [0, 0], done
    assert "step 4: the loss is nan" in done[0].err and "going back to step 2" in done[0].err
    wanted, of_wanted, _ = results("wanted", None)
    assert [rank.status for rank in wanted] == [0, 0], wanted
    assert lines == of_wanted
    manifest = json.loads((saved / "step-000006" / "manifest.json").read_text())
    state = manifest["stage_state"]
    assert state["roll_back"] == {"batches_skipped": 2} and state["loader"]["batches"] == 8


def test_a_run_gives_up_after_going_back_too_often(results):
    done, lines, _ = results("often", range(4, 99), "train.on_nonfinite=roll_back", "train.max_nonfinite_steps=2")
    assert [rank.status for rank in done] == [1, 1], done
    assert "has gone back to step 2 2 times already" in done[0].err and "the newest checkpoint is out" in done[0].err
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]


def test_a_run_skips_a_step_and_goes_on(results):
    done, lines, _ = results("skip", (4,), "train.on_nonfinite=skip")
    assert [rank.status for rank in done] == [0, 0], done
    steps = {line["step"]: line for line in lines if line["kind"] == "train"}
    assert [steps[step]["skipped_steps"] for step in range(1, 7)] == [0, 0, 0, 1, 0, 0]
    assert steps[4]["updated"] == 0 and "loss" not in steps[4]
    assert done[0].err.count("an optimizer step is skipped") == 1 and "an optimizer step" not in done[1].err
