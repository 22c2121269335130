"""GRPO that is resumed under another layout goes on with the same prompts, seeds and learning rates."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.launch import TINY_GRPO, metrics

STEPS, SAVED = 6, 3
# A reward that differs among the completions of an untrained model, so that the loss is not zero.
REWARD = """
def even(completion_ids, **_):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""
RUN = (
    "train", *TINY_GRPO, f"train.steps={STEPS}", f"train.save_every={SAVED}", "train.keep_checkpoints=9",
    "train.eval_every=0", "model.num_layers=2",
    "train.global_batch_size=16", "loss.reference_policy_kl_penalty=0.05", "optimizer.warmup_steps=2",
)  # fmt: skip


def _record_rollouts() -> None:
    """Let rank 0 write the seed, the prompts and the completions of each rollout to a file."""
    from rl_megatron.generation.synced_engine import SyncedEngine

    complete = SyncedEngine.complete

    def recorded(self, requests):
        completions = complete(self, requests)
        if os.environ.get("RANK", "0") == "0":
            asked = zip(*((request.seed, request.prompt) for request in requests), strict=True)
            with Path("rollouts.jsonl").open("a") as file:
                file.write(json.dumps([*asked, [each.ids for each in completions]]) + "\n")
        return completions

    SyncedEngine.complete = recorded


def run(directory, forks, ranks, *layout):
    """Run under a layout; return the training metrics and the rollouts, by step."""
    reward = directory.parent / "even.py"
    reward.write_text(REWARD)
    (directory / "rollouts.jsonl").unlink(missing_ok=True)
    done = forks.run_ranks(
        directory,
        *RUN,
        *layout,
        f"reward.functions=[{{path: {reward}, name: even}}]",
        ranks=ranks,
        before=_record_rollouts,
    )
    assert [rank.status for rank in done] == [0] * ranks, done
    lines = [line for line in metrics(directory / "out") if line["kind"] == "train"]
    return lines, list(map(json.loads, (directory / "rollouts.jsonl").read_text().splitlines()))


@pytest.mark.change
@pytest.mark.parametrize(
    ("before", "after"),
    [((1, "parallel.tensor=1"), (2, "parallel.tensor=1")), ((2, "parallel.tensor=2"), (2, "parallel.pipeline=2"))],
    ids=["data parallel 1 to 2", "tensor parallel 2 to pipeline parallel 2"],
)
def test_prompts_seeds_and_learning_rates_go_on_under_another_layout(tmp_path, forks, before, after):
    whole, other = tmp_path / "whole", tmp_path / "other"
    whole.mkdir()
    expected, wanted = run(whole, forks, *before)
    shutil.copytree(whole, other)
    shutil.rmtree(other / "out" / "checkpoints" / "grpo" / f"step-{STEPS:06d}")
    found, rollouts = run(other, forks, *after)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["lr"] for line in found] == [line["lr"] for line in expected]
    assert found[:SAVED] == expected[:SAVED]
    drawn = wanted[-len(rollouts) :]  # of the steps after the checkpoint, and of the evaluation at the end
    assert [(seed, prompts) for seed, prompts, _ in rollouts] == [(seed, prompts) for seed, prompts, _ in drawn]
    flipped = [sum(map(_differ, *pair)) for pair in zip((r[2] for r in rollouts), (d[2] for d in drawn), strict=True)]
    assert flipped[0] == 0, "the first rollout after the checkpoint has other tokens"
    equal = next((step for step, flips in enumerate(flipped) if flips), len(flipped))
    for line, reference in list(zip(found[SAVED:], expected[SAVED:], strict=True))[:equal]:
        assert reference["loss"] != 0 and reference["grad_norm"] > 0
        assert line["loss"] == pytest.approx(reference["loss"], abs=1e-6), f"flips: {flipped}"
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-4), f"flips: {flipped}"


def _differ(first, second):
    return first != second
