"""Checkpoints as a run writes them: killed while it does, on a disk that fills, damaged afterwards."""

import random
import shutil
import time

from tests.end_to_end.launch import TINY, checkpoints, metrics
from tests.end_to_end.test_resume import weights

KILLS = 20
STEPS = 40
ARGUMENTS = (
    "train", "algorithm=sft", *(o for o in TINY if o != "train.steps=3"), "data.num_eval_rows=2",
    f"train.steps={STEPS}", "train.save_every=1",
)  # fmt: skip


def kill_in_a_save(running, stage, saves, delay):
    """Kills `delay` seconds after the directory of the run's save number `saves` has appeared; whether the save was
    still being written. Saves come one at a time: their names tell them apart."""
    seen = set()
    deadline = time.monotonic() + 120
    while len(seen) < saves:
        assert running.is_running and time.monotonic() < deadline, f"the run ended after {len(seen)} saves"
        seen |= {path.name for path in stage.glob("*.incomplete")}
        time.sleep(0.0005)
    time.sleep(delay)
    running.kill()
    return any(stage.glob("*.incomplete"))


def test_killed_twenty_times_in_its_saves_a_run_ends_bitwise_as_if_nothing_had_happened(tmp_path, forks):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for directory in (whole, cut):
        directory.mkdir()
    done = forks.run_ranks(whole, *ARGUMENTS, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done

    moments = random.Random(0)
    stage = cut / "out" / "checkpoints" / "sft"
    hits, newest = 0, []
    for _ in range(KILLS):
        with forks.start(cut, *ARGUMENTS, ranks=2) as running:
            for path in stage.glob("*.incomplete"):
                shutil.rmtree(path, ignore_errors=True)  # of the kill before, so as not to be taken for a new one
            hits += kill_in_a_save(running, stage, moments.choice((1, 1, 2)), moments.uniform(0, 0.03))
        complete = [name for name in checkpoints(cut / "out", "sft") if name.count(".") == 0]
        newest.append(max(complete, default="step-000000"))
    assert newest == sorted(newest), "a checkpoint that was complete is gone"
    assert newest[-1] < f"step-{STEPS:06d}", "killed too late to tell anything"
    assert hits >= KILLS // 2, f"{hits} of {KILLS} kills came while a save was being written"
    done = forks.run_ranks(cut, *ARGUMENTS, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done

    assert metrics(cut / "out") == metrics(whole / "out")
    names = checkpoints(cut / "out", "sft")
    assert names == checkpoints(whole / "out", "sft") == [f"step-{step:06d}" for step in (STEPS - 1, STEPS)]
    found, expected = (
        weights(directory / "out" / "checkpoints" / "sft" / names[-1], tmp_path / "tensors.pt")
        for directory in (cut, whole)
    )
    assert found.keys() == expected.keys() and len(found) > 5
    assert all((found[name] == expected[name]).all() for name in found)
    print(f"{hits} of {KILLS} kills in a save; the newest checkpoints were {newest}")
