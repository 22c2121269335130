"""Reward functions of three forms get what their parameters name."""

import asyncio

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.reward_function import BadFunction, RewardFunction, TaskReward
from rl_megatron.rewards.samples import Sample
from tests.unit.rewards import user_file


def sample(completion="4", truncated=False, **record):
    return Sample(Problem("2+2=", "4", record), completion, [1, 2], truncated)


def described(function, **kwargs):
    return RewardFunction(function, "f", kwargs).describe()


@pytest.mark.parametrize(
    ("function", "form", "is_async", "needed"),
    [
        (user_file.length, "sample", False, ()),
        (user_file.fields, "sample", False, ("answer", "level")),
        (user_file.everything, "sample", False, ()),
        (user_file.judge, "sample", True, ()),
        (user_file.trl, "list", False, ("solution",)),
        (user_file.trl_async, "list", True, ()),
        (user_file.compute_score, "verl", False, ("ground_truth",)),
    ],
)
def test_the_form_follows_from_the_parameters(function, form, is_async, needed):
    assert described(function) == ("f", form, is_async, needed)


def test_a_function_gets_the_parts_of_the_sample_that_it_names():
    assert RewardFunction(user_file.length, "f", {"scale": 0.5}).call(sample()) == 1.0
    result = RewardFunction(user_file.fields, "f").call(sample(truncated=True, level=3))
    assert result == {"score": 1.0, "level": 3, "cut": True, "note": "not a number"}
    seen = {}
    RewardFunction(lambda **given: seen.update(given), "f").call(sample(level=3, prompt="the record's"))
    assert seen == {
        "prompt": "2+2=", "completion": "4", "completion_ids": [1, 2], "truncated": False, "answer": "4", "level": 3,
    }  # fmt: skip


def test_the_reference_answer_has_the_names_that_datasets_use():
    for name in ("answer", "ground_truth", "solution"):
        names: dict = {}
        exec(f"def f({name}): return {name}", names)
        assert RewardFunction(names["f"], "f").call(sample()) == "4"
    assert RewardFunction(lambda solution, record: (solution, record), "f").call(sample(solution="own")) == (
        "own", {"solution": "own"},
    )  # fmt: skip


def test_the_reference_answer_is_the_records_own_value_in_every_form():
    own = Sample(Problem("p", "['4', 'four']", {"answer": ["4", "four"]}), "4", [1], False)
    assert RewardFunction(lambda answer: answer, "f").call(own) == ["4", "four"]
    assert RewardFunction(lambda ground_truth: ground_truth, "f").call(own) == ["4", "four"]
    assert RewardFunction(lambda **given: given["answer"], "f").call(own) == ["4", "four"]
    assert RewardFunction(lambda solution_str, ground_truth: ground_truth, "f").call(own) == ["4", "four"]
    assert call_list(lambda completions, answer, solution: (answer, solution), own)[0] == ([["4", "four"]],) * 2
    of_task = Sample(Problem("p", "4", {"answer": "2+2 is #### 4"}), "4", [1], False)
    assert RewardFunction(lambda answer: answer, "f").call(of_task) == "4", "the answer that a task has taken out"


def test_a_field_that_no_record_is_sure_to_have_is_needed():
    assert described(user_file.fields).needed == ("answer", "level")
    assert described(user_file.fields, level=1, answer="a").needed == ()
    assert described(lambda completion, answer="": 0).needed == ()


def call_list(function, *samples):
    logged: dict = {}
    return RewardFunction(function, "f").call_list(samples, logged.__setitem__), logged


def test_trls_functions_get_whole_lists_and_the_columns_of_the_records():
    samples = [sample("4", solution="4"), sample("5", solution="skip"), sample("6", solution="7")]
    assert call_list(user_file.trl, *samples) == ([1.0, None, 0.0], {"seen": 3.0})
    seen = call_list(lambda prompts, **rest: (prompts, rest), sample(level=1, prompt="x"), sample(other=2))[0]
    assert seen[0] == ["2+2=", "2+2="]
    assert seen[1]["level"] == [1, None] and seen[1]["other"] == [None, 2]
    assert seen[1]["completions"] == ["4", "4"] and seen[1]["completion_ids"] == [[1, 2], [1, 2]]
    assert "prompt" not in seen[1] and "answer" not in seen[1]


def test_trls_functions_get_messages_if_the_prompt_is_a_conversation():
    asked = [{"role": "user", "content": "2+2"}]
    both = [*asked, {"role": "assistant", "content": "4"}]
    for record in ({"prompt": asked}, {"messages": both}, {"messages": asked}):
        prompts, completions = call_list(lambda prompts, completions: (prompts, completions), sample(**record))[0]
        assert prompts == [asked] and completions == [[{"role": "assistant", "content": "4"}]]


def test_verls_functions_get_their_four_arguments():
    function = RewardFunction(user_file.compute_score, "f")
    assert function.call(sample()) == {"score": True, "acc": 1.0, "source": ""}
    of_verl = sample("x", data_source="gsm8k", reward_model={"ground_truth": "x"}, extra_info={"split": "train"})
    assert function.call(of_verl) == {"score": True, "acc": 1.0, "source": "gsm8k"}
    assert RewardFunction(lambda solution_str, extra_info: extra_info, "f").call(of_verl) == {"split": "train"}


def test_async_functions_return_coroutines():
    assert asyncio.run(RewardFunction(user_file.judge, "f").call(sample("abc"))) == 3


def test_a_class_is_made_with_the_arguments():
    assert RewardFunction(user_file.Stateful, "f", {"offset": 10}).call(sample()) == 11
    with pytest.raises(BadFunction, match=r"f\(\) raised TypeError: .*offset"):
        RewardFunction(user_file.Stateful, "f")


@pytest.mark.parametrize(
    ("function", "kwargs", "words"),
    [
        (user_file.length, {"scle": 1.0}, "f takes no argument 'scle'; did you mean 'scale'"),
        (user_file.positional, {}, "'completion' is positional-only"),
        (user_file.nothing, {}, "f takes no part of a sample"),
        (lambda solution_str, judge_url: 0, {}, r"verl's form and needs \['judge_url'\]"),
        (int, {}, "f is a class without __call__"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(function, kwargs, words):
    with pytest.raises(BadFunction, match=words):
        RewardFunction(function, "f", kwargs)


def test_trls_state_of_the_trainer_is_asked_for_as_a_field():
    assert described(lambda completions, trainer_state: 0).needed == ("trainer_state",)


def test_a_task_gets_its_problem():
    class Task:
        def reward(self, problem, completion):
            return problem, completion

    given = sample("5")
    assert TaskReward(Task(), "t").call(given) == (given.problem, "5")
    assert ConfigError is not BadFunction
