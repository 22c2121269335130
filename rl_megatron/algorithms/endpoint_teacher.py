"""`EndpointTeacher`: a teacher on a server, such as vLLM, that returns the top-k logprobs at each token of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.config.errors import ConfigError, RunFailed, describe_error
from rl_megatron.config.teachers import TeacherConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rewards.endpoint import BadReply, Endpoint, EndpointFailed
from rl_megatron.topology.ranks import Ranks

_READ = ("input_ids", "input_lengths")
# A text whose tokens differ between vocabularies: words, a number, spaces, letters of two bytes, and brackets.
_PROBE = "Distillation of 1234567 tokens,\n  naïve façade: {x + 98 = 103}"
_T = TypeVar("_T")
Entry = Mapping[str, Mapping[str, Any]]  # the logprobs at one token: {token id: {"logprob": …}}


class TeacherFailed(RunFailed):
    """The error of an endpoint that gave no logprobs during training. The message names the endpoint."""


class EndpointTeacher:
    """A frozen model at an endpoint, and the connections to it, which only rank 0 opens.

    `topk_logits` and `logprobs` are collective. Their results are at temperature 1; the loss applies its temperature.
    """

    def __init__(self, config: TeacherConfig, ranks: Ranks):
        """Store the settings; nothing is sent."""
        assert config.url is not None
        self._config, self._ranks, self._url = config, ranks, config.url.rstrip("/")
        self._runner = asyncio.Runner()  # one event loop for all calls, because a connection works in one loop only
        self._completions = self._endpoint(f"{self._url}/completions")

    def _endpoint(self, address: str) -> Endpoint:
        config = self._config
        try:
            return Endpoint(address, config.api_key_env, config.request_seconds, config.retries)
        except ValueError as error:
            raise ConfigError(f"algorithm.teachers: {error}") from error

    def close(self) -> None:
        self._runner.close()

    def check(self, tokenizer: Tokenizer, top_k: int, longest: int) -> None:
        """Check that the endpoint has the student's tokenizer, reads sequences of `longest` tokens, and gives logprobs.

        It must give `top_k` logprobs at each token.
        """
        try:
            with asyncio.Runner() as runner:
                runner.run(self._check(tokenizer, top_k, longest))
        except (EndpointFailed, TimeoutError) as error:
            raise ConfigError(
                f"algorithm.teachers: {error}; a teacher's server must have vLLM's /tokenize, and completions with "
                f"at least {top_k} prompt_logprobs (vllm serve --max-logprobs); start such a server, lower "
                "algorithm.top_k, or name a teacher by path"
            ) from error

    async def _check(self, tokenizer: Tokenizer, top_k: int, longest: int) -> None:
        body = {"model": self._config.model, "prompt": _PROBE, "add_special_tokens": False}
        tokenize = self._endpoint(f"{self._url.removesuffix('/v1')}/tokenize")
        (theirs, limit), _ = await tokenize.post(body, _read_tokens)
        ours = tokenizer.encode(_PROBE)
        if theirs != ours:
            raise ConfigError(
                f"algorithm.teachers: the teacher at {self._url} has another tokenizer than the student: it encodes "
                f"{_PROBE!r} as {len(theirs)} tokens, {theirs[:8]} …, the student as {len(ours)}, {ours[:8]} …; set "
                "tokenizer.path to the teacher's tokenizer and train the student with it, or choose a teacher with the "
                "student's tokenizer"
            )
        if limit is not None and longest + 1 > limit:  # a request also generates a token, which is not used
            raise ConfigError(
                f"algorithm.teachers: {self._url} reads at most {limit - 1} tokens, but the data has sequences of up "
                f"to {longest}; shorten them (data.too_long, generation.max_new_tokens), or choose another teacher"
            )
        start, completions = ours[:2], self._endpoint(self._completions.url)
        await completions.post(self._body(start, top_k), partial(_read_logprobs, start, top_k))

    def topk_logits(self, batch: Batch, k: int, batching: Batching) -> tuple[Tensor, Tensor]:
        """Return (logprobs [B, S, k] fp32, ids [B, S, k] int64), largest first. Entry t predicts token t+1."""
        top = self._ask_all(batch, k, lambda read, ids: _pick_largest(read[1:], k, len(ids)))
        logprobs, ids = zip(*top, strict=True)
        return _pad(logprobs, batch).float(), _pad(ids, batch).long()

    def logprobs(self, batch: Batch, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32. Entry t corresponds to token t, and entry 0 is 0."""

        def read_own(read: Sequence[Entry], ids: Sequence[int]) -> Tensor:
            pairs = zip(read[1:], ids[1:], strict=True)
            return torch.tensor([0.0, *(entry[str(token)]["logprob"] for entry, token in pairs)])

        return _pad(self._ask_all(batch, 1, read_own), batch)

    def _ask_all(self, batch: Batch, k: int, make: Callable[[Sequence[Entry], Sequence[int]], _T]) -> list[_T]:
        """Return `make(logprobs, ids)` for each sequence of all ranks.

        Raises TeacherFailed on every rank if the endpoint does not answer.
        """
        whole = batch.gather_on_rank_0(_READ)

        def ask() -> list[_T]:
            lengths = whole["input_lengths"].tolist()
            sequences = [ids[:length] for ids, length in zip(whole["input_ids"].tolist(), lengths, strict=True)]
            try:
                answers = self._runner.run(self._send(sequences, k))
                return [make(read, ids) for read, ids in zip(answers, sequences, strict=True)]
            except* (EndpointFailed, TimeoutError) as errors:
                failure = describe_error(errors.exceptions[0])
            raise TeacherFailed(f"algorithm.teachers: {failure}")

        return self._ranks.share(ask, (TeacherFailed,))

    async def _send(self, sequences: Sequence[Sequence[int]], k: int) -> list[Sequence[Entry]]:
        free = asyncio.Semaphore(self._config.concurrency)

        async def ask(ids: Sequence[int]) -> Sequence[Entry]:
            async with free:
                answer, _ = await self._completions.post(self._body(ids, k), partial(_read_logprobs, ids, k))
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(ids)) for ids in sequences]
        return [task.result() for task in tasks]

    def _body(self, ids: Sequence[int], k: int) -> dict[str, object]:
        return {"model": self._config.model, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": k}


def _read_tokens(answer: Any) -> tuple[list[int], int | None]:
    """Return the token ids in an answer of /tokenize, and the model's maximum length, or None if that is missing."""
    try:
        return [int(token) for token in answer["tokens"]], answer.get("max_model_len")
    except (KeyError, TypeError, ValueError) as error:
        raise BadReply("has no tokens") from error


def _read_logprobs(ids: Sequence[int], k: int, answer: Any) -> Sequence[Entry]:
    """Return the logprobs at each token of a prompt: at least k, the token's own included. The first token has none."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
    except (KeyError, TypeError, IndexError) as error:
        raise BadReply("has no prompt_logprobs") from error
    if not isinstance(entries, list) or len(entries) != len(ids) or not all(entries[1:]):
        raise BadReply(f"has no prompt_logprobs of {len(ids)} tokens")
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        if len(entry) < k or str(token) not in entry:
            raise BadReply(f"has {len(entry)} prompt_logprobs of token {token}, but needs {k} with that of the token")
    return entries


def _pick_largest(entries: Sequence[Entry], k: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logprobs of each entry, and their ids, [length, k] each. The last token gets zeros."""
    logprobs, ids = torch.zeros(length, k), torch.zeros(length, k, dtype=torch.int64)
    for index, entry in enumerate(entries):
        pairs = sorted(((float(value["logprob"]), int(token)) for token, value in entry.items()), reverse=True)[:k]
        logprobs[index], ids[index] = (torch.tensor(column) for column in zip(*pairs, strict=True))
    return logprobs, ids


def _pad(values: Sequence[Tensor], batch: Batch) -> Tensor:
    """Return the values of this rank's sequences, [n, S, …], padded with 0. `values` has those of all ranks."""
    padded = values[0].new_zeros(len(values), batch["input_ids"].size(1), *values[0].shape[1:])
    for sequence, unpadded in zip(padded, values, strict=True):
        sequence[: len(unpadded)] = unpadded
    return batch.select_local(padded)
