"""A run that is killed and started again with the same command ends with the same bits as an undisturbed run."""

import math
import shutil

import pytest
import torch
import yaml
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.end_to_end.launch import TINY, Command, checkpoints, metrics

STEPS = 8
SAVE_EVERY = 3
# SFT learns sums of numbers up to 3 fast enough that GRPO gets different rewards.
STAGES = {
    "sft": {
        "algorithm": {"name": "sft"},
        "optimizer": {"lr": 0.02, "warmup_steps": 2},
        "train": {
            "steps": STEPS,
            "save_every": SAVE_EVERY,
            "eval_every": 4,
            "global_batch_size": 32,
            "micro_batch_size": 8,
        },
    },
    "grpo": {
        "algorithm": {"name": "grpo", "prompts_per_step": 8, "samples_per_prompt": 8, "updates_per_rollout": 2},
        "loss": {"reference_policy_kl_penalty": 0.05},
        "train": {
            "steps": STEPS, "save_every": SAVE_EVERY, "global_batch_size": 64, "micro_batch_tokens": 96,
            "share_prefixes": "auto",
        },
    },
    "ppo": {
        "algorithm": {
            "name": "ppo",
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "critic_warmup_steps": 1,
            "critic_optimizer": {"lr": 0.01},
        },
        "loss": {"reference_policy_kl_penalty": 0.05, "use_kl_in_reward": True},
        "train": {
            "steps": STEPS, "save_every": SAVE_EVERY, "global_batch_size": 32, "micro_batch_tokens": 96,
            "share_prefixes": "auto",
        },
    },
}  # fmt: skip
CRITIC = "ppo.critic"  # the directory of its checkpoints, beside that of the policy's
ARGUMENTS = (
    "train", "experiment=killed", "--config-dir", "configs", *(o for o in TINY if not o.startswith("train.")),
    "data.task.max_operand=3", "data.task.heldout_fraction=0.2", "data.num_eval_examples=4", "train.keep_checkpoints=9",
)  # fmt: skip


def prepare(directory):
    (directory / "configs" / "experiment").mkdir(parents=True)
    tree = yaml.safe_dump({"stages": STAGES}, sort_keys=False)
    (directory / "configs" / "experiment" / "killed.yaml").write_text("# @package _global_\n" + tree)
    return directory


def reached(out, stage, step):
    return any(line["stage"] == stage and line["step"] >= step and line["kind"] == "train" for line in metrics(out))


def kill_after_a_checkpoint(directory, stage, running):
    """Kill the run when `stage` has its first checkpoint and has recorded a step after it."""
    out, first = directory / "out", f"step-{SAVE_EVERY:06d}"

    def is_after():
        return first in checkpoints(out, stage) and reached(out, stage, SAVE_EVERY + 1)

    with running:
        running.wait_until(is_after, f"step {SAVE_EVERY + 1} of {stage} and {first}")
        running.kill()
    assert first in checkpoints(out, stage)
    assert f"step-{STEPS:06d}" not in checkpoints(out, stage), "the kill came too late for this test"


def cosine(taken, steps):
    return (1 + math.cos(math.pi * taken / steps)) / 2


def weights(checkpoint, scratch):
    """Return every tensor of a checkpoint by name, moments included."""
    dcp_to_torch_save(checkpoint, scratch)
    return {name: value for name, value in torch.load(scratch, weights_only=False).items() if torch.is_tensor(value)}


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.nightly, id="alone"), pytest.param(2, id="under the launcher")],
)
def test_a_killed_run_resumes_and_ends_with_the_same_bits(tmp_path, forks, ranks):
    """The first kill hits the real command, or the launcher if there are two ranks."""
    whole, cut = prepare(tmp_path / "whole"), prepare(tmp_path / "cut")
    done = forks.run_ranks(whole, *ARGUMENTS, ranks=ranks)
    assert [rank.status for rank in done] == [0] * ranks, done

    first = Command(cut, *ARGUMENTS) if ranks == 1 else forks.launch(cut, *ARGUMENTS, ranks=ranks)
    kill_after_a_checkpoint(cut, "sft", first)
    assert not checkpoints(cut / "out", "grpo"), "the kill came too late for this test"
    saved = cut / "out" / "checkpoints" / "sft"
    # The resumed run does not save at this step, so that nothing but its clean-up removes the incomplete save.
    shutil.copytree(saved / f"step-{SAVE_EVERY:06d}", saved / f"step-{SAVE_EVERY + 1:06d}.incomplete")
    kill_after_a_checkpoint(cut, "grpo", forks.start(cut, *ARGUMENTS, ranks=ranks))
    assert not [name for name in checkpoints(cut / "out", "sft") if name.endswith(".incomplete")]
    kill_after_a_checkpoint(cut, "ppo", forks.start(cut, *ARGUMENTS, ranks=ranks))
    finished = forks.run_ranks(cut, *ARGUMENTS, ranks=ranks)
    assert [rank.status for rank in finished] == [0] * ranks, finished

    expected, found = metrics(whole / "out"), metrics(cut / "out")
    assert found == expected
    assert [line["step"] for line in found if (line["stage"], line["kind"]) == ("grpo", "train")] == [
        *range(1, STEPS + 1)
    ]
    informative = [line["step"] for line in found if line["stage"] == "grpo" and line.get("informative_groups", 0) > 0]
    assert min(informative, default=STEPS) <= SAVE_EVERY < max(informative, default=0), "GRPO got no different rewards"
    ppo = [line for line in found if line["stage"] == "ppo" and line["kind"] == "train"]
    assert ppo[0]["critic_lr"] == pytest.approx(0.01)
    assert ppo[-1]["critic_lr"] == pytest.approx(0.01 * cosine(STEPS - 1, STEPS))
    assert ppo[-1]["lr"] == pytest.approx(1e-3 * cosine(STEPS - 2, STEPS - 1)), "the critic's warm-up step counts"
    values = [line["critic_values_mean"] for line in ppo]
    assert len(set(values)) == STEPS, "the critic does not change in every step"
    for stage in (*STAGES, CRITIC):
        names = checkpoints(whole / "out", stage)
        assert checkpoints(cut / "out", stage) == names == ["step-000003", "step-000006", "step-000008"]
        first, second = (
            weights(directory / "out" / "checkpoints" / stage / names[-1], tmp_path / "tensors.pt")
            for directory in (whole, cut)
        )
        assert first.keys() == second.keys() and len(first) > 5
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.fast
def test_a_run_killed_while_saving_keeps_the_previous_checkpoint(tmp_path, forks):
    """The kill comes as soon as the directory of the second save appears."""
    directory = prepare(tmp_path)
    stage = directory / "out" / "checkpoints" / "sft"
    with forks.start(directory, *ARGUMENTS) as running:
        running.wait_until(lambda: list(stage.glob(f"step-{2 * SAVE_EVERY:06d}*")), "second save")
        running.kill()
    assert f"step-{SAVE_EVERY:06d}" in checkpoints(directory / "out", "sft")
    recorded = [line for line in metrics(directory / "out") if line["step"] <= SAVE_EVERY]
    again = forks.run(directory, *ARGUMENTS)
    assert again.status == 0, again.err
    assert checkpoints(directory / "out", "sft") == ["step-000003", "step-000006", "step-000008"]
    lines = [line for line in metrics(directory / "out") if line["stage"] == "sft"]
    assert lines[: len(recorded)] == recorded
    assert [line["step"] for line in lines if line["kind"] == "train"] == [*range(1, STEPS + 1)]


def test_a_run_killed_between_two_stages_starts_the_next_one(tmp_path, forks):
    directory = prepare(tmp_path)
    done = forks.run(directory, *ARGUMENTS)
    assert done.status == 0, done.err
    expected = metrics(directory / "out")
    for stage in ("grpo", "ppo", CRITIC):
        shutil.rmtree(directory / "out" / "checkpoints" / stage)
    again = forks.run(directory, *ARGUMENTS)
    assert again.status == 0, again.err
    assert metrics(directory / "out") == expected


def test_a_run_saves_by_time_and_says_if_it_begins_again(tmp_path, forks):
    by_time = ("train.save_every=0", "train.save_every_seconds=0.001", "train.steps=3")
    arguments = ("train", "algorithm=sft", *TINY, *by_time)
    first, _ = forks.run_ranks(tmp_path, *arguments, ranks=2)
    assert first.status == 0 and checkpoints(tmp_path / "out", "sft") == ["step-000002", "step-000003"], first
    assert "begins again" not in first.err + first.out
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "sft")
    second, _ = forks.run_ranks(tmp_path, *arguments, ranks=2)
    assert second.status == 0, second
    assert "an earlier start of this run ended before its first checkpoint" in second.err + second.out
