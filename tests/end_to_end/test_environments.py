"""GRPO learns from an environment on two ranks, and every failure of the environment ends as the configuration says."""

import os
import re
from pathlib import Path

from tests.end_to_end.launch import TINY_GRPO, metrics

WORLD = """
import os, time
from rl_megatron import EnvironmentStep

BAD = {"77-50=": "raise", "76-46=": "hang", "72-75=": "nan", "71-52=": "die", "60+16=": "megabytes", "46-20=": "text"}


class World:
    def __init__(self, bad=tuple(BAD.values()), turns=2):
        self.bad, self.turns = bad, turns
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")

    def reset(self, record):
        self.how = BAD.get(record["prompt"])
        if self.how not in self.bad:
            self.how = "well"

    def step(self, answer):
        self.turns -= 1
        if self.how == "raise":
            raise ValueError("the world has ended")
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "nan":
            return EnvironmentStep("no", reward=float("nan"))
        if self.how == "die":
            os._exit(5)
        if self.how == "megabytes":
            return EnvironmentStep("x" * 4_000_000)
        if self.how == "text":
            return "go on"
        reward = sum(character.isdigit() for character in answer) / 4
        return EnvironmentStep(" no, ", reward=reward, done=self.turns == 0, metadata={"said": answer})


def said(metadata, turns, **_):
    assert metadata["said"] == turns[-1]
    return 0.0
"""
OPTIONS = (
    *TINY_GRPO, "rollout.worker=conversation", "rollout.environment.name=world.py:World",
    "rollout.environment.seconds_per_call=1", "rollout.environment.processes=2",
    "reward.functions=[{path: world.py, name: said}]",
)  # fmt: skip
MANY_PROMPTS = ("algorithm.prompts_per_step=16", "train.global_batch_size=32", "train.steps=1")


def world(directory: Path) -> Path:
    (directory / "world.py").write_text(WORLD)
    return directory


def processes_of(directory: Path) -> set[int]:
    return set(map(int, (directory / "pids").read_text().split()))


def test_every_failure_masks_its_group_and_the_others_are_learned_from(tmp_path, forks):
    options = (*OPTIONS, *MANY_PROMPTS, "rollout.on_failure=mask")
    ranks = forks.run_ranks(world(tmp_path), "train", *options, ranks=2)
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err
    for message in (
        "World.step() in a worker process raised ValueError: the world has ended (",
        "World.step() in a worker process took longer than 1 seconds",
        "World.step() in a worker process returned the reward nan",
        "World.step() in a worker process ended its process, which exited with status 5",
        "World.step() in a worker process returned 4000",
        "World.step() in a worker process returned str 'go on'",
        "the trajectory begins again, which does not count as an attempt",
    ):
        assert message in ranks[0].err, message
    failures = [line for line in ranks[0].err.splitlines() if "attempt 1 of 1" in line]
    assert len(failures) == 6 * 4 and all("raised HostedCallFailed: environment " in line for line in failures)
    assert all(re.search(r"trajectory \d+-\d+(r\d+)? \(.+\): the rollout worker", line) for line in failures)
    (step,) = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert step["failed_trajectories"] == 6 * 4 and step["turns"] == 2
    assert step["grad_norm"] > 0 and step["mismatch_max"] < 1e-4
    pids = processes_of(tmp_path)
    assert len(pids) > 2 and not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_an_environment_that_never_ends_is_truncated(tmp_path, forks):
    options = (*OPTIONS, "rollout.environment.kwargs={turns: -1, bad: []}", "rollout.max_turns=3", "train.steps=1")
    done = forks.run(world(tmp_path), "train", *options)
    assert done.status == 0, done.err
    (step,) = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert step["turns"] == 3 and step["failed_trajectories"] == 0


def test_a_failure_ends_the_run_on_all_ranks(tmp_path, forks):
    options = (*OPTIONS, *MANY_PROMPTS, "rollout.environment.kwargs={bad: [die]}")
    ranks = forks.run_ranks(world(tmp_path), "train", *options, ranks=2)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "raised HostedCallFailed: environment " in ranks[0].err and "exited with status 5" in ranks[0].err
    assert not [pid for pid in processes_of(tmp_path) if os.path.exists(f"/proc/{pid}")]


def test_an_environment_that_cannot_be_loaded_is_refused_on_all_ranks(tmp_path, forks):
    ranks = forks.run_ranks(world(tmp_path), "train", *OPTIONS, "rollout.environment.kwargs={size: 3}", ranks=2)
    assert [rank.status for rank in ranks] == [2, 2]
    assert any("does not take the arguments of rollout.environment.kwargs (size)" in rank.err for rank in ranks)
    assert not (tmp_path / "out").exists()
