"""A server with `TokenRequired` answers only requests that carry its token."""

import asyncio

import httpx2
import pytest

from rl_megatron.generation.servers.access import TOKEN, TokenRequired, make_headers


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"weights"})


def status_of(headers, path="/collective_rpc"):
    async def ask():
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(TokenRequired(app))) as client:
            return await client.post(f"http://server{path}", headers=headers)

    return asyncio.run(ask()).status_code


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        (make_headers("a token of the run"), "/collective_rpc", 200),
        (make_headers("a token of another run"), "/collective_rpc", 401),
        ({"Authorization": "a token of the run"}, "/collective_rpc", 401),
        ({}, "/collective_rpc", 401),
        ({}, "/health/../collective_rpc", 401),
        ({}, "/health", 200),
    ],
)
def test_a_request_needs_the_token_of_the_run(monkeypatch, headers, path, status):
    monkeypatch.setenv(TOKEN, "a token of the run")
    assert status_of(headers, path) == status


def test_a_websocket_without_the_token_is_closed(monkeypatch):
    monkeypatch.setenv(TOKEN, "a token of the run")
    sent = []

    async def send(message):
        sent.append(message["type"])

    asyncio.run(TokenRequired(app)({"type": "websocket", "path": "/v1/realtime", "headers": []}, None, send))
    assert sent == ["websocket.close"]
