"""The parameters of requests: which have an effect, which are ignored, and which are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.stop_strings import StopStrings
from rl_megatron.rollouts.gateway.bodies import RequestRefused

_MOST_CHOICES = 128
_LARGEST_TEMPERATURE = 2.0
_MOST_TOP_LOGPROBS = 20
# Parameters of both endpoints that `_read_common` reads.
_COMMON = {"model", "temperature", "top_p", "top_k", "stop", "n", "stream", "stream_options", "max_tokens"}
# Parameters that do not change the completion.
_HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "return_token_ids", "seed",
}  # fmt: skip
_CHAT = {"messages", "tools", "tool_choice", "max_completion_tokens", "logprobs", "top_logprobs"}
_TEXT = {"prompt", "logprobs"}
# Parameters that are accepted only with a value that changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "parallel_tool_calls": (True,),
    "modalities": (["text"],), "echo": (False,), "suffix": ("",), "best_of": (1,), "ignore_eos": (False,),
}  # fmt: skip


@dataclass(frozen=True)
class Parameters:
    """The parameters of a request, besides its messages or its prompt.

    Attributes:
        model: The name of the model, which is only sent back.
        sampling: How the choices are sampled.
        stop: Texts that end a choice. They are left out of its text.
        num_choices: The number of choices.
        logprobs: Whether the answer has logprobs.
        top_logprobs: Whether the answer also has `top_logprobs`, which list only the sampled token.
        stream: Whether the answer is sent in pieces.
        include_usage: Whether the last piece has the numbers of tokens.
        token_ids: Whether the answer has token ids.
        tools: JSON schemas of the tools.
        calls_tools: Whether the text is searched for tool calls.
    """

    model: str
    sampling: Sampling
    stop: tuple[str, ...]
    num_choices: int
    logprobs: bool
    top_logprobs: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    tools: tuple[Mapping[str, object], ...] = ()
    calls_tools: bool = False


class ParameterReader:
    """The reader of the parameters of a session's requests."""

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer, stops_at_strings: bool):
        """Use `sampling` unless a request has other parameters; these can lower `max_new_tokens`, but not raise it."""
        self._sampling, self._tokenizer, self._stops_at_strings = sampling, tokenizer, stops_at_strings

    def read_chat(self, request: Mapping[str, object]) -> Parameters:
        """Return the parameters of a request to /v1/chat/completions; raise RequestRefused if one is not accepted."""
        body = _select(request, _CHAT)
        limits = [_read_positive(body, name) for name in ("max_tokens", "max_completion_tokens") if name in body]
        logprobs = _read_switch(body, "logprobs")
        top = _read_integer(body, "top_logprobs", 0, _MOST_TOP_LOGPROBS) if "top_logprobs" in body else 0
        parameters = self._read_common(body, min(limits, default=None), logprobs, top > 0)
        tools = body.get("tools", [])
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestRefused("tools must be a list of objects", param="tools")
        choice = body.get("tool_choice", "auto")
        if choice not in ("auto", "none"):
            raise RequestRefused(
                f"tool_choice={choice!r} is not supported: the policy is never forced to call a tool; leave it out, or "
                "set it to auto or none",
                param="tool_choice",
            )
        return replace(parameters, tools=tuple(tools), calls_tools=bool(tools) and choice == "auto")

    def read_text(self, request: Mapping[str, object]) -> Parameters:
        """Return the parameters of a request to /v1/completions; raise RequestRefused if one is not accepted."""
        body = _select(request, _TEXT)
        limit = _read_positive(body, "max_tokens") if "max_tokens" in body else None
        logprobs = "logprobs" in body
        top = _read_integer(body, "logprobs", 0, _MOST_TOP_LOGPROBS) if logprobs else 0
        return self._read_common(body, limit, logprobs, top > 0)

    def _read_common(
        self, body: Mapping[str, object], max_tokens: int | None, logprobs: bool, top_logprobs: bool
    ) -> Parameters:
        sampling = self._sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_new_tokens=min(max_tokens, sampling.max_new_tokens))
        if "temperature" in body:
            temperature = _read_number(
                body, "temperature", lambda value: 0 <= value <= _LARGEST_TEMPERATURE, "from 0 to 2"
            )
            sampling = replace(sampling, temperature=temperature)
        if "top_p" in body:
            top_p = _read_number(body, "top_p", lambda value: 0 < value <= 1, "above 0 and at most 1")
            sampling = replace(sampling, top_p=top_p)
        if "top_k" in body:  # other servers use -1 for off
            sampling = replace(sampling, top_k=max(0, _read_integer(body, "top_k", -1, 1 << 30)))
        stop = self._read_stop(body.get("stop", ()))
        if stop:
            texts = (*(sampling.stop_strings.texts if sampling.stop_strings else ()), *stop)
            sampling = replace(sampling, stop_strings=StopStrings(texts, self._tokenizer.definition))
        model = body.get("model", "policy")
        if not isinstance(model, str):
            raise RequestRefused("model must be a string", param="model")
        options = body.get("stream_options", {})
        if not isinstance(options, Mapping):
            raise RequestRefused("stream_options must be an object", param="stream_options")
        return Parameters(
            model, sampling, stop, _read_integer(body, "n", 1, _MOST_CHOICES) if "n" in body else 1, logprobs,
            top_logprobs, _read_switch(body, "stream"), _read_switch(options, "include_usage"),
            _read_switch(body, "return_token_ids"),
        )  # fmt: skip

    def _read_stop(self, value: object) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise RequestRefused("stop must be a text or a list of texts, none of them empty", param="stop")
        if texts and not self._stops_at_strings:
            raise RequestRefused(
                "stop: the rollout engine of this run does not stop at texts; leave it out", param="stop"
            )
        return tuple(texts)


def _select(request: Mapping[str, object], further: set[str]) -> dict[str, object]:
    """Return the parameters that are not null; raise RequestRefused if one of them is not supported."""
    body = {name: value for name, value in request.items() if value is not None}
    for name, value in body.items():
        if name in _COMMON or name in further or name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            raise RequestRefused(f"the parameter {name} is not supported; leave it out", param=name)
        if value not in _NEUTRAL[name]:
            raise RequestRefused(
                f"{name}={value!r} is not supported; leave it out, or set it to {_NEUTRAL[name][0]!r}", param=name
            )
    return body


def _read_switch(body: Mapping[str, object], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool | None):
        raise RequestRefused(f"{name}={value!r} must be true or false", param=name)
    return bool(value)


def _read_positive(body: Mapping[str, object], name: str) -> int:
    return _read_integer(body, name, 1, 1 << 30)


def _read_integer(body: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = body[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestRefused(f"{name}={value!r} must be an integer from {least} to {most}", param=name)
    return value


def _read_number(body: Mapping[str, object], name: str, is_valid: Callable[[float], bool], rule: str) -> float:
    value = body[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or not is_valid(value):
        raise RequestRefused(f"{name}={value!r} must be a number {rule}", param=name)
    return float(value)
