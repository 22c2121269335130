"""Programs as rollout workers: their results, their environment, and how they fail."""

import asyncio
import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest

from rl_megatron.config.environments import AgentConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.rollouts import agent
from rl_megatron.rollouts.agent import AgentFailed, AgentWorker, read_result
from rl_megatron.rollouts.build import build_rollout_rules
from rl_megatron.rollouts.gateway.server import Gateway
from rl_megatron.rollouts.runner import RolloutRules, RolloutRunner, RolloutTask
from rl_megatron.rollouts.trajectory import TokenLimits
from rl_megatron.topology.ranks import Ranks
from tests.unit.rollouts.engines import SAMPLING, RandomTokens
from tests.unit.rollouts.test_runner import TOKENIZER as CHARACTERS
from tests.unit.rollouts.test_runner import prompts

# A small agent without a library: it completes the text of its record once.
PROGRAM = """
import json, os, pathlib, sys, urllib.request

def ask(prompt):
    body = json.dumps({"prompt": prompt}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["text"]

record = json.load(open(os.environ["RL_MEGATRON_RECORD"]))
def result(found):
    pathlib.Path(os.environ["RL_MEGATRON_RESULT"]).write_text(json.dumps(found))
"""


class Encodes(type(CHARACTERS)):
    """A tokenizer of characters that can also encode special tokens, of which it has none."""

    definition, longest_token = "{}", 1

    def encode_special(self, text):
        return SimpleNamespace(ids=self.encode(text))


def run(tmp_path, program, number=1, environment=None, timeout_seconds=20.0, worker=None, engine=None, **rules):
    """Return the results of an agent's program for some tasks."""
    (tmp_path / "agent.py").write_text(PROGRAM + program)
    settings = AgentConfig(
        command=f"{sys.executable} agent.py", directory=str(tmp_path), environment=environment or {},
        timeout_seconds=timeout_seconds,
    )  # fmt: skip
    limits = TokenLimits(10**6, 10**6)
    ranks = Ranks()
    rules = RolloutRules(limits, **{"fails_run": False, **rules})
    worker = worker or AgentWorker(settings).rollout
    runner = RolloutRunner(worker, rules, Encodes(), ranks, 60.0, gateway=Gateway(settings))
    tasks = [RolloutTask(f"7-{number}", prompt, 1000 + number) for number, prompt in enumerate(prompts(number))]
    try:
        return runner.run(tasks, engine or RandomTokens(range(48, 58)), SAMPLING)
    finally:
        runner.close()


def test_a_program_makes_a_trajectory_with_its_reward(tmp_path):
    program = """
text = ask("2 + 3 =")
text += ask("2 + 3 =" + text + "?")
result({"reward": 0.5, "metadata": {"number": record["number"], "text": text}})
"""
    engine = RandomTokens(range(48, 58))
    results = run(tmp_path, program, number=2, engine=engine)
    for number, result in enumerate(results):
        trajectory = result.trajectory
        assert trajectory.reward == 0.5 and trajectory.metadata["number"] == number
        (segment,) = trajectory.segments
        turns = [CHARACTERS.decode(turn.completion.ids) for turn in segment.turns]
        assert "".join(turns) == trajectory.metadata["text"]
        assert CHARACTERS.decode(segment.ids) == f"2 + 3 ={turns[0]}?{turns[1]}"
    assert [len(requests) for requests in engine.rounds] == [2, 2]


@pytest.mark.change
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('before'); raise OSError('no world')", r"ended with status 1; .*before.*OSError: no world"),
        ("ask('a'); sys.exit(3)", r"ended with status 3; it has printed nothing"),
        ("pass", "the agent has got no completion"),
        ("ask('a'); result({'reward': float('nan')})", r"reward is nan, but must be a finite number"),
        ("ask('a'); import time; time.sleep(60)", r"took longer than rollout.agent.timeout_seconds=3"),
    ],
    ids=["raises", "status", "no request", "nan", "hangs"],
)
def test_a_program_that_fails_is_a_failed_attempt(tmp_path, program, message):
    began = time.monotonic()
    (result,) = run(tmp_path, program, timeout_seconds=3.0)
    assert result.trajectory is None
    assert re.search(message, result.failure), result.failure
    assert "trajectory 7-0 (x:0)" in result.failure and time.monotonic() - began < 15


@pytest.mark.change
def test_the_time_of_the_engine_does_not_count_and_a_program_gets_no_more_than_is_left(tmp_path, monkeypatch):
    waits = []

    class Slow(RandomTokens):
        def complete(self, requests):
            time.sleep(0.5)
            return super().complete(requests)

    async def wait(tasks, timeout):
        waits.append(timeout)
        return await asyncio.wait(tasks, timeout=timeout)

    monkeypatch.setattr(agent, "asyncio", SimpleNamespace(**vars(asyncio) | {"wait": wait}))
    (result,) = run(tmp_path, "ask('a'); import time; time.sleep(60)", timeout_seconds=3.0, engine=Slow(range(48, 58)))
    assert "took longer than rollout.agent.timeout_seconds=3" in result.failure
    assert len(waits) > 1 and sum(waits) > 3.4 and max(waits) <= 3


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", "is not JSON"), ("[]", "write an object"), ('{"rewards": 1}', "did you mean 'reward'"),
        ('{"reward": true}', "finite number"), ('{"reward": "1"}', "finite number"), ('{"reward": 1e999}', "finite"),
        ('{"metadata": 3}', "must be an object"),
    ],
)  # fmt: skip
def test_a_result_that_cannot_be_used_is_refused(tmp_path, written, message):
    path = tmp_path / "result.json"
    assert read_result(path).reward == 0.0
    path.write_text(written)
    with pytest.raises(AgentFailed, match=message):
        read_result(path)


@pytest.mark.change
def test_processes_of_a_program_end_with_it(tmp_path):
    """One ends with its trajectory, and one whose program hangs at the limit of time."""
    program = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
ask("a")
pathlib.Path(f"pid{record['number']}").write_text(str(child.pid))
if record["number"]:
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
    results = run(tmp_path, program, number=2, timeout_seconds=2.0)
    assert [bool(result.trajectory) for result in results] == [True, False]
    pids = [int((tmp_path / f"pid{number}").read_text()) for number in range(2)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.change
def test_a_program_gets_no_secrets_but_those_that_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "secret-1")
    monkeypatch.setenv("SEARCH_API_KEY", "secret-2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ORDINARY", "kept")
    program = """
ask("a")
result({"metadata": dict(os.environ)})
"""
    (result,) = run(tmp_path, program, environment={"SEARCH_API_KEY": None, "MINE": "5"})
    seen = result.trajectory.metadata
    assert "OTHER_TOKEN" not in seen and "RANK" not in seen
    assert (seen["SEARCH_API_KEY"], seen["MINE"], seen["ORDINARY"]) == ("secret-2", "5", "kept")
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert seen.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert seen["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]


def test_a_worker_of_the_users_own_can_use_the_gateway(tmp_path):
    keys = []

    async def worker(client, record, sampling):
        async with client.openai() as session:
            keys.append(session.api_key)
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(base_url=session.base_url, headers=headers) as http:
                answers = [http.post("/completions", json={"prompt": f"{place} ="}) for place in range(3)]
                await asyncio.gather(*answers)
                headers["Authorization"] = f"Bearer {keys[0]}"
            trajectory = session.trajectory(1.0)
        async with httpx.AsyncClient(base_url=session.base_url, headers=headers) as http:
            ended = await http.post("/completions", json={"prompt": "1"}, headers=headers)
        assert ended.status_code == 401
        return [trajectory]

    results = run(tmp_path, "", worker=worker, fails_run=True)
    assert len(results[0].trajectory.segments) == 3 and len(keys[0]) > 30


def test_a_client_that_is_gone_delays_nobody(tmp_path):
    """Its request is answered to nobody, and the trajectory goes on."""

    async def worker(client, record, sampling):
        async with client.openai() as session:
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(base_url=session.base_url, headers=headers, timeout=60) as http:
                if record["number"] == 0:
                    with pytest.raises(httpx.ReadTimeout):
                        await http.post("/completions", json={"prompt": "0"}, timeout=httpx.Timeout(60, read=0.05))
                else:
                    await asyncio.sleep(0.3)
                await http.post("/completions", json={"prompt": "1"})
            return [session.trajectory()]

    results = run(tmp_path, "", number=2, worker=worker, fails_run=True)
    first, second = (result.trajectory for result in results)
    assert first.metadata == {"unheard_completions": 1} and second.metadata == {}
    assert len(first.turns) == len(second.turns) == 1


def test_the_command_and_the_worker_need_each_other():
    for settings, worker, message in (
        (AgentConfig(), "agent", "needs rollout.agent.command"),
        (AgentConfig(command="python a.py"), "completion", "does nothing"),
        (AgentConfig(command="python 'a.py"), "agent", "correct its quotes"),
        (AgentConfig(command="a", directory="/nowhere"), "agent", "there is no such directory"),
        (AgentConfig(command=" "), "agent", "is empty"),
        (AgentConfig(command="a", environment={"OPENAI_API_KEY": "x"}), "agent", "which the run sets itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings.check(worker)


def test_no_more_trajectories_run_than_programs_may():
    """One that held a place without a process would keep the round of the others waiting."""
    agent = AgentConfig(command="python a.py", max_processes=3)
    settings = TrajectoryConfig(worker="agent", agent=agent, concurrency=10)
    assert build_rollout_rules(settings, 48).concurrency == 3
    assert build_rollout_rules(replace(settings, concurrency=2), 48).concurrency == 2
    assert build_rollout_rules(TrajectoryConfig(concurrency=10), 48).concurrency == 10


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(AgentConfig(port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="the gateway cannot listen at rollout.agent.host=127.0.0.1"):
            asyncio.run(gateway.session(None, None).__aenter__())
