"""Asynchronous GRPO with an engine in a process of its own: ages are bounded, and runs are logged and go on exactly."""

import json
import os
import shutil
import signal

import pytest

from tests.end_to_end.launch import TINY_GRPO, metrics
from tests.end_to_end.listening import reached_from_outside, watched
from tests.end_to_end.test_engines import engines
from tests.end_to_end.weight_versions import difference_from_versions

REWARD = """
import asyncio


def even(completion_ids, **_):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


async def slow(client, record, sampling):
    await asyncio.sleep(0.2 + 0.2 * (len(record["prompt"]) % 3))
    history = client.history()
    await history.complete(sampling)
    return [history.trajectory()]


async def long(client, record, sampling):
    history = client.history()
    for _ in range(4):
        await history.complete(sampling)
        history.extend([{"role": "user", "content": " x"}])
        await asyncio.sleep(0.25)  # so that it lasts for several steps
    return [history.trajectory()]
"""
STEPS = 12
OPTIONS = (
    *TINY_GRPO, f"train.steps={STEPS}", "train.global_batch_size=16", "train.eval_every=0", "train.save_every=5",
    "generation.engine=transformers", "reward.functions=[{path: reward.py, name: even}]", "rollout.async_enabled=true",
)  # fmt: skip
PER_STEP = 4  # groups
# What depends on how fast processes are.
OF_SPEED = ("engine_idle", "trainer_idle", "running_groups", "ready_groups")


def log_of(directory):
    """Return the lines of the log of rollouts."""
    return [json.loads(line) for line in (directory / "out/rollouts/grpo/log.jsonl").read_text().splitlines()]


def trained(directory, without=()):
    lines = [line for line in metrics(directory / "out") if line["kind"] == "train"]
    return [{key: value for key, value in line.items() if key not in without} for line in lines]


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory, forks):
    """The directory of an asynchronous run on two ranks that nothing disturbs, and where its processes listened."""
    directory = tmp_path_factory.mktemp("asynchronous")
    (directory / "reward.py").write_text(REWARD)
    with (
        forks.start(directory, "train", *OPTIONS, "parallel.tensor=2", ranks=2) as running,
        watched(running.pids) as addresses,
    ):
        ranks = running.finish_ranks()
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err
    return directory, addresses


@pytest.fixture(scope="module")
def whole(watched_run):
    """The directory of the run."""
    return watched_run[0]


def test_only_this_machine_reaches_the_ranks_and_their_engine(watched_run):
    _, addresses = watched_run
    assert len(addresses) > 2 and reached_from_outside(addresses) == []


def test_every_group_is_learned_from_once_and_none_is_too_old(whole):
    log = log_of(whole)
    assert [line["step"] for line in log] == list(range(1, STEPS + 1))
    used = [group for line in log for group in line["used"]]
    assert [group["number"] for group in used] == list(range(STEPS * PER_STEP)), "in the order of the prompts"
    assert max(age for group in used for age in group["ages"]) == 1
    assert all(not line["dropped"] for line in log)
    steps = trained(whole)
    assert all(step["trajectory_age_max"] <= 1 and step["grad_norm"] > 0 for step in steps)
    assert steps[-1]["correction_ess"] < 1 and steps[-1]["sampling_importance_ratio"] != 1, "it is corrected for"
    for line, step in zip(log, steps, strict=True):
        versions = [version for group in line["used"] for version in group["versions"]]
        assert line["step"] - 2 <= min(versions) <= max(versions) <= line["step"] - 1
        assert step["weight_age_max"] == step["trajectory_age_max"], "one optimizer step is one version"


def test_every_token_has_the_logprob_of_the_weights_of_its_version(tmp_path, ranks, forks):
    """Also those of trajectories that went on when new weights arrived."""
    (tmp_path / "reward.py").write_text(REWARD)
    long = (
        "train.save_every=1", "train.keep_checkpoints=20", "generation.max_new_tokens=6", "optimizer.lr=1e-2",
        "optimizer.warmup_steps=0", "rollout.max_trajectory_age_steps=3", "rollout.worker=reward.py:long",
        "loss.reference_policy_kl_penalty=0", "train.micro_batch_tokens=512",
    )  # fmt: skip
    done = forks.run(tmp_path, "train", *OPTIONS, *long)
    assert done.status == 0, done.err
    (found,) = ranks.run(1, difference_from_versions, tmp_path / "out")
    assert found["mixed"] > 0 and found["tokens"] > 1000
    assert found["largest"] < 1e-4 and found["of_another"] > 100 * found["largest"]


def test_a_replay_gives_the_same_bits(whole, tmp_path, forks):
    (tmp_path / "reward.py").write_text(REWARD)
    replay = f"rollout.replay={whole / 'out/rollouts/grpo'}"
    ranks = forks.run_ranks(tmp_path, "train", *OPTIONS, "parallel.tensor=2", replay, ranks=2)
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err
    without = [name for name in trained(whole)[-1] if name.startswith(("gate_", "refit_"))]
    assert trained(tmp_path, without) == trained(whole, without)


def test_a_run_goes_on_with_another_division_of_the_devices(whole, tmp_path, forks):
    """As a job with ENGINE_NODES=auto does, when it is queued again. The last checkpoint is of step 12."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    same_reward = f"reward.functions=[{{path: {whole / 'reward.py'}, name: even}}]"
    more = ("generation.num_engines=2", f"train.steps={STEPS + 2}", same_reward)
    done = forks.run(tmp_path, "train", *OPTIONS, *more)
    assert done.status == 0, done.err
    numbers = [group["number"] for line in log_of(tmp_path) for group in line["used"]]
    assert numbers == list(range((STEPS + 2) * PER_STEP))
    steps = trained(tmp_path)
    assert steps[:STEPS] == trained(whole)
    divisions = [(step["trainer_devices"], step["engine_devices"]) for step in steps[STEPS - 1 :]]
    assert divisions == [(2, 1), (1, 2), (1, 2)]


def test_a_killed_run_learns_from_its_log_and_goes_on(tmp_path, forks):
    (tmp_path / "reward.py").write_text(REWARD)
    num_steps = 9
    slow = (*OPTIONS, "rollout.worker=reward.py:slow", "rollout.max_trajectory_age_steps=2", f"train.steps={num_steps}")
    with forks.start(tmp_path, "train", *slow) as running:
        log = tmp_path / "out/rollouts/grpo/log.jsonl"
        running.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 7, "the seventh step")
        running.kill()
    logged, before = log_of(tmp_path), trained(tmp_path)
    log.write_bytes(log.read_bytes() + b'{"step": 99, "us')  # a write that was cut off
    done = forks.run(tmp_path, "train", *slow)
    assert done.status == 0, done.err
    after = log_of(tmp_path)
    assert after[: len(logged)] == logged
    numbers = [group["number"] for line in after for group in line["used"]]
    assert numbers == list(range(num_steps * PER_STEP)), "nothing is left out, and nothing is learned from twice"
    assert trained(tmp_path)[: len(before)] == before, "the steps that were learned from before, to the bit"
    assert len(before) > 5, "it was killed after a checkpoint and further steps"


def test_a_killed_engine_is_started_again_and_its_requests_repeated(tmp_path, forks):
    (tmp_path / "reward.py").write_text(REWARD)
    num_steps = 6
    slow = (*OPTIONS, "rollout.worker=reward.py:slow", f"train.steps={num_steps}")
    with forks.start(tmp_path, "train", *slow) as running:
        for number in (1, 4):
            running.wait_until(lambda: len(trained(tmp_path)) >= number, f"step {number}")  # noqa: B023
            os.kill(engines(tmp_path)[0], signal.SIGKILL)
        done = running.finish()
    assert done.status == 0, done.err
    assert "starting the engines again (2 of at most 3 times)" in done.err
    numbers = [group["number"] for line in log_of(tmp_path) for group in line["used"]]
    assert numbers == list(range(num_steps * PER_STEP)) and engines(tmp_path) == []


def test_age_zero_is_the_synchronous_run_to_the_bit(tmp_path, forks):
    found = []
    for name, change in (("a", "rollout.max_trajectory_age_steps=0"), ("b", "rollout.async_enabled=false")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "reward.py").write_text(REWARD)
        done = forks.run(directory, "train", *OPTIONS, "train.steps=3", change)
        assert done.status == 0, done.err
        found.append(metrics(directory / "out"))
    assert found[0] == found[1]


@pytest.mark.parametrize("flight", ["true", "false"])
def test_over_sampling_drops_what_is_late_and_weights_of_the_engine_correct(flight, tmp_path, forks):
    (tmp_path / "reward.py").write_text(REWARD)
    options = (
        *OPTIONS, "rollout.worker=reward.py:slow", "rollout.over_sampling=1.5", "rollout.importance_correction=engine",
        f"rollout.in_flight_weight_updates={flight}", "algorithm=ppo", "algorithm.prompts_per_step=4", "train.steps=5",
        "algorithm.samples_per_prompt=4",
    )  # fmt: skip
    done = forks.run(tmp_path, "train", *options)
    assert done.status == 0, done.err
    log = [json.loads(line) for line in (tmp_path / "out/rollouts/ppo/log.jsonl").read_text().splitlines()]
    used = [group["number"] for line in log for group in line["used"]]
    dropped = [int(number) for line in log for number in line["dropped"]]
    assert len(used) == 5 * PER_STEP and dropped and not set(used) & set(dropped)
    steps = trained(tmp_path)
    assert all(step["old_logprobs_of_engine"] == 1 and step["mismatch_max"] == 0 for step in steps)
    assert any(step["probs_ratio_max"] > 1.0001 for step in steps), "the ratio is to the weights that sampled"
    if flight == "false":
        assert not any(step["partial_trajectories"] for step in steps)


def test_a_reward_that_fails_ends_the_run_on_all_ranks(tmp_path, forks):
    (tmp_path / "reward.py").write_text("def even(completion, **_):\n    raise OSError('no judge')\n")
    ranks = forks.run_ranks(tmp_path, "train", *OPTIONS, "parallel.tensor=2", ranks=2)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "raised OSError: no judge" in ranks[0].err and "Traceback" not in ranks[0].err
