"""Connections of the gateway that say nothing, or too little."""

import asyncio
import os
import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from rl_megatron.config.environments import AgentConfig
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.gateway import connections
from rl_megatron.rollouts.gateway.server import Gateway
from tests.unit.data.chat_families import user
from tests.unit.rollouts.gateway.agents import acts

SECONDS = 0.5
HEADER = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(connections, "SECONDS_TO_ASK", SECONDS)


async def count_open(readers):
    """Return how many connections the server has not closed."""

    async def is_open(reader):
        try:
            return await asyncio.wait_for(reader.read(1), 0.05) != b""
        except TimeoutError:
            return True
        except ConnectionError:
            return False

    return sum(await asyncio.gather(*map(is_open, readers)))


@acts
async def test_silent_connections_are_few_and_are_closed_while_others_are_answered(qwen):
    agent, gateway = qwen.agent("one", "two"), Gateway(AgentConfig())
    async with gateway.session(agent.client, Sampling(8, stop_ids=(qwen.end,))) as session:
        host, port = urlsplit(session.base_url).netloc.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
        for number, (_, writer) in enumerate(opened):
            writer.write(HEADER if number % 2 else b"")
        assert await count_open([reader for reader, _ in opened]) == 16 + 4, "there is one trajectory"
        until = time.monotonic() + 10
        while await count_open([reader for reader, _ in opened]) and time.monotonic() < until:
            opened[-1][1].write(b"X: y\r\n")  # a header that grows does not end
            await asyncio.sleep(0.05)
        assert await count_open([reader for reader, _ in opened]) == 0 and time.monotonic() < until
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.api_key}"}) as http:
            for _ in range(2):  # the second request comes on the same connection, after the limit
                answer = await http.post(f"{session.base_url}/chat/completions", json={"messages": [user("Hello")]})
                assert answer.status_code == 200, answer.text
                await asyncio.sleep(2 * SECONDS)
        for _, writer in opened:
            writer.close()
    await gateway.close()


@acts
async def test_connections_without_a_key_that_never_end_their_bodies_are_closed(qwen):
    """Their requests are answered with 401 before their bodies are read."""
    gateway = Gateway(AgentConfig())
    async with gateway.session(qwen.agent().client, Sampling(8, stop_ids=(qwen.end,))) as session:
        host, port = urlsplit(session.base_url).netloc.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        for reader, writer in opened:
            writer.write(HEADER + b"Content-Length: 100000\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 401")
        until = time.monotonic() + 10
        while await count_open([reader for reader, _ in opened]) and time.monotonic() < until:
            for _, writer in opened:
                writer.write(b"x")
            await asyncio.sleep(0.05)
        assert await count_open([reader for reader, _ in opened]) == 0 and time.monotonic() < until
        for _, writer in opened:
            writer.close()
    await gateway.close()


@acts
async def test_a_new_connection_takes_the_place_of_the_longest_silent_one(qwen, monkeypatch):
    monkeypatch.setattr(connections, "SECONDS_TO_ASK", 60.0)
    agent, gateway = qwen.agent("one"), Gateway(AgentConfig())
    async with gateway.session(agent.client, Sampling(8, stop_ids=(qwen.end,))) as session:
        host, port = urlsplit(session.base_url).netloc.split(":")
        kept, asking = await asyncio.open_connection(host, int(port))
        asking.write(f"GET /v1/models HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {session.api_key}\r\n\r\n".encode())
        assert (await kept.readuntil(b"]}")).startswith(b"HTTP/1.1 200")
        opened = []
        for _ in range(30):
            opened.append(await asyncio.open_connection(host, int(port)))
            opened[-1][1].write(HEADER)
            await opened[-1][1].drain()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(headers=headers) as http:
            answer = await http.post(f"{session.base_url}/chat/completions", json={"messages": [user("Hello")]})
            assert answer.status_code == 200, answer.text
            readers = [reader for reader, _ in opened]
            assert await count_open(readers) == await count_open(readers[12:]) == 16 + 4 - 2
            assert await count_open([kept]) == 1, "its last request had an accepted key"
        for writer in (asking, *(writer for _, writer in opened)):
            writer.close()
    await gateway.close()


def accepted(port):
    """Return the connections that this process has accepted at a port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            is_internet = connection.family == socket.AF_INET
            if is_internet and connection.getsockname()[1] == port and connection.getpeername():
                found.append(connection)
    return found


@acts
async def test_the_body_of_an_answer_does_not_wait_for_the_acknowledgement_of_its_header(qwen):
    agent, gateway = qwen.agent("one"), Gateway(AgentConfig())
    async with gateway.session(agent.client, Sampling(8, stop_ids=(qwen.end,))) as session:
        host, port = urlsplit(session.base_url).netloc.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        while not (found := accepted(int(port))):
            await asyncio.sleep(0.01)
        for connection in found:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.close()
        writer.close()
    await gateway.close()
