"""A run on a streamed mixture that is killed and resumed learns from the batches of the uninterrupted run."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.end_to_end.launch import TINY, checkpoints, metrics

STEPS, SAVE_EVERY = 8, 3
# Of TINY's keys, those of a task have no effect on files.
OF_TASKS = ("data.num_documents", "data.num_demonstrations", "data.task", "data.sequence_length", "train.steps")
ARGUMENTS = (
    "train", *(key for key in TINY if not key.startswith(OF_TASKS)), "algorithm=sft", f"train.steps={STEPS}",
    f"train.save_every={SAVE_EVERY}", "data.mix=[{path: a.jsonl, weight: 2},{path: b.parquet}]", "data.streaming=true",
    "data.shuffle_block=7", "train.async_save=false",
)  # fmt: skip


def prepare(directory):
    directory.mkdir()
    records = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(40)]
    (directory / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = [{"question": f"{n}-{n}=", "answer": "0"} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), directory / "b.parquet", row_group_size=6)
    return directory


def manifest(directory, step):
    return json.loads((directory / "out" / "checkpoints" / "sft" / f"step-{step:06d}" / "manifest.json").read_text())


def test_a_killed_run_on_a_streamed_mixture_continues_in_the_middle(tmp_path, forks):
    whole, cut = prepare(tmp_path / "whole"), prepare(tmp_path / "cut")
    done = forks.run_ranks(whole, *ARGUMENTS, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done

    with forks.start(cut, *ARGUMENTS, ranks=2) as running:
        running.wait_until(lambda: f"step-{SAVE_EVERY:06d}" in checkpoints(cut / "out", "sft"), "the first checkpoint")
        running.kill()
    assert f"step-{STEPS:06d}" not in checkpoints(cut / "out", "sft"), "the kill came too late for this test"
    position = manifest(cut, SAVE_EVERY)["stage_state"]["loader"]
    assert position["batches"] == SAVE_EVERY
    assert position["streams"]["a"] == {"epoch": 0, "block": 2, "start": position["streams"]["a"]["start"], "place": 2}
    resumed = forks.run_ranks(cut, *ARGUMENTS, ranks=2)
    assert [rank.status for rank in resumed] == [0, 0], resumed

    assert metrics(cut / "out") == metrics(whole / "out")
    assert manifest(cut, STEPS)["stage_state"]["loader"] == manifest(whole, STEPS)["stage_state"]["loader"]
    assert "stage sft: algorithm=sft learns from prompts with answers" in done[0].err
