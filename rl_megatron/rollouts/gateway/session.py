"""`Session`: the requests that an agent makes in one trajectory, and the trajectory that they become."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rl_megatron import log
from rl_megatron.data.conversations import Message
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Completion, Sampling
from rl_megatron.rollouts.gateway.errors import RequestRefused
from rl_megatron.rollouts.gateway.messages import Answered, Key, checked_messages, key_of
from rl_megatron.rollouts.gateway.parameters import ParameterReader, Parameters
from rl_megatron.rollouts.gateway.text_turns import TextTurns
from rl_megatron.rollouts.gateway.tool_calls import tool_calls
from rl_megatron.rollouts.gateway.turns import AnsweredTurn, Branch, joined_segments, longest_match
from rl_megatron.rollouts.history import History, PastRewritten, TextHistory
from rl_megatron.rollouts.limits import HistoryFull
from rl_megatron.rollouts.special_tokens import without_special_tokens
from rl_megatron.rollouts.tools.calls import Parser
from rl_megatron.rollouts.trajectory import Trajectory

_T = TypeVar("_T")


class SessionClient(Protocol):
    """What a session asks for completions: a `RolloutClient`."""

    name: str
    prompt: EncodedPrompt
    tokenizer: Tokenizer

    def history(
        self, messages: Sequence[Message] | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> History:
        """Return the history that begins with messages."""
        ...

    def fitting(self, num_tokens: int, sampling: Sampling | None = None) -> Sampling:
        """Return how the next completion behind so many tokens is sampled."""
        ...

    async def complete(self, ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Return the completion of token ids."""
        ...


@dataclass(frozen=True)
class Choices:
    """The turns that answer a request.

    Attributes:
        parameters: The parameters of the request.
        prompt: The tokens that the first turn follows.
        turns: One turn for each choice.
    """

    parameters: Parameters
    prompt: Sequence[int]
    turns: Sequence[AnsweredTurn]


class Session:
    """An agent's requests in one trajectory.

    Attributes:
        base_url: The address for OpenAI's client.
        api_key: The key of this session alone.
        texts: The turns of requests with a prompt of text or tokens.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        client: SessionClient,
        sampling: Sampling,
        parser: Parser | None = None,
        stops_at_strings: bool = True,
    ):
        """Begin without a request.

        Args:
            base_url: The address.
            api_key: The key.
            client: What completes tokens.
            sampling: How completions are sampled if a request does not say so.
            parser: What finds tool calls in texts; None: texts are answered as they are.
            stops_at_strings: Whether the rollout engine ends completions at texts.
        """
        self.base_url, self.api_key = base_url, api_key
        self._client, self._parser = client, parser
        self._parameters = ParameterReader(sampling, client.tokenizer, stops_at_strings)
        self._branches: list[Branch] = []
        self._roots: dict[str, list[AnsweredTurn]] = {}  # by the tools of the conversation
        self.texts = TextTurns()
        self._num_turns, self._num_unheard = 0, 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_full, self._has_ended = False, False
        self._failure: Exception | None = None

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine, which also goes on if nobody waits for it any more, until the session ends.

        Raises:
            RequestRefused: The session has ended.
        """
        if self._has_ended:
            work.close()
            raise _ended()
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        await asyncio.wait({task})
        if task.cancelled():
            raise _ended()
        return task.result()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, RequestRefused):
            self._failure = error  # the trajectory fails with it

    async def end(self) -> None:
        """End the requests that still wait."""
        self._has_ended = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def chat(self, body: Mapping[str, Any]) -> Choices:
        """Answer a request to /v1/chat/completions.

        Raises:
            RequestRefused: The request is wrong, or cannot be answered.
        """
        parameters = self._parameters.of_chat(body)
        messages = checked_messages(body.get("messages"))
        keys = [key_of(message) for message in messages]
        roots = self._roots.setdefault(json.dumps(parameters.tools, sort_keys=True), [])
        before, num_known = longest_match(roots, keys)
        branches = self._branches_behind(
            before,
            parameters.num_choices,
            begin=lambda: self._begun(messages, parameters.tools),
            extend=lambda history: history.extend(messages[num_known:]),
        )
        prompt = branches[0].history.ids
        new_keys = tuple(keys[num_known:])
        turns = await self._complete(branches, parameters, new_keys)
        (roots if before is None else before.following).extend(turns)
        return Choices(parameters, prompt, turns)

    async def text(self, body: Mapping[str, Any]) -> Choices:
        """Answer a request to /v1/completions.

        Raises:
            RequestRefused: The request is wrong, or cannot be answered.
        """
        parameters = self._parameters.of_text(body)
        prompt = _checked_prompt(body.get("prompt"), self._client.tokenizer)
        before, rest = self.texts.match(prompt)
        ids = self._encoded(rest, is_first=before is None) if isinstance(rest, str) else rest
        if not ids:
            raise RequestRefused("prompt has no token", param="prompt")
        branches = self._branches_behind(
            before,
            parameters.num_choices,
            begin=lambda: TextHistory(self._client, self._client.tokenizer, ids),
            extend=lambda history: history.extend_ids(ids),
        )
        known = branches[0].history.ids
        turns = await self._complete(branches, parameters, ())
        for turn in turns:
            self.texts.add(turn, before, rest, ids)
        return Choices(parameters, known, turns)

    def ignore(self, choices: Choices) -> None:
        """Leave out the turns of a request whose answer nobody has got, so that nothing is learned from them."""
        log.LOGGER.warning(
            "trajectory %s: the agent did not wait for the answer to a request, and nothing is learned from its %d "
            "completions",
            self._client.name,
            len(choices.turns),
        )
        self._mark_unheard(choices.turns)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run."""
        return self._client.tokenizer

    def trajectory(
        self,
        reward: float = 0.0,
        *,
        truncated: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return the trajectory of all requests that were answered so far.

        Args:
            reward: The environment's reward for the whole.
            truncated: Whether it ended before its end; None: if a history was full, or if the last completion did not
                end by itself.
            metadata: What reward functions get as `metadata`. The number of completions that nobody has got is added
                as `unheard_completions`, if there are any.

        Raises:
            ValueError: The agent got no completion.
            PastRewritten: The chat template has rewritten the past, and the configuration refuses that.
        """
        if self._failure is not None:
            raise self._failure
        segments = joined_segments(self._branches)
        if not segments:
            raise ValueError(
                "the agent has got no completion; it has to send requests to OPENAI_BASE_URL with OPENAI_API_KEY"
            )
        last = max((turn for branch in self._branches for turn in branch.heard), key=lambda turn: turn.order)
        if truncated is None:
            truncated = self._is_full or last.completion.reason != "stop"
        unheard = {"unheard_completions": self._num_unheard} if self._num_unheard else {}
        return Trajectory(tuple(segments), reward, truncated, tuple(last.messages), {**(metadata or {}), **unheard})

    def _begun(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> History:
        tokenizer = self._client.tokenizer
        return self._client.history(
            [without_special_tokens(message, tokenizer) for message in messages],
            [without_special_tokens(tool, tokenizer) for tool in tools] or None,
        )

    def _encoded(self, text: str, is_first: bool) -> list[int]:
        ids, prefix = self._client.tokenizer.encode_special(text).ids, self._client.tokenizer.prefix_ids
        return [*prefix, *ids] if is_first and ids[: len(prefix)] != prefix else ids

    def _branches_behind(
        self, before: AnsweredTurn | None, number: int, begin: Callable[[], History], extend: Callable[[Any], None]
    ) -> list[Branch]:
        """Return so many branches that begin, or that go on behind a turn. The first one may be that of the turn.

        Raises:
            RequestRefused: The messages cannot be rendered.
        """
        found: list[Branch] = []
        for _ in range(number):
            if before is None:
                branch = Branch(self._rendered(begin))
                self._branches.append(branch)
            elif before.can_grow:
                branch = before.branch
            else:
                branch = Branch(before.branch.history.fork(before.number), before)
                self._branches.append(branch)
            if before is not None:
                self._rendered(lambda history=branch.history: extend(history))
            branch.is_busy = True
            found.append(branch)
        return found

    def _rendered(self, render: Callable[[], _T]) -> _T:
        try:
            return render()
        except PastRewritten as error:
            self._failure = error
            raise RequestRefused(str(error), code="past_rewritten", param="messages") from error
        except ValueError as error:  # the chat template or the tokenizer refuses the messages
            raise RequestRefused(str(error), param="messages") from error

    async def _complete(
        self, branches: Sequence[Branch], parameters: Parameters, asked: Sequence[Key]
    ) -> list[AnsweredTurn]:
        """Return a turn for each branch. They are completed at the same time.

        Raises:
            RequestRefused: No token fits one of them.
        """
        done = await asyncio.gather(*(self._turn(each, parameters, asked) for each in branches), return_exceptions=True)
        turns = [each for each in done if isinstance(each, AnsweredTurn)]
        error = next((each for each in done if isinstance(each, BaseException)), None)
        if error is None:
            return turns
        self._mark_unheard(turns)
        if isinstance(error, HistoryFull):
            self._is_full = True
            raise RequestRefused(_full(error), code="context_length_exceeded", param="messages") from error
        raise error

    async def _turn(self, branch: Branch, parameters: Parameters, asked: Sequence[Key]) -> AnsweredTurn:
        try:
            completion = await branch.history.complete(parameters.sampling)
        finally:
            branch.is_busy = False
        text = str(branch.history.messages[-1]["content"])
        ends = [place for stop in parameters.stop if (place := text.find(stop)) >= 0]
        content = text[: min(ends, default=len(text))]
        calls = tool_calls(self._parser, content, parameters.tools) if parameters.calls_tools else []
        answered = Answered(None if calls else content, text, calls)
        number = branch.history.num_turns
        turn = AnsweredTurn(branch, number, self._num_turns, answered, completion, asked)
        branch.turns.append(turn)
        self._num_turns += 1
        return turn

    def _mark_unheard(self, turns: Sequence[AnsweredTurn]) -> None:
        for turn in turns:
            turn.is_heard = False
        self._num_unheard += len(turns)


def _full(error: HistoryFull) -> str:
    return f"the messages exceed the context length: {error}"  # clients look for the last words


def _ended() -> RequestRefused:
    return RequestRefused("the session has ended, and with it this key", status=410, code="session_ended")


def _checked_prompt(prompt: Any, tokenizer: Tokenizer) -> str | list[int]:
    """Return the prompt of a request to /v1/completions: a text or token ids.

    Raises:
        RequestRefused: It is neither, empty, or has a token that the tokenizer does not have.
    """
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
        wrong = next((each for each in prompt if not 0 <= each < tokenizer.vocab_size), None)
        if wrong is None:
            return prompt
        raise RequestRefused(
            f"prompt has the token {wrong}, and the tokenizer's are 0 to {tokenizer.vocab_size - 1}", param="prompt"
        )
    raise RequestRefused("prompt must be one text or one list of token ids, and not empty", param="prompt")
