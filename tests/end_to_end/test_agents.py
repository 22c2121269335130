"""Agents with OpenAI's own client make the trajectories of GRPO; what they were answered is what is learned from."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.launch import TINY_GRPO, metrics
from tests.end_to_end.listening import listening, reached_from_outside

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
PARSER = """
from rl_megatron.rollouts.tools.calls import ToolCall


def every_text(text, parameters):
    assert list(parameters) == ["length"]
    return [ToolCall("", "length", {"text": text})]
"""
# It calls the tool `length` with what the policy says, and keeps what it was answered.
AGENT = """
import json, os, pathlib, uuid
from openai import BadRequestError, OpenAI

record = json.loads(pathlib.Path(os.environ["RL_MEGATRON_RECORD"]).read_text())
client, seen = OpenAI(max_retries=0), []
tool = {"type": "function", "function": {"name": "length", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}}}}}

def ask(messages, **options):
    answer = client.chat.completions.create(
        model="policy", messages=messages, tools=[tool], extra_body={"return_token_ids": True}, **options)
    for choice in answer.choices:
        logprobs = [token.logprob for token in choice.logprobs.content]
        seen.append([answer.prompt_token_ids, choice.token_ids, logprobs])
    return answer.choices[0].message

messages = [{"role": "user", "content": record["prompt"]}]
for _ in range(2):
    message = ask(messages, logprobs=True)
    messages.append(message)
    for call in message.tool_calls:
        length = len(json.loads(call.function.arguments)["text"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(length)})
ask([{"role": "user", "content": "Help me"}], n=2, logprobs=True)
pieces = client.chat.completions.create(model="policy", messages=messages, stream=True)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
try:
    client.chat.completions.create(model="policy", messages=messages, tool_choice="required")
except BadRequestError as error:
    assert error.param == "tool_choice", error
pathlib.Path("seen", uuid.uuid4().hex).write_text(json.dumps(seen))
result = {"reward": len(text) / 10, "metadata": {"length": len(text)}}
pathlib.Path(os.environ["RL_MEGATRON_RESULT"]).write_text(json.dumps(result))
"""
OPTIONS = (
    *TINY_GRPO, "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2", "train.global_batch_size=4",
    "train.steps=1", "train.eval_every=0", "data.num_eval_examples=2", "model.max_sequence_length=256",
    "train.micro_batch_tokens=256",
    "generation.max_new_tokens=6", "data.format=chat", "data.chat_template=chat.jinja", "rollout.worker=agent",
    f"rollout.agent.command={sys.executable} agent.py", "rollout.agent.tool_format=parser.py:every_text",
    "rollout.save_every=1",
)  # fmt: skip


def written(directory, agent=AGENT):
    """Write the files of a run with an agent."""
    (directory / "chat.jinja").write_text(TEMPLATE)
    (directory / "parser.py").write_text(PARSER)
    (directory / "agent.py").write_text(agent)
    (directory / "seen").mkdir()
    return directory


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_agents_were_answered_is_learned_from(tmp_path, forks, ranks):
    import pyarrow.parquet

    options = (*OPTIONS, "parallel.tensor=2") if ranks == 2 else OPTIONS
    done = forks.run_ranks(written(tmp_path), "train", *options, ranks=ranks)
    assert [rank.status for rank in done] == [0] * ranks, done[0].err
    (step,) = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert step["turns"] == 5 and step["segments"] >= 4 and step["failed_trajectories"] == 0
    assert step["mismatch_max"] < 1e-4 and step["grad_norm"] > 0
    rows = pyarrow.parquet.read_table(tmp_path / "out/rollouts/grpo/step-000001.parquet").to_pylist()
    trained = {}
    for row in rows:
        logprobs, taken = row["logprobs"], 0
        for turn in row["turns"]:
            start, end = turn["start"], turn["end"]
            assert all(row["sampled"][start:end])
            key = tuple(row["ids"][:start]), tuple(row["ids"][start:end])
            trained.setdefault(key, []).append(tuple(logprobs[taken : taken + end - start]))
            taken += end - start
        assert taken == sum(row["sampled"]) == len(logprobs)
    seen = [each for path in Path(tmp_path, "seen").iterdir() for each in json.loads(path.read_text())]
    assert sum(map(len, trained.values())) == 4 * 5 and len(seen) >= 4 * 4
    found = [
        logprobs
        for prompt, ids, logprobs in seen
        if any(one == pytest.approx(logprobs, rel=1e-6) for one in trained.get((tuple(prompt), tuple(ids)), ()))
    ]
    assert len(found) == 4 * 4  # the others are those of the evaluation


def test_an_agent_that_crashes_is_tried_again_and_ends_the_run(tmp_path, forks):
    written(tmp_path, "raise OSError('the world has ended')")
    failed = forks.run(tmp_path, "train", *OPTIONS, "rollout.retries=1")
    assert failed.status == 1
    assert "ended with status 1; its output ends: " in failed.err and "OSError: the world has ended" in failed.err
    assert "attempt 2 of 2" in failed.err


HANGS = """
import os, pathlib, time
pathlib.Path("seen", str(os.getpid())).touch()
time.sleep(600)
"""


def pids(directory):
    return [int(path.name) for path in (directory / "seen").iterdir()]


def test_agents_that_hang_end_at_their_limit_of_time(tmp_path, forks):
    failed = forks.run(written(tmp_path, HANGS), "train", *OPTIONS, "rollout.agent.timeout_seconds=3")
    assert failed.status == 1 and "took longer than rollout.agent.timeout_seconds=3" in failed.err
    assert pids(tmp_path) and not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


def test_only_this_machine_reaches_the_gateway_and_agents_do_not_outlive_a_run_that_is_killed(tmp_path, forks):
    with forks.start(written(tmp_path, HANGS), "train", *OPTIONS, ranks=1) as running:
        running.wait_until(lambda: pids(tmp_path), "an agent that runs")
        addresses = listening(running.pids)
        assert addresses and reached_from_outside(addresses) == []
    until = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids(tmp_path)):
        assert time.monotonic() < until, "an agent outlives the run"
        time.sleep(0.1)
