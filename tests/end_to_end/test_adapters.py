"""Real environments of verifiers and OpenEnv each train a GRPO step; the ids that were sampled are trained on.

docs/adapters.md has the environments and their commands.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
import urllib.request
import uuid
from pathlib import Path

import pytest

from tests.docs.collector import blocks
from tests.docs.inputs import tokenizer
from tests.end_to_end.launch import TINY_GRPO, metrics
from tests.forkserver import REPOSITORY
from tests.ports import free_port

PYTHON = REPOSITORY / ".venv-adapters" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"there is no {PYTHON}: scripts/install_adapters.sh makes the libraries' environment"
)
PAGE = blocks("docs/adapters.md")
TEMPLATE = (
    "{% for t in tools or [] %}[tool] {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
SMALL = (
    *(key for key in TINY_GRPO if not key.startswith("data.task")), "algorithm.prompts_per_step=2",
    "algorithm.samples_per_prompt=2", "train.global_batch_size=4", "train.steps=1", "train.eval_every=0",
    "data.num_eval_examples=1", "model.max_sequence_length=1024", "train.micro_batch_tokens=1024",
    "generation.max_new_tokens=6", "data.chat_template=chat.jinja", "rollout.save_every=1", "tokenizer.path=tokenizer",
    "rollout.environment.processes=1", f"rollout.environment.python={PYTHON}",
)  # fmt: skip
TOOLS = """
import json, pathlib, uuid
import verifiers
from datasets import Dataset

def checksum(text: str) -> str:
    \"\"\"Return a number that depends on all characters.\"\"\"
    return str(sum(map(ord, text)) % 97)

def reward(completion, answer, info, state, **others):
    assert int(answer) is not None and info == {}
    results = [message["content"] for message in completion if message["role"] == "tool"]
    assert len(results) == 1 and results[0].isdigit()
    return int(results[0]) / 97

class Tools(verifiers.ToolEnv):
    async def get_model_response(self, state, prompt, **others):
        sampling = {"temperature": 0.5, "extra_body": {"return_token_ids": True}, "logprobs": True}
        response = await super().get_model_response(state, prompt, sampling_args=sampling)
        tokens = response.message.tokens
        found = [tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs]
        pathlib.Path("answered", uuid.uuid4().hex).write_text(json.dumps(found))
        return response

def load_environment():
    dataset = Dataset.from_list([{"question": "?", "answer": "1"}])
    return Tools(dataset=dataset, rubric=verifiers.Rubric(funcs=[reward]), tools=[checksum], max_turns=2)
"""
PARSER = """
from rl_megatron.rollouts.tools.calls import ToolCall

def every_text(text, parameters):
    return [ToolCall("", "checksum", {"text": text})]
"""
TASKSET = """
import verifiers.v1 as verifiers
from openai import AsyncOpenAI

class Data(verifiers.TaskData):
    answer: str = ""

class Sum(verifiers.Task[Data, verifiers.State, verifiers.TaskConfig]):
    @verifiers.reward
    async def length(self, task, trace) -> float:
        return sum(map(ord, trace.branches[-1].messages[-1].content)) % 97 / 97

class Sums(verifiers.Taskset[Sum, verifiers.TasksetConfig]):
    def load(self):
        for number in range(6):
            yield Sum(Data(prompt=f"{number}+1=", answer=str(number + 1)), self.config.task)

class Chat(verifiers.Harness[verifiers.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        return verifiers.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Sums", "Chat"]
"""
CLIENT = """
from longest_word import Heard, Say
from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

class Client(EnvClient[Say, Heard, State]):
    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        return StepResult(Heard(**payload["observation"]), payload["reward"], payload["done"])

    def _parse_state(self, payload):
        return State(**payload)
"""


def record_completions():
    """Let the run note what its engine sampled, before anything else handles it."""
    from rl_megatron.rollouts.client import RolloutClient

    complete = RolloutClient.complete

    async def recording(self, ids, sampling=None):
        completion = await complete(self, ids, sampling)
        found = [list(ids), list(completion.ids), list(completion.logprobs)]
        Path("sampled", uuid.uuid4().hex).write_text(json.dumps(found))
        return completion

    RolloutClient.complete = recording


def record_completions_with_own_modules():
    """Let the run note what its engine sampled, and its processes import modules of the working directory."""
    os.environ["PYTHONPATH"] = os.getcwd()
    record_completions()


@pytest.fixture
def page(tmp_path):
    """Write the files of the page, and what small runs need."""
    for block in PAGE:
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    tokenizer(tmp_path / "tokenizer")
    for name in ("sampled", "answered"):
        (tmp_path / name).mkdir()
    return tmp_path


def command_with(text):
    """Return the words of the page's training command that has a text, without the real model."""
    (found,) = [
        block.text for block in PAGE if block.language == "bash" and "train" in block.text and text in block.text
    ]
    words = shlex.split(found)
    assert words[:2] == ["rl-megatron", "train"]
    return [word for word in words[1:] if "init_from" not in word]


def noted(directory):
    """Return the notes in a directory: pairs of the ids before a completion and its ids, each with its logprobs."""
    found = [json.loads(path.read_text()) for path in directory.iterdir()]
    return {(tuple(before), tuple(ids)): logprobs for before, ids, logprobs in found}


def trained(directory):
    """Return the completions of the rows that the run has written, like `noted`, and the rows."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(directory / "out/rollouts/grpo/step-000001.parquet").to_pylist()
    found = {}
    for row in rows:
        taken = 0
        for turn in row["turns"]:
            start, end = turn["start"], turn["end"]
            assert all(row["sampled"][start:end])
            found[tuple(row["ids"][:start]), tuple(row["ids"][start:end])] = row["logprobs"][
                taken : taken + end - start
            ]
            taken += end - start
        assert taken == sum(row["sampled"]) == len(row["logprobs"])
    return found, rows


def check_run(directory, done, num_turns):
    """Check that a run has learned from every completion as it was sampled; return its rows."""
    assert done.status == 0, done.err
    (step,) = [line for line in metrics(directory / "out") if line["kind"] == "train"]
    assert step["turns"] == num_turns and step["failed_trajectories"] == 0
    assert step["mismatch_max"] < 1e-4 and step["grad_norm"] > 0
    sampled, (learned, rows) = noted(directory / "sampled"), trained(directory)
    assert len(learned) == 4 * num_turns and learned.keys() <= sampled.keys()
    assert all(logprobs == pytest.approx(sampled[key], rel=1e-6) for key, logprobs in learned.items())
    assert len({row["reward"] for row in rows}) > 1
    return rows


def test_the_environment_of_the_page_trains(page, forks):
    words = [*command_with("data=verifiers"), *SMALL, "data.task.max_examples=30"]
    done = forks.run(page, *words, before=record_completions)
    rows = check_run(page, done, num_turns=2)
    assert all("Describe the number" in row["prompt"] and "Longer, please." in row["completion"] for row in rows)


def test_a_tool_environment_trains_on_other_data(page, forks):
    (page / "tools_env.py").write_text(TOOLS)
    (page / "parser.py").write_text(PARSER)
    done = forks.run(
        page, "train", *SMALL, "data.task.name=arithmetic", "data.format=chat", "rollout.worker=verifiers",
        "rollout.environment.name=tools_env.py:load_environment", "rollout.agent.tool_format=parser.py:every_text",
        before=record_completions,
    )  # fmt: skip
    check_run(page, done, num_turns=2)
    answered = noted(page / "answered")  # also those of the evaluation
    assert trained(page)[0].keys() <= answered.keys() <= noted(page / "sampled").keys()


def test_a_taskset_trains(page, forks):
    (page / "sums_v1.py").write_text(TASKSET)
    done = forks.run(
        page, "train", *SMALL, "data=verifiers", "rollout.worker=verifiers", "rollout.environment.name=sums-v1",
        "rollout.environment.kwargs={agent: {runtime: {type: subprocess}}}", before=record_completions_with_own_modules,
    )  # fmt: skip
    rows = check_run(page, done, num_turns=2)
    assert all(re.search(r"\[user\] \d\+1=", row["prompt"]) for row in rows)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start the page's server; return its address."""
    port, directory = free_port(), tmp_path_factory.mktemp("server")
    (text,) = [block.text for block in PAGE if block.title == "longest_word.py"]
    file = directory / "longest_word.py"
    file.write_text(text.replace("port=8000", f"port={port}"))
    address = f"http://127.0.0.1:{port}"
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen([PYTHON, file], stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (directory / "server.log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("typed", [False, True])
def test_the_server_of_the_page_trains(page, forks, server, typed):
    words = [word.replace("http://127.0.0.1:8000", server) for word in command_with("openenv")]
    (page / "client.py").write_text(CLIENT)
    own = [
        f'+rollout.environment.kwargs.{key}="client.py:{name}"'
        for key, name in (("client", "Client"), ("action", "Say"))
    ]
    options = ["data.format=chat", *(own if typed else ())]
    done = forks.run(page, *words, *SMALL, *options, before=record_completions)
    rows = check_run(page, done, num_turns=2)
    assert all(
        "Say a word that is longer than" in row["prompt"] and "letters. Longer!" in row["completion"] for row in rows
    )
