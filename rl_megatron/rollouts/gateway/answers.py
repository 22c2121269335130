"""Build answers in the format of OpenAI's API: whole bodies, or the pieces of a stream."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rollouts.gateway.session import Choices
from rl_megatron.rollouts.gateway.turns import AnsweredTurn

MODEL = "policy"
_CHARACTERS_OF_A_PIECE = 32
_LEAST_LOGPROB = -9999.0  # JSON has neither NaN nor infinite numbers


def list_models() -> dict[str, object]:
    """Return the answer of /v1/models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rl_megatron"}]}


def build_chat_answer(choices: Choices, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the answer of /v1/chat/completions."""
    answers = []
    for index, turn in enumerate(choices.turns):
        message = {"role": "assistant", "content": turn.answered.content, "refusal": None}
        if turn.answered.calls:
            message["tool_calls"] = list(turn.answered.calls)
        answers.append({"index": index, "message": message, **_describe_end(choices, turn, tokenizer)})
    return {**_build_head(choices, "chatcmpl", "chat.completion"), "choices": answers, "usage": _count_tokens(choices)}


def stream_chat_answer(choices: Choices, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the answer of /v1/chat/completions as server-sent events."""
    head = _build_head(choices, "chatcmpl", "chat.completion.chunk")
    for index, turn in enumerate(choices.turns):
        yield _write_choice(head, choices, {"index": index, "delta": {"role": "assistant"}, "finish_reason": None})
        for piece in _split_text(turn.answered.content or ""):
            yield _write_choice(head, choices, {"index": index, "delta": {"content": piece}, "finish_reason": None})
        for number, call in enumerate(turn.answered.calls):
            delta = {"tool_calls": [{"index": number, **call}]}
            yield _write_choice(head, choices, {"index": index, "delta": delta, "finish_reason": None})
        yield _write_choice(head, choices, {"index": index, "delta": {}, **_describe_end(choices, turn, tokenizer)})
    yield from _finish(head, choices)


def build_text_answer(choices: Choices, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the answer of /v1/completions."""
    answers = [
        {"index": index, "text": turn.answered.content, **_describe_text_end(choices, turn, tokenizer)}
        for index, turn in enumerate(choices.turns)
    ]
    return {**_build_head(choices, "cmpl", "text_completion"), "choices": answers, "usage": _count_tokens(choices)}


def stream_text_answer(choices: Choices, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the answer of /v1/completions as server-sent events."""
    head = _build_head(choices, "cmpl", "text_completion")
    for index, turn in enumerate(choices.turns):
        for piece in _split_text(turn.answered.content or ""):
            yield _write_choice(head, choices, {"index": index, "text": piece, "logprobs": None, "finish_reason": None})
        yield _write_choice(head, choices, {"index": index, "text": "", **_describe_text_end(choices, turn, tokenizer)})
    yield from _finish(head, choices)


def _build_head(choices: Choices, prefix: str, kind: str) -> dict[str, object]:
    head = {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": choices.parameters.model,
    }
    if choices.parameters.token_ids:
        head["prompt_token_ids"] = list(choices.prompt)
    return head


def _count_tokens(choices: Choices) -> dict[str, int]:
    sampled = sum(len(turn.completion.ids) for turn in choices.turns)
    return {
        "prompt_tokens": len(choices.prompt),
        "completion_tokens": sampled,
        "total_tokens": len(choices.prompt) + sampled,
    }


def _split_text(text: str) -> Iterator[str]:
    for start in range(0, len(text), _CHARACTERS_OF_A_PIECE):
        yield text[start : start + _CHARACTERS_OF_A_PIECE]


def _write_choice(head: Mapping[str, object], choices: Choices, choice: Mapping[str, object]) -> str:
    usage = {"usage": None} if choices.parameters.include_usage else {}
    return _format_event({**head, "choices": [choice], **usage})


def _finish(head: Mapping[str, object], choices: Choices) -> Iterator[str]:
    if choices.parameters.include_usage:
        yield _format_event({**head, "choices": [], "usage": _count_tokens(choices)})
    yield "data: [DONE]\n\n"


def _format_event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


def _choose_reason(turn: AnsweredTurn) -> str:
    if turn.answered.calls:
        return "tool_calls"
    return "stop" if turn.completion.reason == "stop" else "length"


def _build_token_ids(choices: Choices, turn: AnsweredTurn) -> dict[str, Any]:
    return {"token_ids": list(turn.completion.ids)} if choices.parameters.token_ids else {}


def _describe_end(choices: Choices, turn: AnsweredTurn, tokenizer: Tokenizer) -> dict[str, object]:
    logprobs = None
    if choices.parameters.logprobs:
        has_top = choices.parameters.top_logprobs
        content = [{**token, "top_logprobs": [token] if has_top else []} for token in _list_tokens(turn, tokenizer)]
        logprobs = {"content": content, "refusal": None}
    return {"finish_reason": _choose_reason(turn), "logprobs": logprobs, **_build_token_ids(choices, turn)}


def _describe_text_end(choices: Choices, turn: AnsweredTurn, tokenizer: Tokenizer) -> dict[str, Any]:
    logprobs = None
    if choices.parameters.logprobs:
        tokens = _list_tokens(turn, tokenizer)
        offsets, position = [], 0
        for token in tokens:
            offsets.append(position)
            position += len(token["token"])
        has_top = choices.parameters.top_logprobs
        logprobs = {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{token["token"]: token["logprob"]} for token in tokens] if has_top else None,
            "text_offset": offsets,
        }
    return {"finish_reason": _choose_reason(turn), "logprobs": logprobs, **_build_token_ids(choices, turn)}


def _list_tokens(turn: AnsweredTurn, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    completion = turn.completion
    texts = tokenizer.decode_tokens(completion.ids)
    return [
        {
            "token": text,
            "logprob": logprob if math.isfinite(logprob) else _LEAST_LOGPROB,
            "bytes": list(text.encode()),
        }
        for text, logprob in zip(texts, completion.logprobs, strict=True)
    ]
