"""`Conversation`: the rollout worker that lets an environment and tools answer the policy, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rl_megatron.config.rollout import TurnSampling
from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.data.conversations import Message
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.stop_strings import StopStrings
from rl_megatron.rollouts.client import RolloutClient
from rl_megatron.rollouts.environment import read_observation
from rl_megatron.rollouts.environments import Environment, Environments
from rl_megatron.rollouts.history import History
from rl_megatron.rollouts.tools.calls import FoundCall, explain_cut
from rl_megatron.rollouts.trajectory import HistoryFull, Trajectory
from rl_megatron.rollouts.worker import register_rollout_worker


class Tools(Protocol):
    """The tools that the policy may call in one trajectory."""

    @property
    def schemas(self) -> Sequence[Mapping[str, object]]:
        """Return their JSON schemas, which the chat template describes."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how many calls there were and how many failed, by names such as `tool_calls`."""
        ...

    def find_calls(self, text: str) -> Sequence[FoundCall]:
        """Return the calls in a turn of the policy; empty if there are none."""
        ...

    async def answer(self, calls: Sequence[FoundCall]) -> tuple[list[Message], bool]:
        """Return the messages for the model, and whether the trajectory ends."""
        ...


@register_rollout_worker("conversation")
class Conversation:
    """A rollout worker of several turns: tools answer calls, and an environment answers all other turns.

    A trajectory ends when the environment or a tool ends it, or after a turn that neither answers. It is truncated at a
    limit of turns or tokens.
    """

    def __init__(
        self,
        environments: Environments | None = None,
        tools: Callable[[ChatTemplate | None], Tools] | None = None,
        max_turns: int = 8,
        turns: Sequence[TurnSampling] = (),
    ):
        """Use these parts, which the caller owns.

        Args:
            environments: The environments; None without one.
            tools: Returns the tools of a trajectory, given its chat template or None; None without tools.
            max_turns: The most turns of a trajectory.
            turns: How turns are sampled: entry i is for turn i, and the last entry also for all later turns.
        """
        self._environments, self._tools = environments, tools
        self._max_turns, self._turns = max_turns, turns

    async def rollout(
        self, client: RolloutClient, record: Mapping[str, object], sampling: Sampling
    ) -> list[Trajectory]:
        chat = client.prompt.chat()
        tools = None if self._tools is None else self._tools(None if chat is None else chat[0])
        schemas = None if tools is None or chat is None else tools.schemas  # a plain prompt describes tools itself
        if self._environments is None:
            return [await self._talk(client, client.history(tools=schemas), None, tools, {}, sampling)]
        environment = await self._environments.make()
        try:
            history, metadata = await self._begin(client, record, environment, schemas)
            return [await self._talk(client, history, environment, tools, metadata, sampling)]
        finally:
            await environment.close()

    async def _begin(
        self,
        client: RolloutClient,
        record: Mapping[str, object],
        environment: Environment,
        schemas: Sequence[Mapping[str, object]] | None,
    ) -> tuple[History, dict[str, Any]]:
        """Reset the environment; return a history with the first messages, and the environment's metadata."""
        history = client.history(tools=schemas)
        messages, metadata = await environment.reset(record, history.messages)
        if messages is not None:
            first = history.messages[:1]
            if first and first[0]["role"] == "system" and messages[:1] and messages[0]["role"] != "system":
                messages = [*first, *messages]
            history = client.history(messages, schemas)
        return history, metadata

    async def _talk(
        self,
        client: RolloutClient,
        history: History,
        environment: Environment | None,
        tools: Tools | None,
        metadata: Mapping[str, object],
        sampling: Sampling,
    ) -> Trajectory:
        """Let the policy take turns until something ends the trajectory."""
        collected, truncated, stop = dict(metadata), False, None
        for turn in range(self._max_turns):
            used = self._choose_sampling(client, sampling, turn, stop)
            try:
                completion = await history.complete(used)
            except HistoryFull:
                if not history.num_turns:
                    raise
                truncated = True
                break
            text, stop = history.messages[-1]["content"], None
            was_cut = completion.reason != "stop"
            if tools is not None and (calls := tools.find_calls(text)):
                if completion.reason == "length":
                    calls = explain_cut(calls, self._name_limit(turn, len(completion.ids), used.max_new_tokens))
                messages, ends = await tools.answer(calls)
                was_cut = was_cut or ends  # because the policy has not answered yet
            elif environment is not None:
                step = await environment.step(text)
                history.add_reward(step.reward)
                collected |= step.metadata
                messages, stop, ends = read_observation(step.messages) or [], step.stop, step.done or step.truncated
                was_cut = was_cut or step.truncated
            else:
                messages, ends = [], True
            if ends:
                history.messages += messages  # no turn follows, so they are not encoded
                truncated = was_cut
                break
            history.extend(messages)
        else:
            truncated = True
        if tools is not None:
            collected |= tools.counts
        return history.trajectory(truncated=truncated, metadata=collected)

    def _name_limit(self, turn: int, num_tokens: int, max_new_tokens: int) -> str:
        """Return the setting at which turn `turn` was cut after `num_tokens` tokens, with its value."""
        if num_tokens < max_new_tokens:
            return "a limit of the trajectory, rollout.max_tokens or rollout.max_sampled_tokens"
        is_own = bool(self._turns) and self._turns[min(turn, len(self._turns) - 1)].max_new_tokens is not None
        return f"{'rollout.turn_sampling' if is_own else 'generation'}.max_new_tokens={max_new_tokens}"

    def _choose_sampling(
        self, client: RolloutClient, sampling: Sampling, turn: int, stop: Sequence[str] | None
    ) -> Sampling:
        """Return the sampling of turn `turn`, counted from 0; the texts `stop` end it, too."""
        texts = list(stop or ())
        if self._turns:
            chosen = self._turns[min(turn, len(self._turns) - 1)]
            is_greedy = sampling.temperature == 0  # as evaluations ask for
            names = ("max_new_tokens",) if is_greedy else ("max_new_tokens", "temperature", "top_p", "top_k")
            overrides = {name: value for name in names if (value := getattr(chosen, name)) is not None}
            sampling, texts = replace(sampling, **overrides), [*texts, *chosen.stop]
        if not texts:
            return sampling
        configured = () if sampling.stop_strings is None else sampling.stop_strings.texts
        stop_strings = StopStrings(tuple(dict.fromkeys((*configured, *texts))), client.tokenizer.definition)
        return replace(sampling, stop_strings=stop_strings)
