"""Which checkpoints are kept: the newest, and the best by an eval metric."""

import pytest

from rl_megatron.checkpoint.directory import find_checkpoints, name_checkpoint, publish
from rl_megatron.checkpoint.retention import delete_older, find_best_checkpoint
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.metrics import HIGHER_IS_BETTER, is_better


def save(directory, step, evaluated_at=None, **measures):
    partial = directory / f"step-{step:06d}.incomplete"
    partial.mkdir(parents=True)
    (partial / "weights").write_text(str(step))
    results = {"results": {"measures": measures}, "evaluated_at": evaluated_at or step}
    publish(partial, directory / name_checkpoint(step), {"step": step, "model": {}, **results})


def names(directory):
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def test_every_eval_metric_has_a_direction():
    assert is_better("accuracy", 0.6, 0.5) and not is_better("accuracy", 0.5, 0.5)
    assert is_better("nll_per_token", 0.4, 0.5) and not is_better("nll_per_token", 0.6, 0.5)
    nan = float("nan")
    assert all(is_better(name, 0.0, nan) and not is_better(name, nan, 0.0) for name in HIGHER_IS_BETTER)


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 2), ("nll_per_token", 1)])
def test_the_best_so_far_is_never_deleted(tmp_path, metric, best):
    for step, value in enumerate((0.1, 0.9, 0.5, 0.2, 0.3), start=1):
        save(tmp_path, step, **{metric: value})
        delete_older(tmp_path, keep=1, keep_best=metric)
        assert names(tmp_path) == sorted({step, min(step, best)})
    delete_older(tmp_path, keep=1)
    assert names(tmp_path) == [5]


def test_the_newest_of_equal_checkpoints_is_best_and_old_evaluations_do_not_count(tmp_path):
    save(tmp_path, 1, accuracy=0.5)
    save(tmp_path, 2, accuracy=0.5)
    save(tmp_path, 3, evaluated_at=2, accuracy=0.9)
    save(tmp_path, 4)
    assert find_best_checkpoint(find_checkpoints(tmp_path), "accuracy").name == "step-000002"
    assert find_best_checkpoint(find_checkpoints(tmp_path), "nll_per_token") is None


def test_a_manifest_that_cannot_be_read_does_not_stop_a_run(tmp_path):
    save(tmp_path, 1, accuracy=0.9)
    save(tmp_path, 2, accuracy=0.5)
    (tmp_path / "step-000001" / MANIFEST).write_text("{")
    assert find_best_checkpoint(find_checkpoints(tmp_path), "accuracy").name == "step-000002"


def test_leftovers_of_interrupted_saves_and_deletions_are_deleted(tmp_path):
    save(tmp_path, 1)
    for suffix in (".incomplete", ".replaced", ".deleted"):
        (tmp_path / f"step-000002{suffix}").mkdir()
        (tmp_path / f"step-000002{suffix}" / "file").write_text("")
    delete_older(tmp_path, keep=1)
    assert names(tmp_path) == [1]
