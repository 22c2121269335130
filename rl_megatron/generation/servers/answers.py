"""Check a server's answer before anything is learned from it."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Literal

from rl_megatron.generation.interfaces import Completion, EngineFailed, Request, WeightSpan
from rl_megatron.generation.servers.dialect import RawAnswer
from rl_megatron.generation.stop_strings import StopStrings

_LARGEST_LOGPROB = 1e-3  # rounding can make the logprob of a certain token a little positive
_REMEDY = "nothing was learned from it; look at the server's log, and use a version that docs/rollout_engines.md lists"


def checked(request: Request, answer: RawAnswer, vocab_size: int, server: str) -> Completion:
    """Return a server's answer as a completion, which ends at the first stop string.

    Servers have no tokenizer, so they generate on after a stop string, and the rest is cut off here. A token depends on
    those before it alone, so what is left is exactly what a server would give that stops.

    A NaN or missing logprob becomes NaN, which `sequence_batch` reports: the logits were NaN, which is the fault of the
    model and not of the server.

    Args:
        request: What was asked.
        answer: What was answered.
        vocab_size: The number of valid token ids.
        server: What messages call the server.

    Raises:
        EngineFailed: The answer cannot be true. The message names the server and the request.
    """
    wrong = (
        _wrong_tokens(request, answer, vocab_size)
        or _wrong_ending(request, answer)
        or _wrong_versions(answer)
        or _wrong_experts(request, answer)
    )
    if wrong is not None:
        raise EngineFailed(f"{server} gave a wrong answer to request {request.request_id!r}: {wrong}; {_REMEDY}")
    versions = tuple(WeightSpan(int(version), start, end) for version, start, end in answer.versions)
    logprobs = tuple(math.nan if logprob is None else float(logprob) for logprob in answer.logprobs)
    reason = _reason(answer.reason)
    whole = Completion(request.request_id, tuple(answer.ids), logprobs, versions, reason, answer.routed_experts)
    return whole if request.sampling.stop_strings is None else _ended(whole, request, request.sampling.stop_strings)


def _ended(whole: Completion, request: Request, strings: StopStrings) -> Completion:
    """Return a completion up to the first token after which it contains one of the texts."""
    ids = whole.ids
    if not strings.found_in(ids):
        return whole
    end = 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda count: strings.found_in(ids[:count]))
    spans = tuple(
        WeightSpan(each.version, each.start, min(each.end, end)) for each in whole.versions if each.start < end
    )
    experts = whole.routed_experts
    experts = None if experts is None else experts[: len(request.prompt) + end - 1]
    return Completion(whole.request_id, ids[:end], whole.logprobs[:end], spans, "stop", experts)


def _reason(reason: str) -> Literal["stop", "length", "abort"]:
    if reason == "stop":
        return "stop"
    return "length" if reason == "length" else "abort"


def _wrong_tokens(request: Request, answer: RawAnswer, vocab_size: int) -> str | None:
    count, most = len(answer.ids), request.sampling.max_new_tokens
    if count > most:
        return f"it has {count} tokens, and at most {most} were asked for"
    if len(answer.logprobs) != count:
        return f"it has {len(answer.logprobs)} logprobs for {count} tokens"
    for position, token in enumerate(answer.ids):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            return f"token {position + 1} is {token!r}, which is not an id of the tokenizer's {vocab_size} tokens"
    for position, logprob in enumerate(answer.logprobs):
        if logprob is not None and logprob > _LARGEST_LOGPROB:
            return f"the logprob of token {position + 1} is {logprob}, and a logprob cannot be positive"
    return None


def _wrong_ending(request: Request, answer: RawAnswer) -> str | None:
    """Return what is wrong with the end of a completion: it ends at its first stop token, at its length, or aborted."""
    reason, ids, most = answer.reason, answer.ids, request.sampling.max_new_tokens
    stops = [position for position, token in enumerate(ids) if token in request.sampling.stop_ids]
    if stops and stops[0] != len(ids) - 1:
        return f"it goes on after stop token {ids[stops[0]]}, its token {stops[0] + 1}"
    if reason == "abort":
        return None
    if reason not in ("stop", "length"):
        return f"it ended for the reason {reason!r}, and not by a stop token or its length"
    if not ids:
        return "it has no tokens"
    if reason == "stop" and not stops:
        return f"it ended by a stop token, and its last token {ids[-1]} is none of {list(request.sampling.stop_ids)}"
    if reason == "length" and len(ids) < most and not stops:
        return f"it ended by its length after {len(ids)} of {most} tokens; raise the server's max_model_len"
    return None


def _wrong_versions(answer: RawAnswer) -> str | None:
    """Return what is wrong with the version spans: they must cover the tokens, each with a number for its version."""
    covered = 0
    for version, start, end in answer.versions:
        if not str(version).isdigit():
            return f"tokens {start + 1} to {end} are of weights {version!r}, which the policy did not send"
        if start != covered or end <= start:
            return f"its spans of weight versions are not contiguous at token {start + 1}"
        covered = end
    if covered != len(answer.ids):
        return f"weight versions are given for {covered} of its {len(answer.ids)} tokens"
    return None


def _wrong_experts(request: Request, answer: RawAnswer) -> str | None:
    """Return what is wrong with the routed experts: the model read all tokens but the last."""
    experts, wanted = answer.routed_experts, len(request.prompt) + len(answer.ids) - 1
    if experts is not None and (experts.dim() != 3 or len(experts) != wanted):
        return f"its routed experts have shape {tuple(experts.shape)}, and the model read {wanted} tokens"
    return None
