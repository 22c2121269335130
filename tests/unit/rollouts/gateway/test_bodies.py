"""Requests that are too large or nested too deep, and those that others must not wait for."""

import asyncio
import json
import threading

import pytest

from rl_megatron.rollouts.gateway.application import build_application
from rl_megatron.rollouts.gateway.bodies import MOST_LEVELS
from rl_megatron.rollouts.trajectory import TokenLimits
from tests.unit.data.chat_families import user
from tests.unit.rollouts.gateway.agents import acts

HELLO = [user("Hello")]
CONTEXT = 400
LIMITS = TokenLimits(CONTEXT, 10**6)
TOO_MANY = 10_001


def nest(levels, inner=0):
    """Return JSON of so many lists in lists."""
    return "[" * levels + json.dumps(inner) + "]" * levels


@pytest.fixture
def idle(qwen, monkeypatch):
    """An agent for whom no text is encoded."""
    agent = qwen.agent("5", limits=LIMITS)

    def refuse(*arguments):
        raise AssertionError("a text was encoded")

    monkeypatch.setattr(qwen.tokenizer, "encode_special", refuse)
    monkeypatch.setattr(qwen.tokenizer, "encode", refuse)
    return agent


@acts
async def test_a_body_that_is_too_large_is_refused_while_it_is_read(qwen):
    agent = qwen.agent("5", limits=LIMITS)
    most = agent.session.body_limits.num_bytes
    assert most == (1 << 20) + 16 * CONTEXT
    for header in ([(b"content-length", str(most + 1).encode())], []):
        parts, answer = 0, []

        async def receive():
            nonlocal parts
            parts += 1
            return {"type": "http.request", "body": b" " * (1 << 16), "more_body": True}

        async def send(message, answer=answer):
            answer.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "root_path": "",
            "headers": [(b"authorization", b"Bearer the-key"), *header], "http_version": "1.1", "scheme": "http",
        }  # fmt: skip
        await build_application({"the-key": agent.session}.get)(scope, receive, send)
        error = json.loads(answer[1]["body"])["error"]
        assert answer[0]["status"] == 413 and error["code"] == "context_length_exceeded"
        assert f"more than {most} bytes" in error["message"] and parts == (0 if header else 17)
    fits = await agent.http.post("/chat/completions", content=json.dumps({"messages": HELLO}).ljust(most).encode())
    assert fits.status_code == 200
    assert agent.trajectory().truncated


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/chat/completions", lambda text: {"messages": [user(text)]}, "messages[0] has a text of"),
        ("/chat/completions", lambda text: {"messages": HELLO, "tools": [{"name": text}]}, "tools has a text of"),
        ("/completions", lambda text: {"prompt": text}, "prompt has a text of"),
    ],
)
@acts
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(qwen, idle, path, body, said):
    longest = qwen.tokenizer.longest_token
    error = await idle.refused(path, **body("é" * (CONTEXT * longest + 1)))
    assert error["code"] == "context_length_exceeded" and said in error["message"]
    assert f"{CONTEXT} tokens with {longest} characters each" in error["message"]


@acts
async def test_messages_that_cannot_fit_together_are_refused_before_they_are_encoded(qwen, idle):
    half = user("é" * (CONTEXT * qwen.tokenizer.longest_token // 2))
    error = await idle.refused(messages=[half, user("And?"), half])
    assert error["code"] == "context_length_exceeded" and "the context holds at most" in error["message"]


@acts
async def test_a_conversation_continues_after_a_message_that_could_not_fit(qwen):
    agent = qwen.agent("5", "6", limits=LIMITS)
    answer = (await agent.chat(*HELLO))["choices"][0]["message"]
    longest = user("é" * (CONTEXT * qwen.tokenizer.longest_token))
    for _ in range(2):
        error = await agent.refused(messages=[*HELLO, answer, longest])
        assert error["code"] == "context_length_exceeded"
    await agent.chat(*HELLO, answer, user("And?"))
    (segment,) = agent.trajectory().segments
    assert len(segment.turns) == 2


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"messages": [user("")] * TOO_MANY}, "the body"),
        ({"messages": [user([0] * TOO_MANY)]}, "messages[0]"),
        ({"messages": HELLO, "tools": [{"name": "f", "parameters": [0] * TOO_MANY}]}, "tools"),
        ({"messages": HELLO, "tools": [{}] * TOO_MANY * 3}, "the body"),
    ],
)
@acts
async def test_more_values_than_tokens_are_refused(idle, body, where):
    error = await idle.refused(**body)
    assert error["code"] == "context_length_exceeded" and f"{where} has more than 10000" in error["message"]


@acts
async def test_more_values_in_other_parameters_do_not_concern_the_context(qwen):
    error = await qwen.agent("5", limits=LIMITS).refused(messages=HELLO, metadata=[0] * TOO_MANY)
    assert error["param"] == "metadata" and error["code"] is None
    error = await qwen.agent("5", limits=LIMITS).refused("/completions", prompt=[7] * (CONTEXT + 1))
    assert error["code"] == "context_length_exceeded" and "has 401 tokens" in error["message"]


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 100_000])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('"tools": [{"name": "f", "parameters": NESTED}]', "tools"),
        ('"tool_choice": NESTED', "tool_choice"),
        ('"response_format": NESTED', "response_format"),
        ('"stop": NESTED', "stop"),
        ('"metadata": NESTED', "metadata"),
        ('"messages": [{"role": "user", "content": NESTED}]', "messages[0]"),
        ('"messages": [NESTED]', "messages[0]"),
    ],
)
@acts
async def test_values_that_are_nested_too_deep_are_refused_by_name(qwen, body, param, levels):
    agent = qwen.agent("5")
    content = f'{{"messages": [{{"role": "user", "content": "Hello"}}], {body.replace("NESTED", nest(levels))}}}'
    answer = await agent.http.post("/chat/completions", content=content)
    error = answer.json()["error"]
    assert answer.status_code == 400 and f"may have {MOST_LEVELS} levels" in error["message"]
    assert error["param"] == (None if levels == 100_000 else param)  # the parser itself refuses the deepest
    await agent.chat(*HELLO)
    assert len(agent.trajectory().turns) == 1


@acts
async def test_tools_may_be_nested_as_deep_as_a_template_can_write(qwen):
    agent = qwen.agent("5")
    deep = json.loads(nest(MOST_LEVELS - 4))
    await agent.chat(*HELLO, tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}])
    assert "[" * (MOST_LEVELS - 4) in qwen.tokenizer.decode(agent.asked[0].prompt)


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 100_000])
@acts
async def test_arguments_of_calls_that_are_nested_too_deep_stay_text(qwen, levels):
    agent = qwen.agent("5")
    arguments = f'{{"a": {nest(levels)}}}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    await agent.chat(*HELLO, {"role": "assistant", "tool_calls": [call]}, user("And?"))
    assert len(agent.trajectory().turns) == 1


@acts
async def test_requests_are_answered_while_the_text_of_another_agent_is_encoded(qwen, monkeypatch):
    has_begun, may_end, encode = threading.Event(), threading.Event(), qwen.tokenizer.encode_special

    def encode_slowly(text):
        if len(text) > 10_000:
            has_begun.set()
            assert may_end.wait(10), "the loop waits for this thread"
        return encode(text)

    monkeypatch.setattr(qwen.tokenizer, "encode_special", encode_slowly)
    slow, quick = qwen.agent("1", "2"), qwen.agent("3")
    first = asyncio.create_task(slow.chat(user("word " * 5000)))
    await asyncio.to_thread(has_begun.wait, 10)
    second = asyncio.create_task(slow.chat(*HELLO))  # requests of one trajectory keep their order
    assert (await quick.chat(*HELLO))["choices"][0]["message"]["content"] == "3"
    await asyncio.sleep(0.05)
    assert not first.done() and not second.done() and not slow.asked
    may_end.set()
    answers = [(await each)["choices"][0]["message"]["content"] for each in (first, second)]
    assert answers == ["1", "2"]
    assert len(slow.trajectory().segments) == 2
