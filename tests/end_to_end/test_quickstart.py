"""The quickstart, shortened to a few steps: its three stages run one after the other on two ranks."""

import json
import math

from tests.end_to_end.launch import metrics
from tests.end_to_end.listening import reached_from_outside, watched

SHORT = (
    "stages.pretrain.train.steps=3", "stages.sft.train.steps=2", "stages.grpo.train.steps=2",
    "data.num_documents=500", "data.num_eval_examples=4", "stages.grpo.algorithm.prompts_per_step=4",
    "stages.grpo.train.global_batch_size=32",
)  # fmt: skip


def test_a_shortened_quickstart_runs_its_stages_in_order_on_two_ranks(tmp_path, forks):
    given = ("experiment=quickstart", "parallel.tensor=2", *SHORT, "output_dir=out")
    with forks.start(tmp_path, "train", *given, ranks=2) as running, watched(running.pids) as addresses:
        done = running.finish_ranks()
    assert addresses and reached_from_outside(addresses) == []
    assert [rank.status for rank in done] == [0, 0], done
    lines = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert [(line["stage"], line["step"]) for line in lines] == [
        ("pretrain", 1), ("pretrain", 2), ("pretrain", 3), ("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2),
    ]  # fmt: skip
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["stages"]) == ["pretrain", "sft", "grpo"] and summary["world_size"] == 2
