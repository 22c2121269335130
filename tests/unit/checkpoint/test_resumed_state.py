"""Named parts of a stage's state: each is saved, and each checks what it is given back."""

import json

import pytest

from rl_megatron.checkpoint.resumed_state import MustBe, ResumedState
from rl_megatron.config.errors import ConfigError


class Average:
    """A part of an algorithm of one's own."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def state_of(**parts):
    state = ResumedState()
    for name, part in parts.items():
        state.add(name, part)
    return state


def test_each_part_gets_back_what_it_saved():
    saved = json.loads(json.dumps(state_of(average=Average(0.5), order=MustBe({"seed": 3})).state_dict()))
    average = Average(0.0)
    state_of(average=average, order=MustBe({"seed": 3})).load(saved, "step-000004")
    assert average.value == 0.5


def test_a_value_that_must_not_change_is_checked():
    saved = state_of(order=MustBe({"seed": 3, "global_batch_size": 8})).state_dict()
    with pytest.raises(ConfigError, match="step-000004: the state of 'order' does not fit: seed is 3 in the check"):
        state_of(order=MustBe({"seed": 4, "global_batch_size": 8})).load(saved, "step-000004")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (("average",), ("average", "order"), "step-000004 has no state of 'order', which this stage keeps"),
        (("average", "order"), ("average",), "step-000004 has the state of 'order', which this stage does not keep"),
    ],
)
def test_a_part_that_one_side_lacks_is_refused(before, now, message):
    saved = state_of(**{name: Average(1.0) for name in before}).state_dict()
    with pytest.raises(ConfigError, match=message):
        state_of(**{name: Average(1.0) for name in now}).load(saved, "step-000004")


def test_two_parts_of_one_name_are_refused():
    state = state_of(average=Average(1.0))
    with pytest.raises(ValueError, match="already keeps a part named 'average'"):
        state.add("average", Average(2.0))
