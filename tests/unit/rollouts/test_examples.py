"""The tasks and environments of the shipped experiments: what they show, say and reward."""

import asyncio
import re
from itertools import product

import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.data.chat_template import load_template
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.data.tasks import GeneratedTask, build_task
from rl_megatron.rollouts import environment_adapter
from rl_megatron.rollouts.examples.guessing_game import GuessingGame, GuessingTask
from rl_megatron.rollouts.examples.text_world import TextWorld, TextWorldTask
from rl_megatron.rollouts.examples.tool_sums import ToolSums
from rl_megatron.rollouts.tools.toolbox import Tools

EXPERIMENTS = ("calculator_tool", "guessing_game", "text_world")


def stage_of(experiment, name="grpo"):
    return load_config([f"experiment={experiment}"]).stages[name]


def turns(messages, role):
    return [message["content"] for message in messages if message["role"] == role]


@pytest.mark.parametrize("experiment", ["calculator_tool", "text_world"])
def test_a_tenth_of_the_prompts_is_held_out_and_in_no_demonstration(experiment):
    task = build_task(**stage_of(experiment).data.task)
    assert isinstance(task, GeneratedTask)
    training = {problem.prompt for problem in task.train_problems(2000)}
    shown = {each.prompt for each in task.demonstrations(2000)}
    heldout = {problem.prompt for problem in task.heldout_problems(200)}
    assert heldout and not heldout & (training | shown)
    assert task.heldout_problems(200) == task.heldout_problems(200) != task.heldout_problems(200, seed=1)
    assert task.demonstrations(50, seed=3) == task.demonstrations(50, seed=3) != task.demonstrations(50)
    with pytest.raises(ValueError, match="count must be a number"):
        task.train_problems()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_demonstrations_fit_the_model_and_only_turns_of_the_assistant_are_learned(experiment):
    stage = stage_of(experiment)
    task = build_task(**stage.data.task)
    assert isinstance(task, GeneratedTask)
    tokenizer = train_bpe(task.pretraining_documents(200), stage.tokenizer.vocab_size)
    renderer = Renderer(stage.data, tokenizer)
    for shown in task.demonstrations(20):
        example = renderer.encode_example(shown.as_record())
        assert len(example.ids) <= stage.model.max_sequence_length
        learned = tokenizer.decode([id_ for id_, is_learned in zip(example.ids, example.trained, strict=True)
                                    if is_learned], skip_special_tokens=False)  # fmt: skip
        assert learned == "".join(f"{turn}<eos>" for turn in turns(shown.record["messages"], "assistant"))
        prompt = renderer.encode_prompt(shown.as_record())
        assert example.ids[: len(prompt)] == prompt or len(turns(shown.record["messages"], "user")) > 1


@pytest.mark.parametrize("experiment", EXPERIMENTS[1:])
def test_environments_load_where_they_are_run(experiment):
    settings = stage_of(experiment).rollout.environment
    assert settings.name is not None
    environment_adapter.check(settings.name, settings.kwargs)
    hosted = asyncio.run(environment_adapter.make(settings.name, settings.kwargs))
    problem = build_task(**stage_of(experiment).data.task).train_problems(1)[0]
    assert asyncio.run(hosted.reset(problem.as_record().values, [])) == (None, {})
    assert asyncio.run(hosted.step("nonsense")).reward == 0.0


def test_calls_in_demonstrations_are_calls_of_the_calculator():
    stage = stage_of("calculator_tool")
    task = ToolSums(share_of_calls=0.5)
    tokenizer = train_bpe(task.pretraining_documents(200), stage.tokenizer.vocab_size)
    tools = Tools(stage.rollout.tools)
    hosts = tools.build_hosts()
    box, num_calls = tools.open_box(hosts, load_template(stage.data, tokenizer)), 0

    async def answered():
        nonlocal num_calls
        for shown in task.demonstrations(40):
            first, *others = turns(shown.record["messages"], "assistant")
            if others:
                num_calls += 1
                (message,), ends = await box.answer(box.find_calls(first))
                assert message["content"] == shown.answer == others[0] and not ends
            else:
                assert first == shown.answer and not box.find_calls(first)

    try:
        asyncio.run(answered())
    finally:
        hosts.close()
    assert 10 < num_calls < 30 and box.counts["tool_errors"] == 0


def test_the_last_turn_is_right_only_if_it_is_the_sum():
    task = ToolSums()
    problem = task.train_problems(1)[0]
    assert task.reward(problem, f" {problem.answer}\n") == 1.0
    assert task.reward(problem, f'[calculator(expression="{problem.prompt}")]') == 0.0
    assert eval(problem.prompt) == int(problem.answer)


def game_with(number):
    game = GuessingGame()
    game.reset({"number": number})
    return game


def test_a_guess_is_compared_with_the_number():
    game = game_with(17)
    assert [game.step(guess).messages for guess in ("16", "18", "99", "x", "")] == [
        "higher", "lower", "lower", "number", "number",
    ]  # fmt: skip
    right = game.step(" 17 ")
    assert (right.reward, right.done) == (1.0, True) and game.step("07").reward == 0.0


def test_other_draws_of_the_game_are_held_out():
    task = GuessingTask()
    training, heldout = ([each.answer for each in draw(400)] for draw in (task.train_problems, task.heldout_problems))
    assert training != heldout and set(training) == set(heldout) == {f"{number:02}" for number in range(1, 17)}
    assert {each.prompt for each in task.train_problems(50)} == {"01-16"}


def test_bisection_finds_15_of_16_numbers_with_four_guesses():
    found = 0
    for number in range(1, 17):
        game, low, high = game_with(number), 1, 16
        for _ in range(4):
            guess = (low + high) // 2
            step = game.step(str(guess))
            if step.done:
                found += 1
                break
            low, high = (guess + 1, high) if step.messages == "higher" else (low, guess - 1)
    assert found == 15


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.5, 0.8), (1.0, 1.0, 1.0)])
def test_demonstrations_of_the_game_agree_with_the_answers_as_often_as_is_asked(share, least, most):
    agree = total = 0
    for each in GuessingTask(share_of_right_guesses=share).demonstrations(200):
        guesses, answers = (turns(each.record["messages"], role) for role in ("assistant", "user"))
        for guess, answer, following in zip(guesses, answers[1:], guesses[1:], strict=False):
            agree += int(following) > int(guess) if answer == "higher" else int(following) < int(guess)
            total += 1
    assert least <= agree / total <= most  # two thirds by chance, because an answer says where more numbers are


def test_demonstrations_of_the_game_end_with_a_guess():
    for each in GuessingTask(share_of_right_guesses=0.0, num_guesses=2).demonstrations(50):
        roles = [message["role"] for message in each.record["messages"]]
        assert roles in (["user", "assistant"], ["user", "assistant", "user", "assistant"])


def test_every_layout_of_the_text_world_can_be_solved_and_rewards_only_the_goal():
    task = TextWorldTask()
    problems = (*task.train_problems(100), *task.heldout_problems(50))
    squares = {square for problem in problems for square in re.findall(r"[a-i][1-9]", problem.prompt)}
    assert squares == {row + column for row, column in product("abc", "123")}, "the map is small by default"
    for problem in problems:
        world = TextWorld()
        world.reset(problem.as_record().values)
        steps = [world.step(world.next_command())]
        while not steps[-1].done and len(steps) < task.num_turns:
            steps.append(world.step(world.next_command()))
        assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0] and steps[-1].done


def test_commands_that_change_nothing_leave_the_world_as_it_is():
    world = TextWorld()
    world.reset({"start": (0, 0), "key": (0, 1), "door": (0, 0), "size": 2})
    for command in ("go north", "go west", "open door", "take key", "fly", ""):
        assert world.step(command).messages == "at a1, key a2, door a1"
    assert world.step("go east").messages == "at a2, key a2, door a1"
    assert world.step("take key").messages == "at a2, have key, door a1"
    assert world.step("go west").messages == "at a1, have key, door a1"
    assert world.step("open door").done


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.05), (1.0, 1.0, 1.0)])
def test_walks_reach_the_goal_as_their_commands_are_right(share, least, most):
    shown = TextWorldTask(share_of_right_commands=share).demonstrations(200)
    ends = [each.record["messages"][-1]["content"] for each in shown]
    lengths = [len(turns(each.record["messages"], "assistant")) for each in shown]
    reached = sum(end == "open door" and length < 8 for end, length in zip(ends, lengths, strict=True))
    at_the_limit = sum(length == 8 for length in lengths)
    assert least * 200 <= reached + (at_the_limit if share == 1 else 0) and reached <= most * 200


@pytest.mark.parametrize(
    ("task", "options"),
    [
        *product([ToolSums], [{"num_terms": 0}, {"max_term": 0}, {"share_of_calls": 1.5}]),
        *product(
            [GuessingTask],
            [{"num_numbers": 1}, {"num_numbers": 100}, {"num_guesses": 0}, {"share_of_right_guesses": -0.1}],
        ),
        *product([TextWorldTask], [{"size": 1}, {"size": 10}, {"num_turns": 2}, {"share_of_right_commands": 2.0}]),
    ],
)
def test_options_that_make_no_problems_are_refused(task, options):
    (key,) = options
    with pytest.raises(ValueError, match=key):
        task(**options)
