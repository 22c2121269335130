"""`Trajectory`: the tokens that a policy sampled in one task, over several turns, with their context and limits."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_megatron.data.conversations import Message
from rl_megatron.generation.interfaces import Completion, Sampling
from rl_megatron.workers.plain_data import to_plain


class TokensDiffer(RuntimeError):
    """A token of a trajectory differs from the one that the engine sampled or the chat template wrote."""


class HistoryFull(RuntimeError):
    """No further token fits into a trajectory: its context or its number of sampled tokens is at the limit."""


@dataclass(frozen=True)
class TokenLimits:
    """The most tokens of a trajectory.

    Attributes:
        context: All tokens of a history, including those of prompts and environments.
        sampled: The tokens that the policy samples in a trajectory.
    """

    context: int
    sampled: int


@dataclass(frozen=True)
class Turn:
    """A completion in a segment.

    Attributes:
        start: The index of its first token in its segment.
        completion: The engine's answer.
        sampling: How it was sampled.
        reward: The environment's reward for it.
    """

    start: int
    completion: Completion
    sampling: Sampling
    reward: float = 0.0

    @property
    def end(self) -> int:
        """Return the index after its last token."""
        return self.start + len(self.completion.ids)


@dataclass(frozen=True)
class Segment:
    """A history of tokens that only grew at its end. It becomes one sequence of a training batch.

    Attributes:
        ids: All tokens.
        turns: The completions in it, in their order. Only their tokens are learned from.
        parent: The number of the segment that this one continues, because the chat template rewrote that segment, or
            an agent continued after one of its earlier turns. None if this one continues no segment.
    """

    ids: Sequence[int]
    turns: Sequence[Turn]
    parent: int | None = None

    def __post_init__(self) -> None:
        """Check that completions are where the segment has their tokens, do not overlap, and do not begin the segment.

        Raises:
            TokensDiffer: A check fails; the message names the turn and the token.
        """
        end = 1
        for number, turn in enumerate(self.turns, 1):
            if turn.start < end or turn.end > len(self.ids):
                raise TokensDiffer(
                    f"turn {number} is given as tokens {turn.start + 1} to {turn.end}, but must be within tokens "
                    f"{end + 1} to {len(self.ids)} of its segment"
                )
            end = turn.end
            for index, sampled in enumerate(turn.completion.ids, turn.start):
                if self.ids[index] != sampled:
                    raise TokensDiffer(
                        f"turn {number}: token {index + 1} of the segment is {self.ids[index]}, but the engine sampled "
                        f"{sampled} in request {turn.completion.request_id!r}"
                    )


@dataclass(frozen=True)
class Trajectory:
    """The result of a rollout worker for one task.

    Attributes:
        segments: The histories with their completions. At least one history has a completion.
        reward: The environment's reward for the whole trajectory, besides the rewards of turns. Rewards of functions
            are added to it.
        truncated: Whether it was cut off, at a limit of turns, tokens or time.
        messages: The conversation, for reward functions and reports. Without a conversation it is empty.
        metadata: What reward functions get from the environment.
    """

    segments: Sequence[Segment]
    reward: float = 0.0
    truncated: bool = False
    messages: Sequence[Message] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> list[Turn]:
        """Return the completions of all segments. Those of a segment are in the order in which they were sampled."""
        return [turn for segment in self.segments for turn in segment.turns]

    @property
    def environment_reward(self) -> float:
        """Return the sum of the environment's rewards."""
        return self.reward + sum(turn.reward for turn in self.turns)


def check_values(trajectory: Trajectory) -> Trajectory:
    """Convert the messages and metadata of a trajectory to plain data, which other processes can read.

    Raise BadAnswer or ValueError for other data, rewards that are not finite, or a `truncated` that is not a bool.
    """
    rewards = [trajectory.reward, *(turn.reward for turn in trajectory.turns)]
    wrong = next((reward for reward in rewards if not _is_finite_number(reward)), None)
    if wrong is not None:
        raise ValueError(f"a reward is {wrong!r}, but must be a finite number")
    if not isinstance(trajectory.truncated, bool):
        raise ValueError(f"truncated is {trajectory.truncated!r}, but must be true or false")
    if not trajectory.messages and not trajectory.metadata:
        return trajectory
    try:
        messages, metadata = (
            to_plain(list(trajectory.messages), "messages"),
            to_plain(dict(trajectory.metadata), "metadata"),
        )
        pickle.dumps((messages, metadata))
    except RecursionError as error:
        raise ValueError("messages or metadata are nested too deeply") from error
    return replace(trajectory, messages=messages, metadata=metadata)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
