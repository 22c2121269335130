"""`Session`: the requests that an agent makes in one trajectory, and the trajectory built from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rl_megatron import log
from rl_megatron.data.conversations import Message
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Completion, Sampling
from rl_megatron.rollouts.gateway.bodies import BodyLimits, RequestRefused, read_body, write_json
from rl_megatron.rollouts.gateway.messages import Answered, Key, build_key, read_messages
from rl_megatron.rollouts.gateway.parameters import ParameterReader, Parameters
from rl_megatron.rollouts.gateway.tool_calls import find_tool_calls
from rl_megatron.rollouts.gateway.turns import AnsweredTurn, Branch, TextTurns, find_longest_match, join_segments
from rl_megatron.rollouts.history import History, PastRewritten, TextHistory, check_length, escape_special_tokens
from rl_megatron.rollouts.tools.calls import Parser
from rl_megatron.rollouts.trajectory import HistoryFull, TokenLimits, Trajectory

_T = TypeVar("_T")
# Work of a few milliseconds is done on the loop, which would also have to wait for a switch to another thread.
_SHORT_BODY = 8192  # bytes
_FEW_TURNS = 256  # turns that are searched for the one that a request continues
SHORT_COMPLETION = 1024  # tokens


class SessionClient(Protocol):
    """The part of a `RolloutClient` that a session uses."""

    name: str
    prompt: EncodedPrompt
    tokenizer: Tokenizer
    limits: TokenLimits

    def history(
        self,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        most_characters: int | None = None,
    ) -> History:
        """Return the history that begins with messages."""
        ...

    def fitting(self, num_tokens: int, sampling: Sampling | None = None) -> Sampling:
        """Return how to sample the completion that follows `num_tokens` tokens."""
        ...

    async def complete(self, ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        """Return the completion of token ids."""
        ...


@dataclass(frozen=True)
class Choices:
    """The turns that answer a request.

    Attributes:
        prompt: The tokens that the first turn follows.
        turns: One turn for each choice.
    """

    parameters: Parameters
    prompt: Sequence[int]
    turns: Sequence[AnsweredTurn]


@dataclass(frozen=True)
class _Prepared:
    """A request that the engine can complete.

    Attributes:
        previous: The turn that it continues; None if it begins a conversation.
        extends_branch: Whether the first choice extends the branch of that turn.
        histories: The history of each choice.
        asked: See `AnsweredTurn`.
        add: Adds the turns that answer it to those that later requests can continue.
    """

    parameters: Parameters
    previous: AnsweredTurn | None
    extends_branch: bool
    histories: Sequence[History]
    asked: Sequence[Key]
    add: Callable[[Sequence[AnsweredTurn]], None]


class Session:
    """An agent's requests in one trajectory.

    Each session has a thread that reads, renders and encodes long requests, one after the other, so that the requests
    of other sessions do not wait. The thread changes no state: the asyncio loop applies its results.

    Attributes:
        base_url: The address for OpenAI's client.
        api_key: The key of this session alone.
        body_limits: The limits of the bodies of its requests.
        texts: The turns that answered /v1/completions.
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
        """Begin without a request. Without a parser, tool calls stay in the text of the answer."""
        self.base_url, self.api_key = base_url, api_key
        self._client, self._parser = client, parser
        self._parameters = ParameterReader(sampling, client.tokenizer, stops_at_strings)
        self._branches: list[Branch] = []
        self._roots: dict[str, list[AnsweredTurn]] = {}  # by the tools of the conversation
        self.body_limits = BodyLimits(client.limits.context, client.tokenizer.longest_token)
        self._thread = ThreadPoolExecutor(1, "rl-megatron-session")
        self._order = asyncio.Lock()  # held from the beginning of a job in the thread until its result is applied
        self.texts = TextTurns()
        self._num_turns, self._num_unheard = 0, 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_full, self._has_ended = False, False
        self._failure: Exception | None = None

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine. Cancelling the caller does not stop it; ending the session does."""
        if self._has_ended:
            work.close()
            raise _refuse_ended()
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        await asyncio.wait({task})
        if task.cancelled():
            raise _refuse_ended()
        return task.result()

    def _note_end(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, RequestRefused):
            self._failure = error  # the trajectory fails with this error

    async def end(self) -> None:
        """End the requests that still wait."""
        self._has_ended = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run_job(self, job: Callable[[], _T], is_short: bool) -> _T:
        """Return the result of a function; run it in the session's thread unless `is_short`."""
        if self._has_ended:
            raise _refuse_ended()
        if is_short:
            return job()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._has_ended and not (task and task.cancelling()):  # the job was cancelled before it began
                raise _refuse_ended() from None
            raise

    async def answer_chat(self, raw: bytes) -> Choices:
        """Answer the body of a request to /v1/chat/completions, or refuse it."""
        return await self._answer(raw, self._prepare_chat)

    def _prepare_chat(self, body: Mapping[str, object]) -> _Prepared:
        parameters = self._parameters.read_chat(body)
        messages = read_messages(body.get("messages"))
        keys = [build_key(message) for message in messages]
        tools = write_json(parameters.tools)
        previous, num_known = find_longest_match(self._roots.get(tools, ()), keys)
        extends_branch, histories = self._begin_histories(
            previous,
            parameters.num_choices,
            begin=lambda: self._begin(messages, parameters.tools),
            extend=lambda history: history.extend(messages[num_known:]),
        )

        def add(turns: Sequence[AnsweredTurn]) -> None:
            (self._roots.setdefault(tools, []) if previous is None else previous.following).extend(turns)

        return _Prepared(parameters, previous, extends_branch, histories, tuple(keys[num_known:]), add)

    async def answer_text(self, raw: bytes) -> Choices:
        """Answer the body of a request to /v1/completions, or refuse it."""
        return await self._answer(raw, self._prepare_text)

    def _prepare_text(self, body: Mapping[str, object]) -> _Prepared:
        parameters = self._parameters.read_text(body)
        prompt = _read_prompt(body.get("prompt"), self._client.tokenizer)
        previous, rest = self.texts.match(prompt)
        ids = self._encode(rest, is_first=previous is None) if isinstance(rest, str) else rest
        if not ids:
            raise RequestRefused("prompt has no token", param="prompt")
        if len(ids) > self.body_limits.context:
            raise HistoryFull(f"the prompt has {len(ids)} tokens, but the context {self.body_limits.context}")
        extends_branch, histories = self._begin_histories(
            previous,
            parameters.num_choices,
            begin=lambda: TextHistory(self._client, self._client.tokenizer, ids),
            extend=lambda history: history.extend_ids(ids),
        )

        def add(turns: Sequence[AnsweredTurn]) -> None:
            for turn in turns:
                self.texts.add(turn, previous, rest, ids)

        return _Prepared(parameters, previous, extends_branch, histories, (), add)

    async def _answer(self, raw: bytes, prepare: Callable[[Mapping[str, Any]], _Prepared]) -> Choices:
        """Answer a request; `prepare` turns its body into the histories that the engine completes."""
        try:
            async with self._order:
                is_short = len(raw) <= _SHORT_BODY and self._num_turns <= _FEW_TURNS
                prepared = await self.run_job(lambda: prepare(read_body(raw, self.body_limits)), is_short)
                branches = self._occupy_branches(prepared)
            prompt = branches[0].history.ids
            turns = await self._complete(branches, prepared.parameters, prepared.asked)
        except PastRewritten as error:
            self._failure = error
            raise RequestRefused(str(error), code="past_rewritten", param="messages") from error
        except HistoryFull as error:
            raise self.refuse_full(str(error)) from error
        prepared.add(turns)
        return Choices(prepared.parameters, prompt, turns)

    def refuse_full(self, reason: str, status: int = 400) -> RequestRefused:
        """Return the error for a request that does not fit the context, and count the trajectory as truncated."""
        self._is_full = True
        message = f"the messages exceed the context length: {reason}"  # clients search for "context length"
        return RequestRefused(message, status, code="context_length_exceeded", param="messages")

    def ignore(self, choices: Choices) -> None:
        """Leave out the turns of a request whose answer the agent did not receive: nothing is learned from them."""
        log.LOGGER.warning(
            "trajectory %s: the agent did not wait for the answer to a request, so nothing is learned from its %d "
            "completions",
            self._client.name,
            len(choices.turns),
        )
        self._mark_unheard(choices.turns)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._client.tokenizer

    def trajectory(
        self,
        reward: float = 0.0,
        *,
        truncated: bool | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Trajectory:
        """Return the trajectory of all requests that were answered so far.

        Args:
            reward: The environment's reward for the whole trajectory.
            truncated: Whether the trajectory was cut off. None: True if a history was full, or the last completion did
                not end by itself.
            metadata: What reward functions get as `metadata`. The number of completions that the agent did not receive
                is added as `unheard_completions`, if it is not 0.

        Raises:
            ValueError: The agent got no completion.
            PastRewritten: The chat template has changed earlier messages, which `rollout.on_rewrite` does not allow.
        """
        if self._failure is not None:
            raise self._failure
        segments = join_segments(self._branches)
        if not segments:
            raise ValueError(
                "the agent has got no completion; it has to send requests to OPENAI_BASE_URL with OPENAI_API_KEY"
            )
        last = max((turn for branch in self._branches for turn in branch.heard), key=lambda turn: turn.order)
        if truncated is None:
            truncated = self._is_full or last.completion.reason != "stop"
        unheard = {"unheard_completions": self._num_unheard} if self._num_unheard else {}
        return Trajectory(tuple(segments), reward, truncated, tuple(last.messages), {**(metadata or {}), **unheard})

    def _begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> History:
        tokenizer = self._client.tokenizer
        return self._client.history(
            [escape_special_tokens(message, tokenizer) for message in messages],
            [escape_special_tokens(tool, tokenizer) for tool in tools] or None,
            self.body_limits.characters,
        )

    def _encode(self, text: str, is_first: bool) -> list[int]:
        check_length(text, self.body_limits.characters)
        ids, prefix = self._client.tokenizer.encode_special(text).ids, self._client.tokenizer.prefix_ids
        return [*prefix, *ids] if is_first and ids[: len(prefix)] != prefix else ids

    def _begin_histories(
        self, previous: AnsweredTurn | None, number: int, begin: Callable[[], History], extend: Callable[[Any], None]
    ) -> tuple[bool, list[History]]:
        """Return whether the first choice extends the branch of `previous`, and the history of each choice."""
        extends_branch = previous is not None and previous.can_grow
        histories: list[History] = []
        try:
            for choice in range(number):
                if choice > int(extends_branch):
                    histories.append(histories[-1].copy())
                elif previous is None:
                    histories.append(begin())
                else:
                    history = previous.branch.history
                    grown = history.copy() if extends_branch and choice == 0 else history.fork(previous.number)
                    extend(grown)
                    histories.append(grown)
        except ValueError as error:  # the chat template or the tokenizer refuses the messages
            raise RequestRefused(str(error), param="messages") from error
        return extends_branch, histories

    def _occupy_branches(self, prepared: _Prepared) -> list[Branch]:
        """Return the branches of the choices, and mark them as busy."""
        branches: list[Branch] = []
        for choice, history in enumerate(prepared.histories):
            if prepared.previous is not None and prepared.extends_branch and choice == 0:
                branch = prepared.previous.branch
                branch.history = history
            else:
                branch = Branch(history, prepared.previous)
                self._branches.append(branch)
            branch.is_busy = True
            branches.append(branch)
        return branches

    async def _complete(
        self, branches: Sequence[Branch], parameters: Parameters, asked: Sequence[Key]
    ) -> list[AnsweredTurn]:
        """Complete all branches at the same time, and return a turn for each."""
        outcomes = await asyncio.gather(
            *(self._complete_turn(branch, parameters, asked) for branch in branches), return_exceptions=True
        )
        turns = [outcome for outcome in outcomes if isinstance(outcome, AnsweredTurn)]
        error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
        if error is None:
            return turns
        self._mark_unheard(turns)
        raise error

    async def _complete_turn(self, branch: Branch, parameters: Parameters, asked: Sequence[Key]) -> AnsweredTurn:
        history = branch.history
        try:
            ids = history.ids
            sampling = self._client.fitting(len(ids), parameters.sampling)
            completion = await self._client.complete(ids, sampling)
            async with self._order:
                grown, answered = await self.run_job(
                    lambda: self._read_completion(history.copy(), completion, sampling, parameters),
                    is_short=len(completion.ids) <= SHORT_COMPLETION,
                )
                branch.history = grown
                turn = AnsweredTurn(branch, grown.num_turns, self._num_turns, answered, completion, asked)
                branch.turns.append(turn)
                self._num_turns += 1
        finally:
            branch.is_busy = False
        return turn

    def _read_completion(
        self, history: History, completion: Completion, sampling: Sampling, parameters: Parameters
    ) -> tuple[History, Answered]:
        """Append a completion to a history; return the history and the answer."""
        history.append_completion(completion, sampling)
        text = str(history.messages[-1]["content"])
        ends = [position for stop in parameters.stop if (position := text.find(stop)) >= 0]
        content = text[: min(ends, default=len(text))]
        calls = find_tool_calls(self._parser, content, parameters.tools) if parameters.calls_tools else []
        return history, Answered(None if calls else content, text, calls)

    def _mark_unheard(self, turns: Sequence[AnsweredTurn]) -> None:
        for turn in turns:
            turn.is_heard = False
        self._num_unheard += len(turns)


def _refuse_ended() -> RequestRefused:
    return RequestRefused("the session of this key has ended", status=410, code="session_ended")


def _read_prompt(prompt: object, tokenizer: Tokenizer) -> str | list[int]:
    """Return the prompt of a request to /v1/completions, a text or token ids; refuse an empty one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        wrong = next((token for token in prompt if not 0 <= token < tokenizer.vocab_size), None)
        if wrong is None:
            return prompt
        raise RequestRefused(
            f"prompt has the token {wrong}, but the tokenizer's are 0 to {tokenizer.vocab_size - 1}", param="prompt"
        )
    raise RequestRefused("prompt must be one text or one list of token ids, and not empty", param="prompt")
