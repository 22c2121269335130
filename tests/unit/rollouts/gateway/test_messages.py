"""Which message of an agent is an answer of the policy."""

import pytest

from rl_megatron.rollouts.gateway.messages import Answered

ANSWERED = Answered(content="Five.", text="<think>2+3</think>Five.", calls=())


@pytest.mark.parametrize("said", ["Five.", " Five.\n", "<think>2+3</think>Five."])
def test_the_answer_is_known_with_or_without_its_thinking(said):
    assert ANSWERED.is_meant_by(("assistant", said, (), "", ""))


@pytest.mark.parametrize(("role", "said"), [("assistant", "Six."), ("assistant", ""), ("user", "Five.")])
def test_other_messages_are_not_the_answer(role, said):
    assert not ANSWERED.is_meant_by((role, said, (), "", ""))
