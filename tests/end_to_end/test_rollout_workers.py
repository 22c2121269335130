"""A worker of the user's own on two ranks: several turns in GRPO, PPO and evaluations, recorded and replayed."""

import pytest
import torch

from rl_megatron.algorithms.advantages import group_relative
from rl_megatron.rollouts.rows import read_rows, rollout_file
from tests.end_to_end.launch import TINY_GRPO, metrics

WORKER = """
async def second_try(client, record, sampling, hint=" no, "):
    history = client.history()
    await history.complete(sampling)
    if history.messages[-1]["content"] != record["answer"]:
        history.add_reward(-0.5)
        history.extend([{"role": "user", "content": hint}])
        await history.complete(sampling)
    return [history.trajectory()]


async def fails(client, record, sampling):
    raise OSError("the world has ended")


class SomeFail:
    # The third sample of each prompt fails; evaluations have two.
    def __init__(self):
        self.seen = {}

    async def rollout(self, client, record, sampling):
        number = self.seen[record["prompt"]] = self.seen.get(record["prompt"], -1) + 1
        if number == 2:
            raise OSError("the world has ended")
        return await second_try(client, record, sampling)


def even(completion_ids, turns, environment_reward, **_):
    assert 1 <= len(turns) <= 2 and environment_reward in (0.0, -0.5)
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""
OPTIONS = (
    *TINY_GRPO, "rollout.worker=worker.py:second_try", "reward.functions=[{path: worker.py, name: even}]",
    "rollout.save_every=1",
)  # fmt: skip
# What reads the score of each function, and what draws tokens at random.
DECOUPLED = (
    *OPTIONS, "parallel.tensor=2", "algorithm.advantage_estimator=group_decoupled", "loss.use_clip_cov=true",
    "loss.clip_cov_ratio=0.2", "loss.clip_cov_min=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forks):
    """The directory of a run of GRPO on two ranks."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "worker.py").write_text(WORKER)
    ranks = forks.run_ranks(directory, "train", *DECOUPLED, ranks=2)
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err
    return directory


def test_trajectories_have_their_turns_and_both_rewards(trained):
    lines = metrics(trained / "out")
    steps = [line for line in lines if line["kind"] == "train"]
    assert all(1.9 < line["turns"] <= 2 and line["failed_trajectories"] == 0 for line in steps)
    assert all(line["mismatch_max"] < 1e-4 and line["grad_norm"] > 0 for line in steps)
    assert all(0.1 < line["covariance_fraction"] <= 0.2 for line in steps)
    assert all(-0.5 <= line["reward"] <= 1 and line["reward"] == pytest.approx(line["reward_even_score"] - 0.5, abs=0.1)
               for line in steps)  # fmt: skip
    assert any("reward" in line and "turns" in line for line in lines if line["kind"] == "eval")


def test_a_replay_of_turns_gives_the_same_metrics(trained, tmp_path, forks):
    (tmp_path / "worker.py").write_text(WORKER)
    recorded = trained / "out" / "rollouts" / "grpo"
    ranks = forks.run_ranks(tmp_path, "train", *DECOUPLED, f"rollout.replay={recorded}", ranks=2)
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err
    names = ("loss", "grad_norm", "reward", "advantage_max", "covariance_fraction")
    first, second = (
        [line for line in metrics(each / "out") if line["kind"] == "train"] for each in (trained, tmp_path)
    )
    assert [[line[name] for name in names] for line in first] == [[line[name] for name in names] for line in second]


def test_ppo_learns_from_turns(tmp_path, forks):
    (tmp_path / "worker.py").write_text(WORKER)
    kl_cov = ("loss.use_kl_cov=true", "loss.kl_cov_ratio=0.1", "algorithm.updates_per_rollout=2")
    done = forks.run(tmp_path, "train", *OPTIONS, "algorithm=ppo", "train.steps=1", *kl_cov)
    assert done.status == 0, done.err
    (step,) = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert step["turns"] > 1.9 and step["critic_loss"] > 0
    assert step["covariance_fraction"] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="synchronous"),
        pytest.param(("rollout.async_enabled=true", "generation.engine=transformers"), id="asynchronous"),
    ],
)
def test_the_samples_beside_one_that_failed_are_learned_from(tmp_path, forks, options):
    (tmp_path / "worker.py").write_text(WORKER)
    failing = ("rollout.worker=worker.py:SomeFail", "rollout.on_failure=mask_sample", "train.eval_every=0")
    done = forks.run(tmp_path, "train", *OPTIONS, *failing, "train.steps=2", *options)
    assert done.status == 0, done.err
    steps = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert [(line["failed_trajectories"], line["masked_groups"]) for line in steps] == [(4, 0)] * 2
    assert all(line["grad_norm"] > 0 and abs(line["advantage_mean"]) < 1 for line in steps)
    rows = [row for step in (1, 2) for row in read_rows(rollout_file(tmp_path / "out/rollouts/grpo", step))]
    for first in range(0, len(rows), 4):
        weights = [row["weight"] for row in rows[first : first + 4]]
        rewards = torch.tensor([row["reward"] for row in rows[first : first + 4] if row["weight"]])
        assert weights.count(0.0) == 1
        found = [row["advantages"] for row in rows[first : first + 4] if row["weight"]]
        for advantages, wanted in zip(found, group_relative(rewards, 3).tolist(), strict=True):
            assert advantages == pytest.approx([wanted] * len(advantages))


def test_a_worker_that_fails_ends_the_run_and_names_the_record(tmp_path, forks):
    (tmp_path / "worker.py").write_text(WORKER)
    failed = forks.run(tmp_path, "train", *OPTIONS, "rollout.worker=worker.py:fails", "rollout.retries=1")
    assert failed.status == 1
    assert "the rollout worker raised OSError: the world has ended" in failed.err and "attempt 2 of 2" in failed.err
