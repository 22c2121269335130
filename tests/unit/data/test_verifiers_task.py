"""The task `verifiers`: the examples of an environment become problems, read in a process of its own."""

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.tasks import build_task
from rl_megatron.data.tasks.task import TooFewProblems
from rl_megatron.data.tasks.verifiers import EXAMPLE
from tests.unit.rollouts.fake_verifiers import write_library


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return write_library(tmp_path)


def task(environment, **options):
    return build_task("verifiers", environment=environment, **options)


def test_examples_become_problems(environment):
    made = task(environment, kwargs={"num": 5, "heldout": 2})
    problems = made.train_problems()
    assert [problem.prompt for problem in problems] == [f"train{number}=" for number in range(5)]
    assert [problem.prompt for problem in made.heldout_problems()] == ["heldout0=", "heldout1="]
    third, messages = problems[3], [{"role": "user", "content": "train3="}]
    assert third.answer == "3" and third.location == f"{environment}: train example 3"
    assert third.record == {"messages": messages, EXAMPLE: {"prompt": messages, "answer": "3", "info": {"n": 3}}}
    assert made.reward(third, "3") == 0.0


def test_a_part_is_held_out_if_the_environment_holds_nothing_out(environment):
    made = task(environment, kwargs={"num": 20}, heldout_fraction=0.25, max_examples=16)
    train, heldout = ({problem.prompt for problem in part} for part in (made.train_problems(), made.heldout_problems()))
    assert len(train) == 12 and len(heldout) == 4
    assert train | heldout == {f"train{number}=" for number in range(16)}
    assert made.train_problems(3, seed=1) != made.train_problems(3, seed=2)
    with pytest.raises(TooFewProblems, match="has 4 of these problems, and 5"):
        made.heldout_problems(5)


def test_the_environment_is_asked_once(environment, tmp_path):
    for _ in range(2):
        made = task(environment)
        made.check_files()
        made.train_problems()
        made.heldout_problems()
    assert (tmp_path / "loads").read_text() == "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kwargs": {"num": "many"}}, "rollout.environment.name=.*own_env.py:load_environment raised TypeError"),
        ({"environment": None}, "data.task.environment=None names no environment; set rollout.environment.name"),
        ({"environment": "os:abort"}, "data.task.environment=os:abort: .* ended with status -6; its output ends"),
        ({"python": "nowhere/python"}, "rollout.environment.python=nowhere/python is not an interpreter"),
        ({"kwargs": {"num": 0}}, "has no example to learn from"),
    ],
)
def test_an_environment_that_cannot_be_read_is_named(environment, options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        task(**{"environment": environment, **options}).train_problems()
