"""Connections of the gateway that say nothing, or too little."""

import asyncio
import time
from urllib.parse import urlsplit

import httpx
import pytest

from rl_megatron.config.agent import AgentConfig
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
