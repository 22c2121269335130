"""Runs that compute common prefixes once learn the same as runs that do not."""

from __future__ import annotations

import json

import pytest

from rl_megatron.config.metrics import is_cost
from tests.end_to_end.launch import TINY_GRPO, metrics
from tests.end_to_end.test_pairs import PAIRS

# Sequences share other packs then, so only the last bits of sums change.
RUNS = {
    "grpo": (*TINY_GRPO, "train.steps=2"),
    "dpo": (*PAIRS, "algorithm=dpo", "loss=dpo", "train.batching=packed", "train.steps=2"),
}


@pytest.mark.parametrize("name", RUNS)
def test_groups_and_pairs_share_their_prompts(tmp_path, forks, name):
    records = [{"question": f"Is {n} a number?", "chosen": f"yes, {n}.", "rejected": "no"} for n in range(10, 60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lines = {}
    for setting in ("off", "auto"):
        arguments = ("train", *RUNS[name], f"train.share_prefixes={setting}", f"output_dir={setting}")
        finished = forks.run_ranks(tmp_path, *arguments, ranks=2)
        assert [rank.status for rank in finished] == [0, 0], finished
        lines[setting] = metrics(tmp_path / setting)
    for alone, shared in zip(lines["off"], lines["auto"], strict=True):
        if alone["kind"] == "train":
            assert alone.pop("packing_efficiency") <= 1 < shared.pop("packing_efficiency")
        wanted, found = (
            {key: value for key, value in line.items() if not is_cost(key) and key not in ("stage", "kind")}
            for line in (alone, shared)
        )
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
