"""The HTTP application of the training API: its paths, keys, limits and errors. It needs the extra `service`."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_megatron import log
from rl_megatron.config.errors import describe_error
from rl_megatron.rollouts.gateway.connections import KEY_ACCEPTED
from rl_megatron.service import requests
from rl_megatron.service.api import NUMBERED, Api
from rl_megatron.service.journal import Record
from rl_megatron.service.requests import Refused, read_body

Handler = Callable[[Request, str, bytes], Awaitable[object]]
_SECONDS_OF_A_POLL = 20.0
_PROTOBUF = "application/x-protobuf"
_SAMPLES_OF_A_CLIENT = 256  # unfinished requests for samples, each with a connection that waits
_DATUMS_OF_A_REQUEST, _BYTES_OF_A_REQUEST = 1024, 5_000_000  # by which clients split a batch


def build_application(api: Api, keys: Mapping[str, str], most_bytes: int, most_bytes_of_key: int) -> Starlette:
    """Return the application.

    Args:
        api: The verbs.
        keys: The name of the owner of each key.
        most_bytes: The most bytes of a request's body.
        most_bytes_of_key: The most bytes of the bodies that a key sends at the same time.
    """
    verbs = _Verbs(api)
    posts: dict[str, Handler] = {
        "create_session": _pass_on(api.create_session),
        "session_heartbeat": _pass_on(api.heartbeat),
        "client/config": verbs.client_config,
        "client/dynamic_config": verbs.dynamic_config,
        "telemetry": verbs.telemetry,
        "create_model": _pass_on(api.create_model),
        **{verb: _pass_on(partial(api.accept_numbered, verb)) for verb in (*NUMBERED, "save_weights_external")},
        "load_weights": _pass_on(api.load_weights),
        "unload_model": _pass_on(api.unload_model),
        "get_info": _pass_on(api.get_info),
        "weights_info": _pass_on(api.weights_info),
        "create_sampling_session": _pass_on(api.create_sampling_session),
        "join_sampling_session": verbs.join_sampling_session,
        "asample": _pass_on(api.sample),
        "retrieve_future": verbs.retrieve_future,
        "retrieve_futures": verbs.retrieve_futures,
        "cancel_future": verbs.cancel_future,
    }
    gets: dict[str, Handler] = {
        "get_server_capabilities": verbs.capabilities,
        "training_runs": verbs.list_runs,
        "training_runs/{run}": verbs.describe_run,
        "training_runs/{run}/checkpoints": verbs.list_checkpoints,
        "checkpoints": verbs.list_checkpoints,
        "sessions": verbs.list_sessions,
        "sessions/{session}": verbs.describe_session,
        "samplers/{sampler}": verbs.describe_sampler,
    }
    guard = _Guard(keys, most_bytes, most_bytes_of_key)
    routes = [
        Route("/api/v1/healthz", _health),
        *(Route(f"/api/v1/{path}", guard.protect(handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(f"/api/v1/{path}", guard.protect(handler)) for path, handler in gets.items()),
        Route(
            "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", guard.protect(verbs.delete_checkpoint),
            methods=["DELETE"],
        ),
    ]  # fmt: skip
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse_path})


def _pass_on(verb: Callable[[str, bytes], object]) -> Handler:
    """Return the handler that passes a request's owner and body on."""

    async def handle(request: Request, owner: str, raw: bytes) -> object:
        result = verb(owner, raw)
        return await result if inspect.isawaitable(result) else result

    return handle


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _answer_error(f"{request.method} {request.url.path} is not a verb of this server; see its page", status)


def _answer_error(message: str, status: int) -> Response:
    return JSONResponse(
        {"error": message, "message": message, "category": "user" if status < 500 else "server"}, status
    )


class _Guard:
    """The check of a request's key and size, and the answer for its errors."""

    def __init__(self, keys: Mapping[str, str], most_bytes: int, most_bytes_of_key: int):
        self._keys, self._most_bytes, self._most_bytes_of_key = keys, most_bytes, most_bytes_of_key
        self._bytes: Counter[str] = Counter()  # of the bodies that each owner sends now

    def protect(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                owner = self._authorize(request)
                with self._counting(request, owner):
                    result = await handler(request, owner, await self._read(request))
            except Refused as error:
                return _answer_error(str(error), error.status)
            except ValueError as error:
                return _answer_error(str(error), 422)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads the response
            except Exception as error:
                log.LOGGER.warning("the training service: %s", describe_error(error))
                return _answer_error("the server failed to answer this request; its log says why", 500)
            return result if isinstance(result, Response) else JSONResponse(result)

        return handle

    def _authorize(self, request: Request) -> str:
        """Return the owner of the request's key. All keys are compared, so the time says nothing about them."""
        sent = request.headers.get("x-api-key", "")
        if not sent:
            sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        owners = [owner for key, owner in self._keys.items() if hmac.compare_digest(key.encode(), sent.encode())]
        if not owners:
            raise Refused(
                "the key is not one of this server's; set TINKER_API_KEY to one that it was started with", 401
            )
        request.scope[KEY_ACCEPTED] = True
        return owners[0]

    @contextmanager
    def _counting(self, request: Request, owner: str) -> Iterator[None]:
        """Count the bytes of the body within the block; a body of unknown length counts as the largest."""
        unknown = self._most_bytes if "transfer-encoding" in request.headers else 0
        size = int(request.headers.get("content-length") or unknown)
        self._refuse_larger(size)
        if self._bytes[owner] + size > self._most_bytes_of_key:
            raise Refused(f"this key sends more than {self._most_bytes_of_key} bytes at the same time; try again", 429)
        self._bytes[owner] += size
        try:
            yield
        finally:
            self._bytes[owner] -= size

    async def _read(self, request: Request) -> bytes:
        size, parts = 0, []
        async for part in request.stream():
            size += len(part)
            self._refuse_larger(size)
            parts.append(part)
        return b"".join(parts)

    def _refuse_larger(self, size: int) -> None:
        if size > self._most_bytes:
            raise Refused(f"the body has more than {self._most_bytes} bytes; send fewer datums at once", 413)


class _Verbs:
    """The handlers that do more than pass the body on."""

    def __init__(self, api: Api):
        self._api = api

    async def client_config(self, request: Request, owner: str, raw: bytes) -> object:
        return {
            "fwdbwd_max_chunk_len": _DATUMS_OF_A_REQUEST, "fwdbwd_max_chunk_bytes_count": _BYTES_OF_A_REQUEST,
            "proto_compress_fwdbwd": False, "sample_use_retrieve_futures": False, "custom_loss_server_side": False,
            "sample_join_sampling_session": True, "pjwt_auth_enabled": False,
            "sample_max_concurrent_requests": _SAMPLES_OF_A_CLIENT,
        }  # fmt: skip

    async def dynamic_config(self, request: Request, owner: str, raw: bytes) -> object:
        return {"sample_cancel_enabled": True}

    async def telemetry(self, request: Request, owner: str, raw: bytes) -> object:
        return {"status": "accepted"}  # nothing is kept

    async def join_sampling_session(self, request: Request, owner: str, raw: bytes) -> object:
        name = read_body(requests.JoinSamplingSession, raw).sampling_session_id
        self._api.find_sampler(owner, name)
        # A number that no other clone has got, also from a server that was killed.
        return {"type": "join_sampling_session", "client_counter": 1 + secrets.randbelow(2**40)}

    async def retrieve_future(self, request: Request, owner: str, raw: bytes) -> object:
        name = read_body(requests.RetrieveFuture, raw).request_id
        future = self._api.registry.futures.get(name)
        if future is None or future.owner != owner:
            raise Refused(f"there is no request {name}, or its result was dropped; send the request again", 410)
        try:
            await asyncio.wait_for(future.done.wait(), _SECONDS_OF_A_POLL)
        except TimeoutError:
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        outcome = future.outcome
        assert outcome is not None  # it is set before `done`
        if outcome.error is not None:
            return {"error": outcome.body.decode(), "category": outcome.error}
        return Response(outcome.body, media_type=_PROTOBUF if outcome.is_protobuf else "application/json")

    async def retrieve_futures(self, request: Request, owner: str, raw: bytes) -> object:
        body = read_body(requests.RetrieveFutures, raw)
        name = body.target.sampling_session_id
        self._api.find_sampler(owner, name)
        until = asyncio.get_running_loop().time() + min(_SECONDS_OF_A_POLL, body.timeout or _SECONDS_OF_A_POLL)
        if body.timeout == 0:
            until = 0.0
        return await self._api.registry.wait_for_samples(name, body.target.cloned_sampler_id, body.prev_cursor, until)

    async def cancel_future(self, request: Request, owner: str, raw: bytes) -> object:
        name = read_body(requests.RequestOnly, raw).request_id
        future = self._api.registry.futures.get(name)
        if future is not None:
            await future.written.wait()
        # Only samples can be cancelled: a run's operations have their places in its order.
        is_sample = future is not None and future.record is not None and "run" not in future.record.header
        if is_sample and future is not None and future.owner == owner:
            await self._api.registry.write(Record({"kind": "cancelled", "id": name}))
            self._api.registry.cancel(name)
        return Response(status_code=204)

    async def capabilities(self, request: Request, owner: str, raw: bytes) -> object:
        return self._api.get_capabilities()

    async def list_runs(self, request: Request, owner: str, raw: bytes) -> object:
        names = [name for name, run in self._api.registry.runs.items() if run.owner == owner]
        shown, cursor = _page(request, sorted(names, reverse=True))
        return {"training_runs": [self._api.describe_run(owner, name) for name in shown], "cursor": cursor}

    async def describe_run(self, request: Request, owner: str, raw: bytes) -> object:
        return self._api.describe_run(owner, request.path_params["run"])

    async def list_checkpoints(self, request: Request, owner: str, raw: bytes) -> object:
        shown, cursor = _page(request, self._api.list_checkpoints(owner, request.path_params.get("run")))
        return {"checkpoints": shown, "cursor": cursor}

    async def delete_checkpoint(self, request: Request, owner: str, raw: bytes) -> object:
        params = request.path_params
        self._api.delete_checkpoint(owner, params["run"], f"{params['kind']}/{params['name']}")
        return Response(status_code=204)

    async def list_sessions(self, request: Request, owner: str, raw: bytes) -> object:
        names = [name for name, session in self._api.registry.sessions.items() if session.owner == owner]
        return {"sessions": _page(request, names[::-1])[0]}

    async def describe_session(self, request: Request, owner: str, raw: bytes) -> object:
        return self._api.describe_session(owner, request.path_params["session"])

    async def describe_sampler(self, request: Request, owner: str, raw: bytes) -> object:
        name = request.path_params["sampler"]
        path = self._api.find_sampler(owner, name)
        model = None if path is None else "tinker://" + "/".join(path.split("/")[-3:])
        return {"sampler_id": name, "base_model": self._api.base.name, "model_path": model}


def _page(request: Request, listed: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the part of a list that the request's `limit` and `offset` choose, and the cursor that describes it."""
    try:
        limit, offset = (int(request.query_params.get(key, default)) for key, default in (("limit", 20), ("offset", 0)))
    except ValueError as error:
        raise Refused("limit and offset must be whole numbers") from error
    if limit < 0 or offset < 0:
        raise Refused("limit and offset must not be negative")
    return listed[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(listed)}
