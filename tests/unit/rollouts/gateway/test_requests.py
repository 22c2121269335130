"""What requests may say, what answers look like, and how errors are told."""

import asyncio
import json

import httpx
import pytest

from rl_megatron.rollouts.gateway.application import build_application
from rl_megatron.rollouts.tools.json_calls import parse_hermes
from rl_megatron.rollouts.trajectory import TokenLimits
from tests.unit.data.chat_families import user
from tests.unit.rollouts.gateway.agents import acts
from tests.unit.rollouts.gateway.test_histories import CALL, TOOLS

HELLO = [user("Hello")]


def events(answer):
    """Return the events of a stream, the last of which says that it is done."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *found, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(each) for each in found]


@acts
async def test_a_key_opens_its_own_session_alone(qwen):
    one, other = qwen.agent("one"), qwen.agent("other")
    sessions = {"key-1": one.session, "key-2": other.session}
    transport = httpx.ASGITransport(build_application(sessions.get))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/v1") as http:

        async def say(key):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return await http.post("/chat/completions", json={"messages": HELLO}, headers=headers)

        for key in (None, "", "key-3", "key-1 "[:-2]):
            answer = await say(key)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert (await say("key-2")).json()["choices"][0]["message"]["content"] == "other"
        assert (await say("key-1")).json()["choices"][0]["message"]["content"] == "one"
        del sessions["key-1"]
        assert (await say("key-1")).status_code == 401
        assert (await http.get("http://gateway/health")).status_code == 200
        assert (await http.get("/models")).status_code == 401
        models = await http.get("/models", headers={"Authorization": "Bearer key-2"})
        assert [model["id"] for model in models.json()["data"]] == ["policy"]
        unknown = await http.get("/embeddings")
        assert unknown.status_code == 404 and "/v1/chat/completions" in unknown.json()["error"]["message"]
    assert len(one.trajectory().turns) == len(other.trajectory().turns) == 1


@acts
async def test_an_answer_has_choices_logprobs_and_numbers_of_tokens(qwen):
    agent = qwen.agent("5", "6")
    answer = await agent.chat(*HELLO, model="gpt-9", n=2, logprobs=True, top_logprobs=5)
    assert answer["object"] == "chat.completion" and answer["model"] == "gpt-9"
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["5", "6"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
    prompt = len(agent.asked[0].prompt)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
    first, end = answer["choices"][0]["logprobs"]["content"]
    assert first["token"] == "5" and first["logprob"] == -1.0 and first["top_logprobs"][0]["token"] == "5"
    assert end["token"] == "<|im_end|>"


@acts
async def test_parameters_say_how_completions_are_sampled(qwen):
    agent = qwen.agent("5", "one STOP two", "6", max_new_tokens=50)
    await agent.chat(*HELLO, temperature=0.5, top_p=0.9, top_k=3, max_tokens=20, max_completion_tokens=30, seed=4)
    sampling = agent.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.5, 0.9, 3, 20)
    answer = await agent.chat(*HELLO, stop=["STOP", "HALT"], max_tokens=1000)
    sampling = agent.asked[1].sampling
    assert sampling.stop_strings.texts == ("STOP", "HALT") and sampling.max_new_tokens == 50
    content = answer["choices"][0]["message"]["content"]
    assert content == "one "
    await agent.chat(*HELLO, {"role": "assistant", "content": content}, user("And?"))
    assert [len(segment.turns) for segment in agent.trajectory().segments] == [1, 2]


@acts
async def test_a_stream_has_the_parts_of_the_whole_answer(qwen):
    text = "The sum is 5. " * 5
    agent = qwen.agent(text, CALL, "5", parser=parse_hermes)
    found = events(
        await agent.send("/chat/completions", messages=HELLO, stream=True, stream_options={"include_usage": True})
    )
    *pieces, usage = found
    assert all(piece["object"] == "chat.completion.chunk" and piece["usage"] is None for piece in pieces)
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == text and len(pieces) > 4
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == len(agent.asked[0].prompt)
    found = events(await agent.send("/chat/completions", messages=HELLO, stream=True, tools=TOOLS))
    calls = [call for piece in found for call in piece["choices"][0]["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather")]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    found = events(await agent.send("/completions", prompt="2 + 3 =", stream=True))
    assert "".join(piece["choices"][0]["text"] for piece in found) == "5"
    assert len(agent.trajectory().turns) == 3


@acts
async def test_a_policy_that_may_not_call_tools_or_writes_no_call_is_answered_as_text(qwen):
    broken = '<tool_call>{"name": </tool_call>'
    agent = qwen.agent(CALL, broken, CALL, parser=parse_hermes)
    for body, text in (({"tools": TOOLS, "tool_choice": "none"}, CALL), ({"tools": TOOLS}, broken), ({}, CALL)):
        (choice,) = (await agent.chat(*HELLO, **body))["choices"]
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


REFUSED = [
    ({"temperature": 3}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"), ({"n": 1.5}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [1]}, "tools"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"), ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"), ({"best": 3}, "best"), ({"functions": []}, "functions"),
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"stream": "yes"}, "stream"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
@acts
async def test_what_would_change_the_meaning_is_refused_by_name(qwen, body, param):
    agent = qwen.agent("5")
    error = await agent.refused(**{"messages": HELLO, **body})
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in error["message"] and agent.asked == []


@acts
async def test_what_says_nothing_is_ignored(qwen):
    agent = qwen.agent("5")
    await agent.chat(
        *HELLO, frequency_penalty=0.0, logit_bias={}, user="me", metadata={"a": 1}, store=False, tools=None,
        response_format={"type": "text"}, parallel_tool_calls=True, service_tier="auto", tool_choice="auto",
    )  # fmt: skip
    assert len(agent.asked) == 1


@acts
async def test_bodies_that_are_not_requests_are_refused(qwen):
    agent = qwen.agent("5")
    for content, status in ((b"{", 400), (b"[]", 400), (b" " * (agent.session.body_limits.num_bytes + 1), 413)):
        answer = await agent.http.post("/chat/completions", content=content)
        assert answer.status_code == status and answer.json()["error"]["message"]
    for prompt in (None, "", [], ["a", "b"], [[1], [2]], [-1], [10**6], [1.5]):
        assert (await agent.refused("/completions", prompt=prompt))["param"] == "prompt"


@acts
async def test_half_of_a_surrogate_pair_is_refused_and_the_trajectory_goes_on(qwen):
    agent = qwen.agent("5")
    for path, body in (
        ("/chat/completions", {"messages": [{"role": "user", "content": "a\ud83d"}]}),
        ("/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "\ude00"}}]}),
        ("/completions", {"prompt": "\udfff"}),
    ):
        answer = await agent.http.post(path, content=json.dumps(body))
        assert answer.status_code == 400 and "half of a surrogate pair" in answer.json()["error"]["message"]
    whole = await agent.http.post("/chat/completions", content=json.dumps({"messages": [user("\U0001f600")]}))
    assert whole.status_code == 200
    assert len(agent.trajectory().turns) == 1


@acts
async def test_texts_that_end_completions_are_refused_if_the_engine_ignores_them(qwen):
    agent = qwen.agent("5", stops_at_strings=False)
    assert (await agent.refused(messages=HELLO, stop="x"))["param"] == "stop"


@acts
async def test_a_history_that_is_full_is_told_and_truncates_the_trajectory(qwen):
    agent = qwen.agent("5", "6", limits=TokenLimits(10**6, 3))
    answer = await agent.chat(*HELLO)
    assert agent.trajectory().truncated is False
    message = answer["choices"][0]["message"]
    second = await agent.chat(*HELLO, message, user("And?"))
    assert second["choices"][0]["finish_reason"] == "length"
    error = await agent.refused(messages=[*HELLO, message, user("Again?")])
    assert error["code"] == "context_length_exceeded" and " is full: " in error["message"]
    assert "context length" in error["message"]  # as clients of verifiers look for
    trajectory = agent.trajectory()
    assert trajectory.truncated and len(trajectory.turns) == 2
    assert agent.trajectory(truncated=False).truncated is False


@acts
async def test_a_client_that_disconnects_is_not_learned_from(qwen, logged):
    agent = qwen.agent("5", "6")
    agent.waits.clear()
    sent, gone = [], asyncio.Event()
    body = iter([{"type": "http.request", "body": json.dumps({"messages": HELLO}).encode()}])

    async def receive():
        for part in body:
            return part
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "root_path": "",
        "headers": [(b"authorization", b"Bearer the-key")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    request = asyncio.create_task(build_application({"the-key": agent.session}.get)(scope, receive, send))
    await agent.wait_until_asked()
    gone.set()
    agent.waits.set()
    await request
    with pytest.raises(ValueError, match="the agent has got no completion"):
        agent.trajectory()
    answer = await agent.chat(*HELLO)
    assert answer["choices"][0]["message"]["content"] == "6"
    trajectory = agent.trajectory(metadata={"a": 1})
    assert len(agent.asked) == 2 and len(trajectory.turns) == 1
    assert trajectory.metadata == {"a": 1, "unheard_completions": 1}
    assert any("trajectory 7-0: the agent did not wait" in message for message in logged)


@acts
async def test_a_session_that_ends_ends_its_requests(qwen):
    agent = qwen.agent("5")
    agent.waits.clear()
    request = asyncio.create_task(agent.refused(status=410, messages=HELLO))
    await agent.wait_until_asked()
    await agent.session.end()
    assert (await request)["code"] == "session_ended"
    assert (await agent.refused(status=410, messages=HELLO))["code"] == "session_ended"


@acts
async def test_parallel_requests_with_one_beginning_are_histories_of_their_own(qwen):
    agent = qwen.agent("5", "6", "7", "8")
    first = await agent.chat(*HELLO)
    message = first["choices"][0]["message"]
    agent.waits.clear()
    more = [asyncio.create_task(agent.chat(*HELLO, message, user("And?"))) for _ in range(3)]
    await agent.wait_until_asked(4)
    agent.waits.set()
    answers = [(await each)["choices"][0]["message"]["content"] for each in more]
    assert sorted(answers) == ["6", "7", "8"]
    assert sorted(len(segment.turns) for segment in agent.trajectory().segments) == [1, 1, 2]
