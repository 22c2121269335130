"""The gateway's HTTP application: its paths, its keys and its errors. It needs the extra `gateway`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rl_megatron import log
from rl_megatron.config.loading.import_strings import describe_user_error
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rollouts.gateway.answers import (
    build_chat_answer,
    build_text_answer,
    list_models,
    stream_chat_answer,
    stream_text_answer,
)
from rl_megatron.rollouts.gateway.bodies import RequestRefused
from rl_megatron.rollouts.gateway.connections import KEY_ACCEPTED
from rl_megatron.rollouts.gateway.session import SHORT_COMPLETION, Choices, Session

Handler = Callable[[Request], Awaitable[Response]]


def build_application(find_session: Callable[[str], Session | None]) -> Starlette:
    """Return the application. `find_session` returns the session of a key, or None if the key belongs to none."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        _authorize(request, find_session)
        return JSONResponse(list_models())

    async def chat(request: Request) -> Response:
        session = _authorize(request, find_session)
        raw = await _read(request, session)
        return await _answer(
            request, session, session.run(session.answer_chat(raw)), build_chat_answer, stream_chat_answer
        )

    async def text(request: Request) -> Response:
        session = _authorize(request, find_session)
        raw = await _read(request, session)
        return await _answer(
            request, session, session.run(session.answer_text(raw)), build_text_answer, stream_text_answer
        )

    return Starlette(
        routes=[
            Route("/health", _answer_errors(health)),
            Route("/v1/models", _answer_errors(models)),
            Route("/v1/chat/completions", _answer_errors(chat), methods=["POST"]),
            Route("/v1/completions", _answer_errors(text), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _refuse_path},
    )


def _answer_errors(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestRefused as error:
            return JSONResponse(error.body, error.status)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads the response
        except Exception as error:  # the session has recorded the error, and its trajectory fails
            log.LOGGER.warning("the gateway %s", describe_user_error(error))
            refused = RequestRefused(f"the gateway {describe_user_error(error)}", status=500)
            return JSONResponse(refused.body, refused.status)

    return handle


async def _refuse_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    refused = RequestRefused(
        f"{request.method} {request.url.path}: the gateway answers POST /v1/chat/completions, POST /v1/completions, "
        "GET /v1/models and GET /health",
        status=status,
    )
    return JSONResponse(refused.body, status)


def _authorize(request: Request, find_session: Callable[[str], Session | None]) -> Session:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    session = find_session(key.strip()) if kind.lower() == "bearer" else None
    if session is None:
        raise RequestRefused(
            "the key belongs to no running trajectory; send the key in OPENAI_API_KEY as a bearer token",
            status=401,
            code="invalid_api_key",
        )
    request.scope[KEY_ACCEPTED] = True
    return session


async def _read(request: Request, session: Session) -> bytes:
    """Return the body of a request; stop reading one that is too large, and refuse it."""
    most = session.body_limits.num_bytes
    size, parts = int(request.headers.get("content-length", "0")), []
    if size <= most:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            parts.append(part)
    if size > most:
        raise session.refuse_full(
            f"the body has more than {most} bytes, the most for a context of {session.body_limits.context} tokens",
            status=413,
        )
    return b"".join(parts)


async def _answer(
    request: Request,
    session: Session,
    asked: Awaitable[Choices],
    whole: Callable[[Choices, Tokenizer], dict[str, Any]],
    pieces: Callable[[Choices, Tokenizer], Iterator[str]],
) -> Response:
    choices = await asked
    if await request.is_disconnected():
        session.ignore(choices)
        return Response(status_code=499)  # nobody reads the response
    if choices.parameters.stream:
        return StreamingResponse(pieces(choices, session.tokenizer), media_type="text/event-stream")
    is_short = sum(len(turn.completion.ids) for turn in choices.turns) <= SHORT_COMPLETION
    return await session.run_job(lambda: JSONResponse(whole(choices, session.tokenizer)), is_short)
