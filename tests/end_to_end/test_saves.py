"""Checkpoints of a run that is killed while it saves, of one whose disk is full, and checkpoints that are damaged."""

import json
import random
import shutil
import subprocess
import sys
import time

from tests.end_to_end.launch import TINY, checkpoints, metrics
from tests.end_to_end.test_resume import weights
from tests.forkserver import REPOSITORY, environment

KILLS = {True: 20, False: 8}  # nightly, and otherwise
STEPS = 40
ARGUMENTS = (
    "train", "algorithm=sft", *(o for o in TINY if o != "train.steps=3"), "data.num_eval_examples=2",
    f"train.steps={STEPS}", "train.save_every=1",
)  # fmt: skip


def kill_in_a_save(running, stage, saves, delay):
    """Kill the run `delay` seconds after the directory of its save number `saves` appears.

    Saves are counted by their names, because only one is written at a time.

    Returns:
        Whether the save was still being written.
    """
    seen = set()
    deadline = time.monotonic() + 120
    while len(seen) < saves:
        assert running.is_running and time.monotonic() < deadline, f"the run ended after {len(seen)} saves"
        seen |= {path.name for path in stage.glob("*.incomplete")}
        time.sleep(0.0005)
    time.sleep(delay)
    running.kill()
    return any(stage.glob("*.incomplete"))


def test_a_run_killed_many_times_while_saving_ends_with_the_same_bits(tmp_path, forks, is_nightly):
    kills = KILLS[is_nightly]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for directory in (whole, cut):
        directory.mkdir()
    done = forks.run_ranks(whole, *ARGUMENTS, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done

    generator = random.Random(0)
    stage = cut / "out" / "checkpoints" / "sft"
    hits, newest = 0, []
    for _ in range(kills):
        with forks.start(cut, *ARGUMENTS, ranks=2) as running:
            for path in stage.glob("*.incomplete"):
                shutil.rmtree(path, ignore_errors=True)  # of the last kill, not a new save
            hits += kill_in_a_save(running, stage, generator.choice((1, 1, 2)), generator.uniform(0, 0.03))
        complete = [name for name in checkpoints(cut / "out", "sft") if name.count(".") == 0]
        newest.append(max(complete, default="step-000000"))
    assert newest == sorted(newest), "a complete checkpoint disappeared"
    assert newest[-1] < f"step-{STEPS:06d}", "the kills came too late for this test"
    assert hits >= kills // 4, f"{hits} of {kills} kills came while a save was being written"
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
    print(f"{hits} of {kills} kills in a save; the newest checkpoints were {newest}")


SHORT = (*ARGUMENTS[:2], *(o for o in TINY if o != "train.steps=3"), "train.save_every=2", "train.eval_every=2")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_full_disk_keeps_the_last_checkpoint_and_a_changed_byte_is_found(tmp_path, forks):
    """One run ends, continues on a full disk, is refused after a checkpoint's file changed, and resumes from an older
    checkpoint."""
    stage = tmp_path / "out" / "checkpoints" / "sft"
    done = forks.run_ranks(tmp_path, *SHORT, "train.steps=4", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    small = (stage / "step-000004" / "__0_0.distcp").stat().st_size // 2
    with forks.start(tmp_path, *SHORT, "train.steps=8", ranks=2, largest_file=small) as running:
        full = running.finish_ranks()
    assert [rank.status for rank in full] == [1, 1], full
    warning, error = (
        [line for line in full[0].err.splitlines() if "could not be saved" in line and f"step-{step:06d}" in line]
        for step in (6, 8)
    )
    newest = f"the newest checkpoint is {stage.relative_to(tmp_path) / 'step-000004'}"
    assert len(warning) == 1 and f"training continues, and {newest}" in warning[0]
    assert len(error) == 1 and error[0].startswith("error: ") and error[0].endswith(newest)
    assert "File too large" in error[0] and "bytes free of" in error[0]
    assert checkpoints(tmp_path / "out", "sft") == ["step-000002", "step-000004"]

    flip_a_bit(stage / "step-000004" / "__0_0.distcp")
    before = metrics(tmp_path / "out")
    refused = forks.run_ranks(tmp_path, *SHORT, "train.steps=8", ranks=2)
    assert [rank.status for rank in refused] == [2, 2], refused
    (line,) = [line for line in refused[0].err.splitlines() if line.startswith("error: ")]
    relative = stage.relative_to(tmp_path)
    assert f"checkpoint {relative / 'step-000004'} is damaged: __0_0.distcp has changed" in line
    assert (
        f"the newest undamaged checkpoint is {relative / 'step-000002'}; remove {relative / 'step-000004'} to" in line
    )
    assert metrics(tmp_path / "out") == before
    assert forks.run(tmp_path, "inspect", str(stage / "step-000004")).status == 2

    shutil.rmtree(stage / "step-000004")
    again = forks.run_ranks(tmp_path, *SHORT, "train.steps=8", ranks=2)
    assert [rank.status for rank in again] == [0, 0], again
    assert checkpoints(tmp_path / "out", "sft") == ["step-000006", "step-000008"]
    check_inspect(tmp_path, forks)


def check_inspect(directory, forks):
    """Run `inspect` on the checkpoints of the test above and check its output."""
    stage = directory / "out" / "checkpoints" / "sft"
    shown = forks.run(directory, "inspect", str(stage / "step-000008"))
    assert shown.status == 0, shown.err
    for words in ("8 of stage sft", "language model", "20,576 parameters", "exp_avg", "verified", "accuracy"):
        assert words in shown.out, shown.out
    listed = forks.run(directory, "inspect", "out")
    assert "step-000006" in listed.out and "newest" in listed.out and "best accuracy" in listed.out
    found = json.loads(forks.run(directory, "inspect", str(stage / "step-000008"), "--json", "--no-verify").out)
    assert found["step"] == 8 and found["num_parameters"] == 20576 and found["stage_state"]["schedule"] == {"policy": 8}
    assert {file["state"] for file in found["files"].values()} == {"not read"}
    assert found["config"] == (directory / "out" / "config.yaml").read_text()
    for path in ("out/checkpoints/sft/step-000009", "configs", "out/tokenizer"):
        refused = forks.run(directory, "inspect", path)
        assert refused.status == 2 and len(refused.err.splitlines()) == 1 and path in refused.err, refused
    program = (
        "import sys\nfrom rl_megatron.cli import main\n"
        f"assert main(['inspect', {str(stage / 'step-000008')!r}]) == 0\n"
        "print('\\n', sorted(name for name in sys.modules if name.startswith('megatron')))"
    )
    alone = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert alone.stdout.splitlines()[-1].strip() == "[]", alone
