"""Measure how long an agent waits for the gateway, alone and while other agents and connections attack it.

    python benchmarks/gateway_load.py --seconds 30

The engine is a fake one that answers at once, so that the time is the gateway's. One agent sends a short request every
20 ms, and a clock ticks on the gateway's loop. Then the same is measured while 400 connections say nothing, each of
which is opened again a second after it was closed, and while trajectories send requests that are refused, without a
pause: bodies of 8 MiB, and tools that are nested 900 deep. At last others join them, whose requests have the largest
sizes that are read: texts, wide tools, 100,000 messages, and as many messages as a request may have. All of them run in
processes of their own.

It prints in ms how long the agent waited, how late the clock was, and how much processor time the gateway's process
used between two ticks. Its own work can have delayed the clock by no more than that, whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CONTEXT = 32768
CONNECTIONS = 400
SILENT, BODIES, NESTED = "silent connections", "bodies of 8 MiB", "nested tools"
_PATH = "/v1/chat/completions"
_PAUSE_SECONDS, _TICK_SECONDS = 0.02, 0.005
_TEMPLATE = (
    "{% for tool in tools or [] %}[tool] {{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def attacks(most_bytes: int) -> dict[str, bytes]:
    """Return the body of each attack: those that are as large as they may be have nearly `most_bytes`."""

    def write(number: int = 1, content: str = "Hello", tools: str = "[]") -> bytes:
        message = json.dumps({"role": "user", "content": content})
        return f'{{"tools": {tools}, "messages": [{", ".join([message] * number)}]}}'.encode()

    size = most_bytes - 1000
    return {
        BODIES: write(content="a" * (8 << 20)),
        "largest text": write(content="a log line 12345\n" * (size // 18)),
        "largest tools": write(tools=f'[{{"a": [{"[]," * (size // 3 - 10)}0]}}]'),
        NESTED: write(tools=f'[{{"a": {"[" * 900}{"]" * 900}}}]'),
        "100,000 messages": write(100_000, ""),
        "most messages": write(min(CONTEXT, size // 40), ""),
    }


def _post(connection: http.client.HTTPConnection, key: str, body: bytes) -> int:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", _PATH, body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def attack(address: tuple[str, int], key: str, body: bytes, stop: Event, counted: Connection) -> None:
    """Send a body again and again, and send how often each status was answered."""
    statuses: dict[str, int] = {}
    connection = http.client.HTTPConnection(*address, timeout=60)
    counted.send("started")
    while not stop.is_set():
        try:
            status = str(_post(connection, key, body))
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
            connection.close()
        statuses[status] = statuses.get(status, 0) + 1
    counted.send(statuses)


def be_silent(address: tuple[str, int], stop: Event, counted: Connection) -> None:
    """Keep connections that have sent half of a header, and open one again a second after the server has closed it."""
    closed, num_again = [0.0] * CONNECTIONS, 0  # when connections are opened again, and how many have been closed
    counted.send("started")
    with selectors.DefaultSelector() as selector:
        while not stop.is_set():
            now = time.time()
            for _ in range(sum(when <= now for when in closed)):
                connection = socket.create_connection(address)
                connection.sendall(f"POST {_PATH} HTTP/1.1\r\nHost: gateway\r\n".encode())
                selector.register(connection, selectors.EVENT_READ)
            closed = [when for when in closed if when > now]
            for key, _ in selector.select(0.01):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
                closed.append(time.time() + 1)
                num_again += 1
    counted.send({"opened again": num_again})


def ask(address: tuple[str, int], key: str, seconds: float, measured: Connection) -> None:
    """Send short requests, and send how long each of them took, and how many were sent again."""
    body = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}]}).encode()
    connection, delays, num_repeated = http.client.HTTPConnection(*address, timeout=60), [], 0
    until = time.time() + seconds
    while time.time() < until:
        began, status = time.perf_counter(), None
        while status is None:
            try:
                status = _post(connection, key, body)
            except (OSError, http.client.HTTPException):  # OpenAI's client tries again too
                connection.close()
                num_repeated += 1
        delays.append(time.perf_counter() - began)
        assert status == 200, status
        time.sleep(_PAUSE_SECONDS)
    measured.send((delays, num_repeated))


def make_client(name: str, texts: Sequence[str]) -> Callable[[str], Any]:
    """Return a function that makes the `RolloutClient` of a trajectory, with a tokenizer that learned from texts."""
    from rl_megatron.config.data_sources import PromptsConfig
    from rl_megatron.data.rendering import Renderer
    from rl_megatron.data.run_tokenizer import train_bpe
    from rl_megatron.data.tasks import Problem
    from rl_megatron.generation.interfaces import Completion, Request, Sampling, WeightSpan
    from rl_megatron.rollouts.client import RolloutClient
    from rl_megatron.rollouts.trajectory import TokenLimits

    tokenizer = train_bpe(texts, 8000)
    renderer = Renderer(PromptsConfig(format="chat", chat_template=_TEMPLATE), tokenizer)
    record = {"messages": [{"role": "user", "content": "Hello"}]}
    prompt = renderer.encode_problem(Problem("", "", record, name))

    async def answer(request: Request) -> Completion:
        ids = (*tokenizer.encode("The answer is 5."), tokenizer.eos_id)
        return Completion(request.request_id, ids, (-1.0,) * len(ids), (WeightSpan(1, 0, len(ids)),), "stop")

    limits, sampling = TokenLimits(CONTEXT, 10**9), Sampling(64, stop_ids=(tokenizer.eos_id,))
    return lambda trajectory: RolloutClient(trajectory, 1, prompt, sampling, tokenizer, limits, answer)


async def measure(make: Callable[[str], Any], seconds: float, attackers: Sequence[str] | None) -> dict[str, Any]:
    """Return the delays of an agent and of the loop's clock in seconds, the descriptors, and the attacks' statuses.

    Args:
        make: Makes the client of a trajectory.
        seconds: How long it takes.
        attackers: The names of those that attack meanwhile; None for all.
    """
    from contextlib import AsyncExitStack

    from rl_megatron.config.environments import AgentConfig
    from rl_megatron.generation.interfaces import Sampling
    from rl_megatron.rollouts.gateway.server import Gateway

    spawn = multiprocessing.get_context("spawn")
    gateway, sampling = Gateway(AgentConfig()), Sampling(64)
    async with AsyncExitStack() as stack:

        async def open_session(name: str) -> Any:
            return await stack.enter_async_context(gateway.session(make(name), sampling))

        agent = await open_session("agent")
        url = urlsplit(agent.base_url)
        address = (str(url.hostname), int(url.port or 0))
        stop, processes, pipes = spawn.Event(), [], {}

        def start(name: str, target: Callable[..., None], *arguments: Any) -> None:
            pipes[name], other = spawn.Pipe(duplex=False)
            processes.append(spawn.Process(target=target, args=(*arguments, other)))
            processes[-1].start()

        async def receive(name: str) -> Any:
            return await asyncio.to_thread(pipes[name].recv)

        if attackers is None or SILENT in attackers:
            start(SILENT, be_silent, address, stop)
        for name, body in attacks(agent.body_limits.num_bytes).items():
            if attackers is None or name in attackers:
                session = await open_session(name)
                start(name, attack, address, session.api_key, body, stop)
        for name in pipes:
            await receive(name)
        started = list(pipes)
        start("agent", ask, address, agent.api_key, seconds)
        measured = asyncio.create_task(receive("agent"))
        ticks, used, descriptors = [], [], []
        while not measured.done():
            began, used_before = time.perf_counter(), time.process_time()
            await asyncio.sleep(_TICK_SECONDS)
            ticks.append(time.perf_counter() - began - _TICK_SECONDS)
            used.append(time.process_time() - used_before)
            descriptors.append(len(os.listdir("/proc/self/fd")))
        stop.set()
        statuses = {name: await receive(name) for name in started}
        for process in processes:
            await asyncio.to_thread(process.join)
    await gateway.close()
    delays, num_repeated = measured.result()
    return {
        "agent": delays, "repeated": num_repeated, "clock": ticks, "processor": used,
        "descriptors": max(descriptors), "statuses": statuses,
    }  # fmt: skip


def _lines(name: str, result: dict[str, Any]) -> Iterator[str]:
    for what in ("agent", "clock", "processor"):
        delays = sorted(result[what])
        at = [1000 * delays[min(len(delays) - 1, int(share * len(delays)))] for share in (0.5, 0.99, 1.0)]
        yield f"{name:12} {what:9} n={len(delays):6} p50={at[0]:7.1f} p99={at[1]:7.1f} max={at[2]:7.1f}"
    yield f"{name:12} {result['descriptors']} open descriptors at most; {result['repeated']} requests sent again"
    for attack_name, statuses in result["statuses"].items():
        yield f"{name:12} {attack_name}: {statuses}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=30.0, help="how long each of the three parts takes")
    return arguments


def main(arguments: Sequence[str]) -> int:
    """Measure all parts, and print the delays and the load of the machine."""
    seconds = parser().parse_args(arguments).seconds
    package = Path(__file__).resolve().parents[1] / "rl_megatron"
    make = make_client("agent", [path.read_text("utf-8") for path in sorted(package.rglob("*.py"))[:200]])
    gc.collect()
    gc.freeze()  # as a stage does when it begins
    for name, attackers in (("alone", ()), ("refused", (SILENT, BODIES, NESTED)), ("all", None)):
        result = asyncio.run(measure(make, seconds, attackers))
        print("\n".join(_lines(name, result)), flush=True)
        print(f"{name:12} load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
