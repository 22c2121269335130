"""What environments may return, and the messages about all else."""

import asyncio
import enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_megatron import EnvironmentStep
from rl_megatron.rollouts.environment import read_reset, read_step
from rl_megatron.rollouts.environment_adapter import NemoEnvironment
from rl_megatron.workers.plain_data import BadAnswer, dump_plain, load_plain, to_plain

USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, (None, {})),
        ("go", ([USER], {})),
        ([USER, {"role": "tool", "content": "4"}], ([USER, {"role": "tool", "content": "4"}], {})),
        (({"role": "system", "content": "s"}, USER), ([{"role": "system", "content": "s"}, USER], {})),
        ([{"role": "environment", "content": "go"}], ([USER], {})),
        (("go", {"seed": 1}), ([USER], {"seed": 1})),
        ((None, {}), (None, {})),
    ],
)
def test_an_observation_becomes_messages(returned, expected):
    assert read_reset(returned) == expected


@pytest.mark.parametrize(
    "returned",
    [
        EnvironmentStep("go", 0.5, True, metadata={"n": 1}),
        EnvironmentStep([USER], np.float32(0.5), np.bool_(True), metadata={"n": 1}),
        EnvironmentStep((USER,), torch.tensor(0.5), torch.tensor(True), metadata={"n": 1}),
        ("go", 0.5, True, False, {"n": 1}),
        ("go", np.float64(0.5), np.True_, np.False_, {"n": 1}),
    ],
)
def test_both_forms_of_a_step_are_read(returned):
    assert read_step(returned) == EnvironmentStep([USER], 0.5, True, False, {"n": 1}, None)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (EnvironmentStep(reward=float("nan")), "returned the reward nan; a reward is a finite number"),
        (EnvironmentStep(reward=np.inf), "returned the reward inf"),
        (EnvironmentStep(reward="1"), "returned the reward '1'"),
        (EnvironmentStep(reward=True), "returned the reward True"),
        (EnvironmentStep(reward=np.array([1.0])), r"returned the reward array\(\[1"),
        (EnvironmentStep(done=1), "returned done=1; it must be True or False"),
        (EnvironmentStep(truncated=None), "returned truncated=None"),
        (EnvironmentStep(3), "returned an observation of type int"),
        (EnvironmentStep([USER, "go"]), "returned 'go' as message 1 of an observation"),
        (EnvironmentStep([{"role": "user", "content": None}]), "its content is a text"),
        (EnvironmentStep([{"role": "world", "content": ""}]), "returned a message of role 'world'; a role is one of"),
        (EnvironmentStep(metadata=[1]), r"returned the metadata \[1\]"),
        (EnvironmentStep(metadata={1: 2}), "a mapping with texts as keys"),
        (EnvironmentStep(stop="end"), "returned stop='end'; it must be a list of"),
        (EnvironmentStep(stop=[""]), "nonempty texts"),
        (("go", 0.5, True, {}), "returned tuple .*; return an rl_megatron.EnvironmentStep, or the tuple"),
        (None, "returned NoneType None"),
    ],
)
def test_what_cannot_be_used_is_named(returned, message):
    with pytest.raises(BadAnswer, match=message):
        read_step(returned)


class Level(enum.IntEnum):
    HIGH = 3


def test_plain_data_is_the_same_behind_the_socket():
    step = EnvironmentStep([USER], 0.5, metadata={"board": np.eye(2), "level": Level.HIGH, "row": torch.ones(1)})
    sent = load_plain(dump_plain((to_plain(step),)))[0]
    expected = {"board": [[1.0, 0.0], [0.0, 1.0]], "level": 3, "row": [1.0]}
    assert EnvironmentStep(**sent) == EnvironmentStep([USER], 0.5, metadata=expected)
    with pytest.raises(BadAnswer, match=r"returned a object \(the result.metadata\['x'\]\[0\]\)"):
        to_plain(EnvironmentStep(metadata={"x": [object()]}))


@pytest.mark.parametrize("rewards", [np.array([0.0, 1.0]), torch.zeros(0), 1.0])
def test_an_environment_of_nemo_rl_has_one_value_for_its_one_trajectory(rewards):
    returned = ([{"role": "environment", "content": "go"}], [{}], [None], rewards, [False])
    made = NemoEnvironment(SimpleNamespace(step=lambda message_log_batch, metadata: returned))
    with pytest.raises(BadAnswer, match="returned rewards=.*; it must have one value"):
        asyncio.run(made.step("a"))
