"""The worker `conversation`: turns of the policy, an environment and tools, with masks, limits and failures."""

import os
from pathlib import Path

import pytest

from rl_megatron.config.data_sources import PromptsConfig
from rl_megatron.config.environments import EnvironmentConfig, ToolsConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rollout import TurnSampling
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.batch import build_trajectory_batch
from rl_megatron.rollouts.conversation import Conversation
from rl_megatron.rollouts.environments import Environments, check_environment
from rl_megatron.rollouts.hosts import HostLost
from rl_megatron.rollouts.runner import RolloutFailed
from rl_megatron.rollouts.tools.toolbox import build_tools
from rl_megatron.rollouts.trajectory import TokenLimits
from tests.child_processes import children_with
from tests.unit.algorithms.fakes import EOS, Characters, completed
from tests.unit.data.chat_families import user, write_tokenizer
from tests.unit.rollouts.engines import NO_LIMITS, RandomTokens, run
from tests.unit.rollouts.tools.hosts import HostsHere

FILE = str(Path(__file__).parent / "hosted_file.py")
SAMPLING = Sampling(8, stop_ids=(EOS,))


class Says:
    """An engine that answers requests with texts in their order."""

    def __init__(self, *texts):
        self.texts, self.requests = list(texts), []

    def complete(self, requests):
        self.requests += requests
        return [completed(request, [*map(ord, self.texts.pop(0)), EOS]) for request in requests]


class AnyText(Characters):
    definition = "{}"


def prompt(text="n?", number=3, **record):
    values = {"number": number, **record}
    return EncodedPrompt([*map(ord, text)], Problem(text, "", values), Record(values, f"file:{number}"))


def environments(name, kwargs=None, **settings):
    return Environments(EnvironmentConfig(name=f"{FILE}:{name}", kwargs=kwargs or {}, processes=1, **settings))


def talk(engine, prompts, name, kwargs=None, turns=(), max_turns=8, limits=NO_LIMITS, **rules):
    """Return the results of conversations with an environment."""
    made = environments(name, kwargs, seconds_per_call=5.0)
    worker = Conversation(made, None, max_turns, turns).rollout
    return run(worker, prompts, engine, AnyText(), limits, SAMPLING, [made], **rules)


def test_only_the_turns_of_the_policy_are_learned_from():
    asked = [prompt()]
    (result,) = talk(Says("5", "42", "3"), asked, "Guess")
    trajectory = result.trajectory
    batch = build_trajectory_batch([trajectory], asked, SAMPLING, has_turns=True)
    table = [  # token, mask, turn, reward
        ("n", 0, -1, 0), ("?", 0, -1, 0),
        ("5", 1, 0, 0), ("", 1, 0, -0.25), ("?", 0, -1, 0),
        ("4", 1, 1, 0), ("2", 1, 1, 0), ("", 1, 1, -0.25), ("?", 0, -1, 0),
        ("3", 1, 2, 0), ("", 1, 2, 1),
    ]  # fmt: skip
    assert "".join(text for text, *_ in table) == "n?5?42?3"
    columns = ("input_ids", "token_mask", "turn", "turn_rewards")
    expected = [[ord(text or chr(EOS)), *rest] for text, *rest in table]
    assert [list(row) for row in zip(*(batch[key][0].tolist() for key in columns), strict=True)] == expected
    assert trajectory.environment_reward == 0.5 and not trajectory.truncated
    assert trajectory.metadata == {"last": "42", "turns": 3}
    said = [(message["role"], message["content"]) for message in trajectory.messages]
    assert said == [("user", "n?"), ("assistant", "5"), ("user", "?"), ("assistant", "42"), ("user", "?"),
                    ("assistant", "3"), ("user", "right")]  # fmt: skip


def test_a_conversation_is_truncated_at_a_limit():
    engine = Says(*"0123")
    (result,) = talk(engine, [prompt()], "Greets", {"how": "forever"}, max_turns=3)
    trajectory = result.trajectory
    assert trajectory.truncated and len(trajectory.turns) == 3
    (result,) = talk(Says(*"0123"), [prompt()], "Greets", {"how": "forever"}, limits=TokenLimits(8, 100))
    trajectory = result.trajectory
    assert trajectory.truncated and len(trajectory.turns) == 2, "hi 0. s 1. s: nothing fits behind them"
    (result,) = talk(Says("0"), [prompt()], "Greets", {"how": "cut"})
    assert result.trajectory.truncated and len(result.trajectory.turns) == 1
    (result,) = talk(Says("0"), [prompt()], "Greets")
    assert not result.trajectory.truncated
    with pytest.raises(RolloutFailed, match="raised HistoryFull: trajectory 7-0 is full: its context has 2 of 2"):
        talk(Says("0"), [prompt()], "Greets", limits=TokenLimits(2, 100))


def test_what_reset_returns_takes_the_place_of_the_prompt(tmp_path):
    engine = Says("0")
    talk(engine, [prompt("old")], "Greets")
    assert engine.requests[0].prompt == tuple(map(ord, "hi"))
    engine = Says("0")
    (result,) = talk(engine, [prompt("old")], "Gym", max_turns=1)
    assert engine.requests[0].prompt == tuple(map(ord, "go"))
    assert result.trajectory.metadata == {"began": True, "answer": "0"}
    tokenizer = load_tokenizer(write_tokenizer("qwen3", tmp_path))
    renderer = Renderer(PromptsConfig(format="chat", system_prompt="Be kind."), tokenizer)
    asked = renderer.encode_problem(Problem("", "", {"messages": [user("old")]}, "chats:1"))
    (end,) = renderer.end_of_turn_ids
    engine, made = RandomTokens([50, 51], stop_id=end), environments("Greets")
    sampling = Sampling(4, stop_ids=(end,))
    (result,) = run(Conversation(made).rollout, [asked], engine, tokenizer, sampling=sampling, owned=[made])
    said = [(each["role"], each["content"]) for each in result.trajectory.messages]
    assert said[:2] == [("system", "Be kind."), ("user", "hi")] and said[-1] == ("user", "bye")
    assert "old" not in tokenizer.decode(engine.rounds[0][0].prompt)


def test_each_turn_is_sampled_as_its_entry_says():
    turns = [TurnSampling(temperature=0.5, top_k=3), TurnSampling(max_new_tokens=2, stop=("YY",))]
    engine = Says("0", "1", "2")
    talk(engine, [prompt()], "Greets", {"how": "stop"}, turns, max_turns=3)
    first, *later = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_k, first.max_new_tokens, first.stop_strings) == (0.5, 3, 8, None)
    for sampling in later:
        assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (1.0, 0, 2)
        assert sampling.stop_strings.texts == ("ZZ", "YY"), "those of the environment, and those of the turn"


def test_a_greedy_evaluation_stays_greedy():
    turns = [TurnSampling(temperature=0.5, max_new_tokens=2)]
    worker = Conversation(None, None, 1, turns)
    engine = Says("0")
    run(worker.rollout, [prompt()], engine, AnyText(), sampling=Sampling(8, temperature=0.0, stop_ids=(EOS,)))
    assert engine.requests[0].sampling.temperature == 0 and engine.requests[0].sampling.max_new_tokens == 2


class Doubles:
    """Tools that answer turns with a number in brackets; 0 ends the trajectory. Plain text does not describe them."""

    schemas = ({"type": "function", "function": {"name": "double"}},)

    def __init__(self, template):
        self.counts = {"tool_calls": 0}

    def find_calls(self, text):
        return [int(text.strip("[]"))] if text.startswith("[") else []

    async def answer(self, calls):
        self.counts["tool_calls"] += len(calls)
        return [{"role": "tool", "content": str(2 * calls[0])}], calls[0] == 0


def test_tools_answer_calls_and_the_environment_all_other_turns():
    made = environments("Guess")
    worker = Conversation(made, Doubles).rollout
    (result,) = run(worker, [prompt(number=8)], Says("[4]", "7", "8"), AnyText(), owned=[made])
    trajectory = result.trajectory
    assert [(each["role"], each["content"]) for each in trajectory.messages[1:]] == [
        ("assistant", "[4]"), ("tool", "8"), ("assistant", "7"), ("user", "?"), ("assistant", "8"), ("user", "right")
    ]  # fmt: skip
    assert [turn.reward for turn in trajectory.turns] == [0.0, -0.25, 1.0]


class Cuts(Says):
    """An engine whose turns end at their most tokens."""

    def complete(self, requests):
        self.requests += requests
        texts = [self.texts.pop(0)[: request.sampling.max_new_tokens] for request in requests]
        return [completed(request, [*map(ord, text)], "length") for request, text in zip(requests, texts, strict=True)]


@pytest.mark.parametrize(
    ("turns", "limits", "limit"),
    [
        ((), NO_LIMITS, "generation.max_new_tokens=20: raise it"),
        ([TurnSampling(max_new_tokens=16)], NO_LIMITS, "rollout.turn_sampling.max_new_tokens=16: raise it"),
        ((), TokenLimits(18, 100), "a limit of the trajectory, rollout.max_tokens or rollout.max_sampled_tokens: rai"),
    ],
)
def test_the_answer_to_a_call_that_is_cut_names_the_limit(turns, limits, limit):
    tools = build_tools(ToolsConfig(functions=("calculator",), format="pythonic"))
    worker = Conversation(None, lambda template: tools.open_box(HostsHere(), template), 1, turns).rollout
    call = "[calculator(expression='1+1')]"
    sampling = Sampling(20, stop_ids=(EOS,))
    (result,) = run(worker, [prompt()], Cuts(call), AnyText(), limits, sampling)
    assert result.trajectory.metadata == {"tool_calls": 1, "tool_errors": 1, "malformed_calls": 1}
    assert f"; the turn was cut at {limit}" in result.trajectory.messages[-1]["content"]


def test_without_an_environment_a_turn_without_a_call_is_the_last():
    for texts, number, ends in ((("[4]", "[3]", "7"), 3, False), (("7",), 1, False), (("[4]", "[0]"), 2, True)):
        (result,) = run(Conversation(None, Doubles).rollout, [prompt()], Says(*texts), AnyText())
        assert (len(result.trajectory.turns), result.trajectory.truncated) == (number, ends)


def test_an_environment_of_nemo_rl_gets_its_metadata_back_and_stops_turns():
    engine = Says(*"abc")
    state = {"goal": 3, "turns": 0}
    (result,) = talk(engine, [prompt(extra_env_info=state)], "OfNemo", {"cfg": {"sign": "!"}})
    trajectory = result.trajectory
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0] and not trajectory.truncated
    assert [message["content"] for message in trajectory.messages] == ["n?", "a", "1!", "b", "2!", "c", "3!"]
    assert trajectory.metadata == {"answer": "c"}
    first, *later = [request.sampling.stop_strings for request in engine.requests]
    assert first is None and all(each.texts == ("ZZ",) for each in later)


def test_a_process_that_ends_costs_only_the_attempt_of_the_guilty_one(caplog):
    asked = [prompt(number=number) for number in range(6)]
    results = talk(Says(*"x" * 100), asked, "Dies", retries=1, fails_run=False)
    assert [bool(result.trajectory) for result in results] == [True, False] + [True] * 4
    assert "trajectory 7-1r1 (file:1): the rollout worker raised HostedCallFailed: environment " in results[1].failure
    assert "ended its process, which exited with status 3" in results[1].failure
    assert results[1].attempts == 2 and all(result.attempts <= 3 for result in results)
    assert any(result.attempts > 1 for result in results if result.trajectory)
    assert "the trajectory begins again, which does not count as an attempt" in caplog.text


def test_a_process_that_ends_for_no_reason_again_and_again_fails_the_task():
    tries = []

    async def lost(client, record, sampling):
        tries.append(client.name)
        raise HostLost("a process ended: it was killed by SIGKILL")

    with pytest.raises(RolloutFailed, match="raised HostLost: a process ended"):
        run(lost, [prompt()], Says(), AnyText())
    assert len(tries) == len(set(tries)) == 11


def test_a_reward_that_is_not_a_number_is_named_with_its_trajectory():
    (result,) = talk(Says("0"), [prompt()], "Greets", {"how": "nan"}, fails_run=False)
    assert not result.trajectory
    assert result.failure.startswith("trajectory 7-0 (file:3): the rollout worker raised HostedCallFailed: environment")
    assert "Greets.step() in a worker process returned the reward nan; a reward is a finite number" in result.failure


def host_processes():
    return {child.pid for child in children_with("rl_megatron.rollouts.host_child")}


def test_no_process_is_left_when_a_worker_hangs_and_the_run_ends():
    pids, before = [], host_processes()

    class Watched(Environments):
        async def make(self):
            made = await super().make()
            pids.extend(host_processes() - before)
            return made

    class Broken(Says):
        def complete(self, requests):
            raise KeyboardInterrupt

    made = Watched(EnvironmentConfig(name=f"{FILE}:Guess", processes=1))
    with pytest.raises(KeyboardInterrupt):
        run(Conversation(made).rollout, [prompt()], Broken(), AnyText(), owned=[made])
    assert len(pids) == 1 and not os.path.exists(f"/proc/{pids[0]}")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (f"{FILE}:Nothing", {}, "rollout.environment.name=.*has no 'Nothing'"),
        (f"{FILE}:Thing", {}, r"hosted_file.py:Thing has no method reset and no method step"),
        (f"{FILE}:Guess", {"last": 3}, r"not take the arguments of rollout.environment.kwargs \(last\): got an unexp"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_before_the_run(name, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        check_environment(EnvironmentConfig(name=name, kwargs=kwargs, processes=1))


def test_environments_that_can_be_used_are_not_refused():
    check_environment(EnvironmentConfig())
    check_environment(EnvironmentConfig(name=f"{FILE}:OfNemo", kwargs={"cfg": {}}, processes=1))
