"""Tool calls in every format: calls are read, malformed calls are named, and other text is not a call."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.config.errors import ConfigError
from rl_megatron.rollouts.tools.calls import MOST_CALLS, MalformedCall, ToolCall, drop_thinking
from rl_megatron.rollouts.tools.formats import PARSERS, detect_format
from rl_megatron.rollouts.tools.xml_calls import parse_qwen
from tests.unit.data.chat_families import template_of

PARAMETERS = {
    "f": {
        "properties": {
            "a": {"type": "integer"}, "x": {"type": "string"}, "on": {"type": "boolean"}, "items": {"type": "array"},
            "maybe": {"type": "string", "nullable": True}, "either": {"type": ["integer", "string"]},
        }
    }
}  # fmt: skip


def found(format_, text):
    """Return (name, arguments) of each call, and the reason of each malformed one."""
    calls = PARSERS[format_](drop_thinking(text), PARAMETERS)
    return [(call.name, call.arguments) if isinstance(call, ToolCall) else call.reason for call in calls]


XML = "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>"
CALLS = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
    ("hermes", 'I look.<tool_call>{"name": "f", "arguments": {}}</tool_call> and so on', [("f", {})]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "say \\"{</tool_call>}\\" — ü"}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b": {"c": [1, null]}}}</tool_call>',
        [("f", {"x": 'say "{</tool_call>}" — ü'}), ("g", {"b": {"c": [1, None]}})],
    ),
    ("hermes", '<think><tool_call>{"name": "g"</tool_call></think>4', []),
    ("hermes", '<think>no</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
    ("hermes", 'thought </think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
    ("hermes", '<think><tool_call>{"name": "f", "arguments": {}}</tool_call>', []),
    ("hermes", 'a set {"name": "f", "arguments": {}} and a list [f(a=1)]', []),
    ("qwen", XML.format("<parameter=a>\n5\n</parameter>"), [("f", {"a": 5})]),
    (
        "qwen",
        XML.format("<parameter=x>\n5\n</parameter>\n<parameter=on>\nTrue\n</parameter>"),
        [("f", {"x": "5", "on": True})],
    ),
    ("qwen", XML.format('<parameter=items>\n[1, "ü"]\n</parameter>'), [("f", {"items": [1, "ü"]})]),
    ("qwen", XML.format("<parameter=items>\n['a', None]\n</parameter>"), [("f", {"items": ["a", None]})]),
    ("qwen", XML.format("<parameter=x>\n\n a\n</parameter> \n\n</parameter>"), [("f", {"x": "\n a\n</parameter> \n"})]),
    ("qwen", XML.format("<parameter=maybe>\nnull\n</parameter>"), [("f", {"maybe": None})]),
    ("qwen", XML.format("<parameter=either>\nseven\n</parameter>"), [("f", {"either": "seven"})]),
    ("qwen", XML.format("<parameter=a>\nmany\n</parameter>"), [("f", {"a": "many"})]),
    ("qwen", XML.format("") + " then " + XML.format("<parameter=a>1</parameter>"), [("f", {}), ("f", {"a": 1})]),
    ("qwen", "a < b and {x} and [f(a=1)]", []),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
    ("llama", '{"type": "function", "name": "f", "parameters": {"x": "{\\"}"}}', [("f", {"x": '{"}'})]),
    (
        "llama",
        '{"name": "f", "parameters": {"x": ";"}}; {"name": "g", "parameters": {}}',
        [("f", {"x": ";"}), ("g", {})],
    ),
    ("llama", 'I see.<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
    ("llama", '{"name": "Rome", "country": "Italy"}', []),
    ("llama", '{"answer": 4}', []),
    ("llama", "{x} is a set, and {\"name\"} is another", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', [("f", {"a": 1})]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]',
        [("f", {"x": "]"}), ("g", {})],
    ),
    (
        "mistral",
        'Well.[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
        [("f", {"x": "[TOOL_CALLS]"}), ("g", {})],
    ),
    ("mistral", '[{"name": "f", "arguments": {}}]', []),
    ("mistral", '[THINK][TOOL_CALLS]f[ARGS]{}[/THINK]4', []),
    ("pythonic", '[f(a=1), g(b="x")]', [("f", {"a": 1}), ("g", {"b": "x"})]),
    ("pythonic", "[f()]", [("f", {})]),
    ("pythonic", "[f(x='it\\'s [g()] — ü', items=[1, (-2.5, None)], d={'k': True})]",
     [("f", {"x": "it's [g()] — ü", "items": [1, [-2.5, None]], "d": {"k": True}})]),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", [("f", {"a": 1})]),
    ("pythonic", "<think>[f(a=2)]</think>\n[f(a=1)]", [("f", {"a": 1})]),
    ("pythonic", "[1, 2]", []),
    ("pythonic", "[click(here)](there)", []),
    ("pythonic", "I call [f(a=1)]", []),
    ("pythonic", "[see (1)] and (2)", []),
]  # fmt: skip


@pytest.mark.parametrize(("format_", "text", "wanted"), CALLS)
def test_calls_are_read(format_, text, wanted):
    assert found(format_, text) == wanted


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "is not JSON: Expecting ',' delimiter"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "is not followed by </tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "has no 'arguments'"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "'arguments' of type str, but it must be an"),
    ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', "'name' of type list, but it must be a str"),
    ("hermes", "<tool_call>[1]</tool_call>", "is the JSON of list, but must be an object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is not a value of JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 99999, "is not JSON that can be read: maximum rec"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 9999 + "}}", "Exceeds the limit"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "an object has a key twice"),
    ("qwen", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "is not <tool_call><function=NAME>…"),
    ("qwen", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "is not <tool_call><function=NAME>…"),
    ("qwen", "<function=f></function>", "is not within <tool_call> and </tool_call>"),
    ("qwen", "<tool_call><function=></function></tool_call>", "has no name; write <function=NAME>"),
    ("qwen", XML.format("a = 1"), "has 'a = 1' where <parameter=KEY>…</parameter> should be"),
    ("qwen", XML.format("<parameter=a>1</parameter><parameter=a>2</parameter>"), "has the parameter 'a' twice"),
    ("llama", '<|python_tag|>print("hello")', "is not JSON: Expecting value"),
    ("llama", '<|python_tag|>{"name": "f"}', "has no 'parameters'"),
    ("llama", '{"name": "f", "parameters": {"a": 1}', "is not JSON: Expecting ',' delimiter"),
    ("mistral", "[TOOL_CALLS] f(a=1)", "is not JSON: Expecting value"),
    ("mistral", "[TOOL_CALLS][]", "is not a list of calls, and not name[ARGS]{…}"),
    ("mistral", '[TOOL_CALLS][{"name": "f"}]', "has no 'arguments'"),
    ("mistral", "[TOOL_CALLS]f[ARGS]7", "'arguments' of type int, but it must be an object"),
    ("pythonic", "[f(a=1", "is not Python: '(' was never closed"),
    ("pythonic", "[f(1)]", "has an argument without a name; write name=value"),
    ("pythonic", "[f(**{'a': 1})]", "has an argument without a name; write name=value"),
    ("pythonic", "[f(a=g(b=1))]", "has a value of 'a' that is not a literal"),
    ("pythonic", "[f(a={1: 2})]", "has a value of 'a' that is not a literal"),
    ("pythonic", "[f(a=b'x')]", "has a value of 'a' that is not a literal"),
    ("pythonic", "[f(a=1e999)]", "has a value of 'a' that is not a literal"),
    ("pythonic", "[f(a=1, a=2)]", "has an argument twice"),
    ("pythonic", "[f(a=1), 2]", "is not a list of calls"),
    ("pythonic", "[f(a=" + "(" * 9999 + "]", "is not Python: too many nested parentheses"),
    ("pythonic", "[f(x='\0')]", "is not Python: "),
]


@pytest.mark.parametrize(("format_", "text", "reason"), MALFORMED)
def test_a_malformed_call_says_what_is_wrong(format_, text, reason):
    (said,) = found(format_, text)
    assert isinstance(said, str) and reason in said


def test_a_malformed_call_hides_no_other_and_its_long_text_is_cut():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    bad = f"<tool_call>{'x' * 500}"
    first, second, third = PARSERS["hermes"](good + bad + good, {})
    assert isinstance(first, ToolCall) and isinstance(third, ToolCall)
    assert isinstance(second, MalformedCall) and second.text == f"{bad[:200]}…"
    reasons = found("llama", '{"name": "f", "parameters": {}} and more')
    assert reasons == [("f", {}), "has text after the call"]
    assert found("pythonic", "[f(1), f(a=1)]")[1] == ("f", {"a": 1})


# --- what is rendered is read again ---


def as_hermes(calls):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )


def as_llama(calls):
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def as_mistral_list(calls):
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def as_mistral_named(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def as_pythonic(calls):
    written = (f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls)
    return f"[{', '.join(written)}]"


def as_qwen(calls):
    """Return calls as the template of Qwen3-Coder does: what is neither text nor a list is written as Python does."""
    return "\n".join(
        XML.replace("=f", f"={name}").format(
            "\n".join(
                f"<parameter={key}>\n{json.dumps(value) if isinstance(value, list | dict) else value}\n</parameter>"
                for key, value in arguments.items()
            )
        )
        for name, arguments in calls
    )


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["f", "g2", "look_up"])
ANY_CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
RENDERED = {
    "hermes": as_hermes, "llama": as_llama, "mistral": as_mistral_list, "mistral named": as_mistral_named,
    "pythonic": as_pythonic,
}  # fmt: skip


@pytest.mark.parametrize("how", RENDERED)
@given(calls=ANY_CALLS)
@settings(max_examples=40, deadline=None, database=None)
def test_what_is_written_in_a_format_is_read_again(how, calls):
    text = RENDERED[how](calls)
    assert [(call.name, call.arguments) for call in PARSERS[how.partition(" ")[0]](text, {})] == calls


TYPED = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(), "x": TEXTS.filter(lambda text: "</" not in text), "on": st.booleans(),
        "items": st.lists(VALUES, max_size=3),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("nullable", "text", "value"),
    [(True, "null", None), (True, "None", None), (True, "Rome", "Rome"), (False, "null", "null")],
)
def test_only_a_text_that_may_be_missing_is_none_in_xml(nullable, text, value):
    parameters = {"f": {"properties": {"x": {"type": "string", "nullable": nullable}}}}
    (call,) = parse_qwen(
        f"<tool_call>\n<function=f>\n<parameter=x>{text}</parameter>\n</function>\n</tool_call>", parameters
    )
    assert call.arguments == {"x": value}


@given(calls=st.lists(st.tuples(st.just("f"), TYPED), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None, database=None)
def test_what_is_written_as_xml_is_read_again(calls):
    assert [(call.name, call.arguments) for call in PARSERS["qwen"](as_qwen(calls), PARAMETERS)] == calls


# --- the choice of a format ---

CODER = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
PYTHONIC = (
    "put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2()]"
)


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        (template_of("qwen3"), "hermes"),
        (template_of("mistral"), "mistral"),
        (CODER, "qwen"),
        (LLAMA, "llama"),
        ("{{ '<|python_tag|>' }}", "llama"),
        (PYTHONIC, "pythonic"),
    ],
)
def test_the_format_is_chosen_from_the_template(template, format_):
    assert detect_format(template) == format_


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages }}", "has no sign of a format of tool calls; set rollout.tools.format to one of hermes"),
        ("<tool_call><arg_key>", "has no sign of a format"),
        (f"[TOOL_CALLS] {LLAMA}", r"has signs of several formats \(llama, mistral\); set rollout.tools.format"),
    ],
)
def test_a_template_without_one_format_is_refused(template, message):
    with pytest.raises(ConfigError, match=rf"rollout.tools.format=auto: the chat template {message}"):
        detect_format(template)


_BLOCK = re.compile(r"<tool_call>\s*(<function=.*?</function>)\s*</tool_call>", re.DOTALL)
XML_PARTS = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<function=",
    "</function>",
    "<parameter=x>",
    "<parameter=a>",
]
XML_PARTS += ["<parameter=a>", "</parameter>", "\n", "  ", "1", "text", "\x1c", ">"]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(XML_PARTS), max_size=40).map("".join))
def test_calls_in_xml_are_the_blocks_that_one_regular_expression_finds(text):
    expected, place = [], 0
    while (meant := re.compile("<tool_call>|<function=").search(text, place)) is not None:
        block = _BLOCK.match(text, meant.start())
        following = text.find("<tool_call>", meant.start() + 1)
        end = (following if following >= 0 else len(text)) if block is None else block.end()
        expected.append(text[meant.start() : end].strip())
        place = end
    calls = parse_qwen(text, PARAMETERS)
    assert len(calls) == len(expected)
    for call, whole in zip(calls, expected, strict=True):
        if isinstance(call, MalformedCall):
            assert call.text == (whole if len(whole) <= 200 else f"{whole[:200]}…")
            assert (call.reason.startswith("is not")) == (_BLOCK.fullmatch(whole) is None)
        else:
            assert parse_qwen(whole, PARAMETERS) == [call]


# Units that a policy may repeat, of each format, and what stands before and behind them.
REPEATED = [
    *(("hermes", "", unit, "") for unit in ("<tool_call>", '<tool_call>{"name": "f"', '<tool_call>"', "<tool_call>[")),
    *(("qwen", "", unit, "") for unit in ("<tool_call>", "<tool_call><function=f>", "<function=", "</function> ")),
    *(
        ("qwen", "<tool_call><function=f>", unit, "</function></tool_call>")
        for unit in ("<parameter=a>", "</parameter> ")
    ),
    *(("llama", "", unit, "") for unit in ("<|python_tag|>", '{"name": "f", "parameters": {}};', "[")),
    *(("mistral", "", unit, "") for unit in ("[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]f[ARGS]{}")),
    *(("pythonic", "[", unit, "]") for unit in ("f(1),", "f(a=1),", "f(a=[")),
]


@pytest.mark.change
@pytest.mark.parametrize(("format_", "before", "unit", "behind"), REPEATED, ids=lambda text: text or "nothing")
def test_the_time_grows_with_the_length_of_the_text_alone(format_, before, unit, behind):
    """With its square, the last text would take minutes."""
    for size in (1 << 17, 1 << 18, 1 << 19, 1 << 20):
        text, began = f"{before}{unit * (size // len(unit))}{behind}", time.process_time()
        assert len(PARSERS[format_](text, PARAMETERS)) <= MOST_CALLS + 1
        assert time.process_time() - began < 20


def test_a_call_that_is_nested_too_deep_to_be_shown_is_malformed():
    (call,) = PARSERS["pythonic"](f"[f({'+'.join('1' * 2000)})]", PARAMETERS)
    assert isinstance(call, MalformedCall)
