"""`RolloutClient`: a trajectory's access to the rollout engine, and the check that its tokens are the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace

from rl_megatron.data.conversations import Message, get_message_text
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Completion, Request, Sampling
from rl_megatron.generation.requests import derive_seed
from rl_megatron.rollouts.gateway.server import Gateway
from rl_megatron.rollouts.gateway.session import Session
from rl_megatron.rollouts.history import ChatHistory, History, OnRewrite, TextHistory, check_length
from rl_megatron.rollouts.tools.calls import Parser
from rl_megatron.rollouts.trajectory import HistoryFull, TokenLimits, TokensDiffer, Trajectory

Answer = Callable[[Request], Awaitable[Completion]]


class RolloutClient:
    """The client with which a rollout worker requests completions for one trajectory.

    It records every prompt with its completion, to check that the trajectory consists of these tokens.

    Attributes:
        name: The name of the trajectory, which is also the id of its first request.
        prompt: The prompt of the task, as the data section renders it.
        tokenizer: The run's tokenizer.
        limits: The most tokens of the trajectory.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        prompt: EncodedPrompt,
        sampling: Sampling,
        tokenizer: Tokenizer,
        limits: TokenLimits,
        answer: Answer,
        on_rewrite: OnRewrite = "branch",
        gateway: Gateway | None = None,
    ):
        """Start without a completion.

        Args:
            name: The name of the trajectory, unique among those that run.
            seed: The seed of its first request.
            prompt: The prompt of the task.
            sampling: How completions are sampled if the worker does not choose.
            tokenizer: The run's tokenizer.
            limits: The most tokens of the trajectory.
            answer: Returns the completion of a request.
            on_rewrite: What happens if the chat template rewrites the past; see `ChatHistory`.
            gateway: The gateway in which `openai` opens sessions; None without one.
        """
        self.name, self.prompt, self.tokenizer, self.limits = name, prompt, tokenizer, limits
        self._seed, self._sampling, self._answer = seed, sampling, answer
        self._on_rewrite: OnRewrite = on_rewrite
        self._gateway = gateway
        self._answered: dict[str, tuple[tuple[int, ...], Completion]] = {}
        self._num_requests = self._num_reserved = 0
        self._requests: set[asyncio.Future[Completion]] = set()
        self._is_closed = False
        self._num_waiting, self._waiting_since, self._seconds_waited = 0, 0.0, 0.0

    async def complete(self, ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Return the completion of token ids.

        `max_new_tokens` is lowered to the number that the limits of the trajectory still allow.

        Args:
            ids: The tokens, at least one.
            sampling: How the completion is sampled; None: as in the generation section.

        Raises:
            HistoryFull: No token fits after `ids`.
            RuntimeError: The attempt has ended.
        """
        if self._is_closed:
            raise RuntimeError(f"trajectory {self.name} has ended, and takes no further completion")
        sampling = self.fitting(len(ids), sampling)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        request_id = self.name if number == 0 else f"{self.name}.{number}"
        seed = self._seed if number == 0 else derive_seed(self._seed, number)
        request = asyncio.ensure_future(self._answer(Request(request_id, tuple(ids), sampling, seed)))
        self._requests.add(request)
        self._num_reserved += sampling.max_new_tokens
        try:
            with self._time_wait():
                completion = await request
        finally:
            self._requests.discard(request)
            self._num_reserved -= sampling.max_new_tokens
        self._answered[request_id] = tuple(ids), completion
        return completion

    def close(self) -> None:
        """End the requests that still run, because the attempt has ended."""
        self._is_closed = True
        for request in list(self._requests):
            request.cancel()

    @property
    def seconds_of_engine(self) -> float:
        """Return how long the trajectory has waited for the engine so far."""
        waits = time.monotonic() - self._waiting_since if self._num_waiting else 0.0
        return self._seconds_waited + waits

    @contextmanager
    def _time_wait(self) -> Iterator[None]:
        if self._num_waiting == 0:
            self._waiting_since = time.monotonic()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self._seconds_waited += time.monotonic() - self._waiting_since

    def fitting(self, num_tokens: int, sampling: Sampling | None = None) -> Sampling:
        """Return the sampling of a completion after `num_tokens` tokens, with `max_new_tokens` within the limits.

        Raises:
            HistoryFull: No token fits.
        """
        sampling = sampling or self._sampling
        sampled = sum(len(completion.ids) for _, completion in self._answered.values())
        most = self.limits.sampled - sampled - self._num_reserved
        left = min(self.limits.context - num_tokens, most, sampling.max_new_tokens)
        if left < 1:
            raise HistoryFull(
                f"trajectory {self.name} is full: its context has {num_tokens} of {self.limits.context} tokens, and "
                f"{sampled} of {self.limits.sampled} were sampled"
            )
        return sampling if left == sampling.max_new_tokens else replace(sampling, max_new_tokens=left)

    def history(
        self,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        most_characters: int | None = None,
    ) -> History:
        """Return the history that begins with the prompt of the task, or with messages.

        Args:
            messages: The first messages; None: those of the prompt. Without a chat template, the prompt consists of
                their texts.
            tools: JSON schemas of tools, which the chat template describes to the model.
            most_characters: The most characters of a text that is encoded; None for no limit.

        Raises:
            ValueError: There are tools, but no chat template.
            HistoryFull: A text has more than `most_characters`.
        """
        chat = self.prompt.chat()
        if chat is None:
            if tools:
                raise ValueError(
                    "tools need a chat template: set data.format=chat, and data.chat_template or a tokenizer that has "
                    "one"
                )
            if messages is None:
                return TextHistory(self, self.tokenizer, self.prompt.ids, most_characters)
            texts = "".join(get_message_text(message) for message in messages)
            check_length(texts, most_characters)
            ids = [*self.tokenizer.prefix_ids, *self.tokenizer.encode(texts)]
            return TextHistory(self, self.tokenizer, ids, most_characters)
        template, conversation = chat
        is_the_prompt = messages is None and not tools
        if messages is not None:
            conversation = replace(conversation, messages=[dict(message) for message in messages])
        if tools:
            old = conversation.tools or []
            conversation = replace(conversation, tools=[*old, *(dict(tool) for tool in tools if tool not in old)])
        ids = self.prompt.ids if is_the_prompt else None
        return ChatHistory(self, self.tokenizer, template, conversation, self._on_rewrite, ids, most_characters)

    def openai(
        self, parser: Parser | None = None, sampling: Sampling | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a session of the gateway; pass its `base_url` and `api_key` to OpenAI's client.

        Args:
            parser: The parser of tool calls; None: the one that `rollout.agent.tool_format` names.
            sampling: How completions are sampled if a request does not choose; None: as in the generation section.

        Raises:
            RuntimeError: The client was made without a gateway.
            ConfigError: The extra `gateway` is not installed, or the gateway cannot listen.
        """
        if self._gateway is None:
            raise RuntimeError(f"trajectory {self.name} has no gateway; pass one to RolloutClient")
        return self._gateway.session(self, sampling or self._sampling, parser)

    def check(self, trajectory: Trajectory) -> None:
        """Check that the trajectory's tokens are those that the engine was asked to continue, and those it sampled.

        Raises:
            TokensDiffer: A token differs, or a completion is not from this client; the message names the trajectory,
                the turn and the token.
        """
        for segment in trajectory.segments:
            for number, turn in enumerate(segment.turns, 1):
                where = f"trajectory {self.name}, turn {number}"
                answered = self._answered.get(turn.completion.request_id)
                if answered is None:
                    raise TokensDiffer(f"{where}: the engine was given no request {turn.completion.request_id!r}")
                prompt, completion = answered
                expected = (*prompt, *completion.ids)
                if turn.end != len(expected):
                    raise TokensDiffer(f"{where} ends at token {turn.end}, but the engine's answer at {len(expected)}")
                actual = tuple(segment.ids[: turn.end])
                if actual != expected:
                    pairs = enumerate(zip(actual, expected, strict=False), 1)
                    number, (token, engines) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
                    source = "was asked to continue" if number <= len(prompt) else "sampled"
                    raise TokensDiffer(f"{where}: token {number} is {token}, but the engine {source} {engines}")
                if turn.completion != completion:
                    raise TokensDiffer(f"{where}: logprobs or weight versions are not those of the engine's answer")
