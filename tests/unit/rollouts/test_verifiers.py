"""The rollout worker `verifiers`, with a library of the same form: rewards, failures, and many rollouts at once."""

import re
import time

import pytest

from rl_megatron.config.environments import EnvironmentConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.rollouts.verifiers_worker import VerifiersWorker, check_verifiers
from tests.unit.rollouts.engines import RandomTokens
from tests.unit.rollouts.fake_verifiers import write_library
from tests.unit.rollouts.test_agent import run

pytestmark = pytest.mark.change
GOOD = 'return found | {"reward": 0.5}'


def rollouts(tmp_path, monkeypatch, scored=GOOD, number=1, seconds=20.0, **options):
    """Return the results of an environment whose score is a statement."""
    monkeypatch.syspath_prepend(tmp_path)
    name = write_library(tmp_path, scored)
    worker = VerifiersWorker(EnvironmentConfig(name=name, processes=1, seconds_per_call=seconds))
    try:
        return run(tmp_path, "", number, worker=worker.rollout, **options)
    finally:
        worker.close()


def test_rewards_and_metrics_go_through(tmp_path, monkeypatch):
    scored = 'assert input["example_id"] == 0; return found | {"reward": ord(input["prompt"][0]["content"][0]) - 0.5}'
    results = rollouts(tmp_path, monkeypatch, scored, number=2)
    for number, result in enumerate(results):
        (trajectory,) = result.trajectories
        (turn,) = trajectory.turns
        assert trajectory.reward == number + 0.5
        letters = len(turn.completion.ids) - (turn.completion.reason == "stop")
        assert trajectory.metadata == {"metrics": {"letters": letters}, "stop_condition": "over"}
        assert trajectory.truncated == (turn.completion.reason != "stop")


def test_an_environment_can_say_that_a_rollout_was_cut(tmp_path, monkeypatch):
    scored = 'return found | {"reward": 1, "is_truncated": True}'
    (result,) = rollouts(tmp_path, monkeypatch, scored, engine=RandomTokens(range(48, 58), stops=1.0))
    assert result.trajectories[0].truncated


def test_many_rollouts_share_one_environment_and_one_round(tmp_path, monkeypatch):
    engine = RandomTokens(range(48, 58))
    results = rollouts(tmp_path, monkeypatch, number=300, engine=engine)
    assert all(result.trajectories for result in results)
    assert [len(requests) for requests in engine.rounds] == [300]
    assert (tmp_path / "loads").read_text() == "x"


@pytest.mark.parametrize(
    ("scored", "message"),
    [
        ('return found | {"reward": float("nan")}', "the environment gave the reward nan; a reward is a finite number"),
        ('return found | {"reward": None}', "the environment gave the reward None"),
        (
            'return found | {"reward": 0.0, "error": {"error_chain_str": "SandboxError -> no space"}}',
            "SandboxError -> no space",
        ),
        ('return found | {"reward": 0.0, "error": "no space"}', "the rollout ended with an error: no space"),
        ('raise OSError("no world")', r"raised OSError: no world .*own_env.py"),
        ("await asyncio.sleep(60)", r"took longer than rollout.environment.seconds_per_call=3"),
        ("time.sleep(60)", r"took longer than rollout.environment.seconds_per_call=3"),
        ("os._exit(3)", "ended its process, which exited with status 3"),
    ],
    ids=["nan", "none", "error", "error as text", "raises", "waits", "blocks", "exits"],
)
def test_a_rollout_that_fails_is_a_failed_attempt(tmp_path, monkeypatch, scored, message):
    began = time.monotonic()
    (result,) = rollouts(tmp_path, monkeypatch, scored, seconds=3.0 if "sleep" in scored else 20.0)
    assert result.trajectories == () and re.search(message, result.failure), result.failure
    assert "trajectory 7-0 (x:0)" in result.failure and time.monotonic() - began < 20


def checked(name, **kwargs):
    check_verifiers(EnvironmentConfig(name=name, kwargs=kwargs, processes=1))


def test_an_environment_is_loaded_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = write_library(tmp_path)
    checked(name, num=3)
    checked("somebody/own-env@0.2.0", num=3)
    for kwargs, named, message in (
        ({"requires_group_rollouts": True}, name, "scores whole groups of rollouts"),
        (
            {},
            "nowhere-env",
            "name=nowhere-env: there is no module 'nowhere_env'; install its package",
        ),
        ({"num": "many"}, name, r"rollout.environment.name=\S*:load_environment raised TypeError"),
        ({}, "verifiers.clients:OpenAIChatCompletionsClient", "raised TypeError"),
        ({}, "collections:OrderedDict", "made a OrderedDict, which is not an environment of verifiers"),
    ):
        with pytest.raises(ConfigError, match=message):
            checked(named, **kwargs)


def test_a_library_that_is_missing_is_named_with_its_extra():
    with pytest.raises(ConfigError, match=r"needs the Python package verifiers.*rl_megatron\[verifiers\].*\.python"):
        checked("reverse-text")
