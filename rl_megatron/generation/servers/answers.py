"""Check a server's answer before it is used for training."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Literal

from rl_megatron.generation.interfaces import Completion, EngineFailed, Request, WeightSpan
from rl_megatron.generation.servers.dialect import RawAnswer
from rl_megatron.generation.stop_strings import StopStrings

_LARGEST_LOGPROB = 1e-3  # rounding can make the logprob of a token with probability 1 slightly positive
_REMEDY = "nothing was learned from it; look at the server's log, and use a version that docs/rollout_engines.md lists"


def check_answer(request: Request, answer: RawAnswer, vocab_size: int, server: str) -> Completion:
    """Return a server's answer as a completion, which ends at the first stop string.

    Servers have no tokenizer and so continue after a stop string; the rest is cut off here. A token depends only
    on earlier tokens, so the completion is the same as if the server had stopped.

    A missing logprob becomes NaN: the logits were NaN, which is the fault of the model and not of the server.
    `make_completion_batch` reports NaN logprobs. `server` is the server's name in messages.

    Raises:
        EngineFailed: The answer contradicts the request or itself. The message names the server and the request.
    """
    fault = (
        _find_fault_in_tokens(request, answer, vocab_size)
        or _find_fault_in_end(request, answer)
        or _find_fault_in_versions(answer)
        or _find_fault_in_experts(request, answer)
    )
    if fault is not None:
        raise EngineFailed(f"{server} gave a wrong answer to request {request.request_id!r}: {fault}; {_REMEDY}")
    versions = tuple(WeightSpan(int(version), start, end) for version, start, end in answer.versions)
    logprobs = tuple(math.nan if logprob is None else float(logprob) for logprob in answer.logprobs)
    reason = _parse_reason(answer.reason)
    whole = Completion(request.request_id, tuple(answer.ids), logprobs, versions, reason, answer.routed_experts)
    stop_strings = request.sampling.stop_strings
    return whole if stop_strings is None else _cut_at_stop_string(whole, request, stop_strings)


def _cut_at_stop_string(whole: Completion, request: Request, strings: StopStrings) -> Completion:
    """Return a completion up to the token that completes the first stop string."""
    ids = whole.ids
    if not strings.appear_in(ids):
        return whole
    end = 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda count: strings.appear_in(ids[:count]))
    spans = tuple(
        WeightSpan(span.version, span.start, min(span.end, end)) for span in whole.versions if span.start < end
    )
    experts = whole.routed_experts
    experts = None if experts is None else experts[: len(request.prompt) + end - 1]
    return Completion(whole.request_id, ids[:end], whole.logprobs[:end], spans, "stop", experts)


def _parse_reason(reason: str) -> Literal["stop", "length", "abort"]:
    if reason == "stop":
        return "stop"
    return "length" if reason == "length" else "abort"


def _find_fault_in_tokens(request: Request, answer: RawAnswer, vocab_size: int) -> str | None:
    count, most = len(answer.ids), request.sampling.max_new_tokens
    if count > most:
        return f"it has {count} tokens, but the request allows at most {most}"
    if len(answer.logprobs) != count:
        return f"it has {len(answer.logprobs)} logprobs for {count} tokens"
    for position, token in enumerate(answer.ids):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            return f"token {position + 1} is {token!r}, which is not an id of the tokenizer's {vocab_size} tokens"
    for position, logprob in enumerate(answer.logprobs):
        if logprob is not None and logprob > _LARGEST_LOGPROB:
            return f"the logprob of token {position + 1} is {logprob}, but a logprob cannot be positive"
    return None


def _find_fault_in_end(request: Request, answer: RawAnswer) -> str | None:
    """Return what is wrong with the end of a completion, or None if a stop token, the limit or an abort ended it."""
    reason, ids, most = answer.reason, answer.ids, request.sampling.max_new_tokens
    stops = [position for position, token in enumerate(ids) if token in request.sampling.stop_ids]
    if stops and stops[0] != len(ids) - 1:
        return f"it continues after its token {stops[0] + 1}, the stop token {ids[stops[0]]}"
    if reason == "abort":
        return None
    if reason not in ("stop", "length"):
        return f"it ended for the reason {reason!r}, and not by a stop token or its length"
    if not ids:
        return "it has no tokens"
    if reason == "stop" and not stops:
        return f"it ended by a stop token, but its last token {ids[-1]} is none of {list(request.sampling.stop_ids)}"
    if reason == "length" and len(ids) < most and not stops:
        return f"it ended by its length after {len(ids)} of {most} tokens; raise the server's max_model_len"
    return None


def _find_fault_in_versions(answer: RawAnswer) -> str | None:
    """Return what is wrong with the version spans, or None if they cover all tokens and have numbers as versions."""
    covered = 0
    for version, start, end in answer.versions:
        if not str(version).isdigit():
            return f"tokens {start + 1} to {end} have weight version {version!r}, which the policy did not send"
        if start != covered or end <= start:
            return f"its spans of weight versions are not contiguous at token {start + 1}"
        covered = end
    if covered != len(answer.ids):
        return f"weight versions are given for {covered} of its {len(answer.ids)} tokens"
    return None


def _find_fault_in_experts(request: Request, answer: RawAnswer) -> str | None:
    """Return what is wrong with recorded experts, or None if there is one entry per token that was read."""
    experts, num_read = answer.routed_experts, len(request.prompt) + len(answer.ids) - 1
    if experts is not None and (experts.dim() != 3 or len(experts) != num_read):
        return f"its routed experts have shape {tuple(experts.shape)}, but the model read {num_read} tokens"
    return None
