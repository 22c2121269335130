"""The environment `openenv` with a library of the same form, which has no server."""

import asyncio
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.rollouts import environment_adapter
from rl_megatron.rollouts.environment import EnvironmentStep
from rl_megatron.rollouts.openenv import OpenEnv
from rl_megatron.workers.plain_data import BadAnswer

USER = "user"


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False


class Say:
    """An action, which reads its fields as pydantic's classes do."""

    def __init__(self, text):
        self.text = text

    @classmethod
    def model_validate(cls, fields):
        if set(fields) != {"text"}:
            raise ValueError("1 validation error for Say\ntext: field required")
        return cls(**fields)


class Client:
    """A client of a world whose results a test gives."""

    made: "list[Client]" = []
    results: list[Any] = []

    def __init__(self, base_url, **kwargs):
        self.base_url, self.kwargs, self.calls, self.is_closed = base_url, kwargs, [], False
        Client.made.append(self)

    async def _next(self, *call):
        self.calls.append(call)
        result = Client.results[len(self.calls) - 1]
        if isinstance(result, Exception):
            raise result
        return result

    async def reset(self, **fields):
        return await self._next("reset", fields)

    async def step(self, action):
        return await self._next("step", action)

    async def close(self):
        self.is_closed = True


class PlainClient(Client):
    """A client without async methods, such as those of early releases and of `sync()`."""

    def reset(self, **fields):
        return asyncio.run(self._next("reset", fields))

    def step(self, action):
        return asyncio.run(self._next("step", action))

    def close(self):
        self.is_closed = True


def shown(observation):
    return [{"role": "user", "content": f"you see {observation['hint']}"}]


def shout(text):
    if not text.strip():
        raise ValueError("say something")
    return text.upper()


@pytest.fixture(autouse=True)
def library(monkeypatch):
    module = ModuleType("openenv")
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("openenv", None)
    monkeypatch.setitem(sys.modules, "openenv", module)
    Client.made = []


def play(answers, results, record=None, client="Client", **kwargs):
    """Return what the first observation and the steps of an environment become, and the client."""
    Client.results = results
    environment = OpenEnv("http://there", client=f"{__name__}:{client}", **kwargs)

    async def go():
        hosted = environment_adapter.HostedEnvironment(environment)
        first = (await hosted.reset(record or {}, []))[0]
        steps = [await hosted.step(answer) for answer in answers]
        await hosted.close()
        return first, steps

    first, steps = asyncio.run(go())
    assert Client.made[0].is_closed
    return first, steps, Client.made[0]


def said(text):
    return [{"role": USER, "content": text}]


@pytest.mark.parametrize("client", ["Client", "PlainClient"])
def test_rewards_and_the_end_go_through(client):
    results = [StepResult({"hint": "go"}), StepResult({"hint": "no"}, 0.5), StepResult({"hint": ""}, None, True)]
    first, steps, made = play(
        ["a", "b"], results, {"seed": 3, "prompt": "?"}, client, action_field="text", observation_field="hint",
        reset_fields=["seed"], client_kwargs={"message_timeout_s": 5},
    )  # fmt: skip
    assert first == said("go")
    assert steps == [EnvironmentStep(said("no"), 0.5), EnvironmentStep([], 0.0, True)]
    assert made.calls == [("reset", {"seed": 3}), ("step", {"text": "a"}), ("step", {"text": "b"})]
    assert (made.base_url, made.kwargs) == ("http://there", {"message_timeout_s": 5})


def test_by_default_the_policy_writes_and_reads_json():
    seen = {"board": [1, 2], "note": None, "done": False, "reward": 1, "metadata": {}}
    results = [StepResult({"done": False, "note": None}), StepResult(seen, 1.0)]
    first, (step,), made = play(['{"move": 2}'], results)
    assert first is None and step == EnvironmentStep(said('{"board": [1, 2]}'), 1.0)
    assert made.calls[1] == ("step", {"move": 2})


def test_actions_and_observations_can_have_functions_and_classes():
    first, (step,), made = play(
        ["hey"], [StepResult({"hint": 1}), StepResult({"hint": 2})], observation=f"{__name__}:shown",
        action=f"{__name__}:shout",
    )  # fmt: skip
    assert (first, step.messages, made.calls[1]) == (said("you see 1"), said("you see 2"), ("step", "HEY"))
    Client.made = []
    _, _, made = play(["hey"], [StepResult({}), StepResult({})], action=f"{__name__}:Say", action_field="text")
    assert made.calls[1][1].text == "hey"


@pytest.mark.parametrize(
    ("answer", "kwargs", "message"),
    [
        ("go left", {}, "error: Expecting value"),
        ("[1]", {}, "error: an action must be a JSON object with the action's fields"),
        ('{"move": 2}', {"action": f"{__name__}:Say"}, "error: 1 validation error for Say"),
        (" ", {"action": f"{__name__}:shout"}, "error: say something"),
    ],
)
def test_a_turn_that_is_no_action_does_not_end_the_trajectory(answer, kwargs, message):
    _, (step,), made = play([answer], [StepResult({})], malformed_reward=-0.25, **kwargs)
    assert step.messages[0]["content"].startswith(message) and "\n" not in step.messages[0]["content"]
    assert (step.reward, step.done, len(made.calls)) == (-0.25, False, 1)


def test_an_action_that_the_server_refuses_does_not_end_the_trajectory():
    refused = RuntimeError("Server error: bad action (code: VALIDATION_ERROR)")
    _, (step,), _ = play(["{}"], [StepResult({}), refused])
    assert step == EnvironmentStep(said(f"error: {refused}"), 0.0)


def test_the_reward_of_the_reset_is_that_of_the_first_turn():
    _, steps, _ = play(["{}", "{}"], [StepResult({}, 0.5), StepResult({}, 1.0), StepResult({}, 2.0)])
    assert [step.reward for step in steps] == [1.5, 2.0]


@pytest.mark.parametrize(
    ("results", "kwargs", "error", "message"),
    [
        ([ConnectionError("Failed to connect")], {}, ConnectionError, "Failed to connect"),
        ([StepResult({}), RuntimeError("Server error: broken (code: EXECUTION_ERROR)")], {}, RuntimeError, "broken"),
        ([StepResult({}), StepResult({}, float("nan"))], {}, BadAnswer, "returned the reward nan"),
        ([StepResult({}), StepResult({}, None, 1)], {}, BadAnswer, "returned done=1; it must be True or False"),
        ([StepResult({}, None, True)], {}, BadAnswer, "returned done=True, so there is no turn"),
        ([StepResult({"a": 1})], {"observation_field": "hint"}, BadAnswer, "has no field 'hint' .* it has a"),
        ([StepResult({})], {"reset_fields": ["seed"]}, BadAnswer, "needs the field 'seed' of the record"),
    ],
)
def test_what_a_server_must_not_do_fails_the_trajectory(results, kwargs, error, message):
    with pytest.raises(error, match=message):
        play(["{}"], results, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"client": "nowhere.client:Client"}, "rollout.environment.kwargs.client: there is no module 'nowhere'"),
        ({"client": f"{__name__}:Clint"}, "rollout.environment.kwargs.client=.* has no 'Clint'; did you mean 'Client'"),
        ({"action": "shout"}, "rollout.environment.kwargs.action='shout' is not an import string"),
        (
            {"observation": f"{__name__}:shown", "observation_field": "a"},
            "observation and observation_field; leave one",
        ),
    ],
)
def test_arguments_are_checked_before_the_first_step(kwargs, message):
    given = {"base_url": "http://there", "client": f"{__name__}:Client", **kwargs}
    with pytest.raises(ConfigError, match=message):
        environment_adapter.check("openenv", given)
    environment_adapter.check("openenv", {"base_url": "http://there", "client": f"{__name__}:Client"})
    with pytest.raises(BadAnswer, match="does not take the arguments of rollout.environment.kwargs"):
        environment_adapter.check("openenv", {"url": "http://there"})
    assert Client.made == []


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "openenv")
    with pytest.raises(ConfigError, match=r"needs the Python package openenv-core.*rl_megatron\[openenv\].*\.python"):
        OpenEnv("http://there")
