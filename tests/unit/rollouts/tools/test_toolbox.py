"""Calls are run at the same time, and errors are answered, or end or fail the trajectory, as configured."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.config.environments import ToolsConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.registry import UnknownName
from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.rollouts.hosts import HostLost
from rl_megatron.rollouts.tools import register_tool
from rl_megatron.rollouts.tools.calls import MalformedCall, ToolCall
from rl_megatron.rollouts.tools.registry import TOOLS
from rl_megatron.rollouts.tools.toolbox import ToolFailed, Tools, build_tools
from tests.unit.data.chat_families import template_of
from tests.unit.rollouts.tools.hosts import HostsHere

MODULE = "tests.unit.rollouts.tools.hosts"
NAMES = ("weather", "wait", "fails", "pairs", "huge")
SETTINGS = ToolsConfig(
    functions=(*(f"{MODULE}:{name}" for name in NAMES), "calculator"), format="hermes", seconds_per_call=0.2,
    max_calls=4, max_answer_characters=100,
)  # fmt: skip


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answered(text, hosts=None, **settings):
    """Return the texts of the answers to a turn, whether the trajectory ends, and the counts."""
    box = Tools(replace(SETTINGS, **settings)).open_box(hosts or HostsHere(), None)
    messages, ends = asyncio.run(box.answer(box.find_calls(text)))
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages], ends, box.counts


def test_calls_are_answered_in_their_order_and_run_at_the_same_time():
    hosts = HostsHere()
    text = call("wait", seconds=0.05) + call("weather", city="Rome", days=2) + call("wait", seconds=0.01)
    texts, ends, counts = answered(text, hosts)
    assert texts == ['{"waited": 0.05, "ü": null}', "Rome: sunny sunny ", '{"waited": 0.01, "ü": null}']
    assert not ends and counts == {"tool_calls": 3, "tool_errors": 0, "malformed_calls": 0}
    assert hosts.most_at_once >= 2
    assert hosts.asked[1] == (f"{MODULE}:weather", {"city": "Rome", "days": 2}, 0.2)


def test_an_answer_names_its_call():
    box = Tools(SETTINGS).open_box(HostsHere(), None)
    first = box.find_calls(call("weather", city="Rome") + "<tool_call>?</tool_call>" + call("no such|>tool"))
    (later,) = box.find_calls(call("calculator", expression="1+1"))
    messages, _ = asyncio.run(box.answer([*first, later]))
    assert [message["tool_call_id"] for message in messages] == ["call00001", "call00002", "call00003", "call00004"]
    assert [message["name"] for message in messages] == ["weather", "malformed", "no_such__tool", "calculator"]
    mistral = Tools(replace(SETTINGS, format="mistral")).open_box(HostsHere(), None)
    named = [{"name": "weather", "arguments": {}, "id": id_} for id_ in ("a1B2c3D4e", "</s>")]
    written = f"[TOOL_CALLS]{json.dumps(named)}"
    assert [each.id for each in mistral.find_calls(written)] == ["a1B2c3D4e", "call00001"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("fails", text="no <disk>"), "Error: raised OSError: no <disk>"),
        (call("wait", seconds=9), "Error: took longer than 0.2 seconds"),
        (call("weather", city="Rome", days=200_000), "Error: returned 1200006 characters"),
        (call("pairs", number=1), "Error: what the tool returned cannot be written as JSON: keys must be str"),
        (call("huge", digits=5000), "Error: what the tool returned cannot be written as JSON: Exceeds the limit"),
        (call("weather"), "Error: the argument 'city' is missing; the arguments are: city, days"),
        (call("weather", city=7), "Error: the argument 'city' is wrong: 7 is not of type 'string'"),
        (
            call("wether", city="Rome"),
            "Error: there is no tool of this name; the tools are: weather, wait, fails, pairs",
        ),
        ("<tool_call>{}</tool_call>", "Error: the call <tool_call>{}</tool_call> has no 'name'"),
    ],
)
def test_an_error_is_answered_or_ends_or_fails_the_trajectory(text, error):
    is_malformed = text == "<tool_call>{}</tool_call>"
    texts, ends, counts = answered(call("calculator", expression="6/2") + text)
    assert texts[0] == "3" and texts[1].startswith(error) and not ends
    assert counts == {"tool_calls": 2, "tool_errors": 1, "malformed_calls": int(is_malformed)}
    texts, ends, _ = answered(text, on_error="end")
    assert texts[0].startswith(error) and ends
    with pytest.raises(ToolFailed, match="a call of a tool failed: Error: "):
        answered(text, on_error="fail")


def test_calls_beyond_the_limit_are_not_run():
    hosts = HostsHere()
    texts, _, counts = answered(call("calculator", expression="1") * 6, hosts)
    assert texts == ["1"] * 4 + ["Error: not run, because a turn has at most 4 calls"] * 2
    assert len(hosts.asked) == 4 and counts["tool_errors"] == 2


def test_a_long_answer_is_cut_and_says_so():
    texts, _, counts = answered(call("weather", city="Rome", days=30))
    assert texts == ["Rome: " + "sunny " * 15 + "sunn… (cut after 100 of 186 characters)"]
    assert counts["tool_errors"] == 0


def test_half_of_a_surrogate_pair_reaches_no_tokenizer():
    texts, _, _ = answered('<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d"}}</tool_call>')
    assert texts == ["?: sunny "]


def test_a_call_whose_process_was_ended_by_another_is_repeated():
    hosts = HostsHere(losses=2)
    assert answered(call("calculator", expression="2*3"), hosts)[0] == ["6"] and len(hosts.asked) == 3
    with pytest.raises(HostLost):
        answered(call("calculator", expression="2*3"), HostsHere(losses=3))


def test_a_turn_without_calls_has_no_answers():
    assert answered("I am done {really}") == ([], False, {"tool_calls": 0, "tool_errors": 0, "malformed_calls": 0})


def test_tools_of_a_file_are_found_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        'def double(x: int) -> int:\n    """Double.\n\n    Args:\n        x: A number.\n    """\n    return 2 * x\n'
    )
    monkeypatch.chdir(tmp_path)
    texts, _, _ = answered(call("double", x=4), functions=(f"{Path('mine.py').absolute()}:double",))
    assert texts == ["8"]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ((f"{MODULE}:weather", f"{MODULE}:weather"), r"functions\[1\]=.*another tool is called 'weather', too"),
        ((f"{MODULE}:HostsHere",), r"functions\[0\]=.* is not a function \(type\)"),
        ((f"{MODULE}:wether",), "has no 'wether'; did you mean 'weather'"),
        (("no_such_file.py:f",), "there is no file"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(functions, message):
    with pytest.raises(ConfigError, match=message):
        Tools(replace(SETTINGS, functions=functions))
    with pytest.raises(UnknownName, match="there is no tool 'calculater'; did you mean 'calculator'"):
        Tools(replace(SETTINGS, functions=("calculater",)))


def test_a_tool_is_registered_with_settings_that_the_model_does_not_see(monkeypatch):
    def inner(x: int):
        """Do it.

        Args:
            x: A number.
        """

    register_tool("inner")(inner)
    monkeypatch.setitem(TOOLS, "inner", TOOLS.pop("inner"))  # removed after the test
    with pytest.raises(ConfigError, match="inner is inside another function; define it in its module"):
        Tools(replace(SETTINGS, functions=("inner",)))
    tools = Tools(replace(SETTINGS, functions=("python",)))
    (schema,) = tools.schemas
    assert list(schema["function"]["parameters"]["properties"]) == ["code"]
    hosts = HostsHere()
    box = tools.open_box(hosts, None)
    asyncio.run(box.answer([ToolCall("", "python", {"code": "1"})]))
    (asked,) = hosts.asked
    assert asked[0] == "rl_megatron.rollouts.tools.interpreter:python"
    assert asked[1] == {"code": "1", "seconds_per_call": 0.2, "memory_mb": 1024, "max_answer_characters": 100}


def test_the_format_comes_from_the_template_or_from_the_configuration():
    template = ChatTemplate({"default": template_of("qwen3")}, {}, "the template")
    assert build_tools(ToolsConfig()) is None
    tools = build_tools(replace(SETTINGS, format="auto"))
    assert tools is not None
    assert len(tools.open_box(HostsHere(), template).find_calls(call("weather", city="Rome"))) == 1
    with pytest.raises(ConfigError, match=r"rollout.tools.format=auto needs a chat template, but prompts are"):
        Tools(replace(SETTINGS, format="auto")).choose_parser(None)
    with pytest.raises(ConfigError, match="the chat template cannot render messages of tools"):
        Tools(SETTINGS).choose_parser(ChatTemplate({"default": "{{ tools }}"}, {}, "the template"))


def test_tools_that_nothing_describes_are_warned_of(logged):
    Tools(SETTINGS).choose_parser(None)
    assert any("prompts are plain text, which does not describe tools" in message for message in logged)


def test_malformed_calls_are_told_apart_from_calls():
    calls = Tools(SETTINGS).open_box(HostsHere(), None).find_calls(call("weather") + "<tool_call>")
    assert [type(each) for each in calls] == [ToolCall, MalformedCall]
