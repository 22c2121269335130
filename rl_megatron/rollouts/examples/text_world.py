"""The experiment `text_world`: fetch a key and open a door, on a map that is described by texts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_megatron.data.conversations import Message
from rl_megatron.data.tasks import Problem
from rl_megatron.rollouts.environment import EnvironmentStep
from rl_megatron.rollouts.examples.conversations import GeneratedConversations

_MOVES: Mapping[str, tuple[int, int]] = {"north": (-1, 0), "south": (1, 0), "west": (0, -1), "east": (0, 1)}
COMMANDS = (*(f"go {way}" for way in _MOVES), "take key", "open door")


@dataclass(frozen=True)
class TextWorldTask(GeneratedConversations):
    """Problems such as `at b2, key c1, door a3`, which name squares on a map.

    Letters run from north to south, numbers from west to east. In the demonstrations, some commands lead to the goal,
    and the others are random. Few demonstrations reach the goal.

    Args:
        size: The number of squares from north to south, and from west to east.
        num_turns: The most commands that a solution needs, and that a demonstration has.
        share_of_right_commands: The share of a demonstration's commands that lead to the goal.

    Raises:
        ValueError: The size is below 2 or above 9, there are fewer than 3 turns, or the share is outside [0, 1].
    """

    name: ClassVar[str] = "text_world"

    size: int = 3
    num_turns: int = 8
    share_of_right_commands: float = 0.3

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 9:
            raise ValueError(f"{self.name}: size={self.size} must lie between 2 and 9")
        if self.num_turns < 3:
            raise ValueError(f"{self.name}: num_turns={self.num_turns} must be at least 3")
        if not 0 <= self.share_of_right_commands <= 1:
            share = self.share_of_right_commands
            raise ValueError(f"{self.name}: share_of_right_commands={share} must lie between 0 and 1")

    def draw(self, source: random.Random) -> Problem:
        """Return a random layout that `num_turns` commands can solve."""
        while True:
            start, key, door = ((source.randrange(self.size), source.randrange(self.size)) for _ in range(3))
            if _distance(start, key) + 1 + _distance(key, door) + 1 <= self.num_turns and key != door:
                break
        record = {"start": start, "key": key, "door": door, "size": self.size}
        return Problem(_describe(start, key, door), "open door", record)

    def conversation(self, problem: Problem, source: random.Random) -> list[Message]:
        world = TextWorld()
        world.reset(problem.record)
        messages: list[Message] = [{"role": "user", "content": problem.prompt}]
        for turn in range(self.num_turns):
            is_right = source.random() < self.share_of_right_commands
            command = world.next_command() if is_right else source.choice(COMMANDS)
            messages.append({"role": "assistant", "content": command})
            step = world.step(command)
            if step.done or turn == self.num_turns - 1:
                break
            messages.append({"role": "user", "content": str(step.messages)})
        return messages

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 0.0, because the world gives the reward."""
        return 0.0


class TextWorld:
    """An environment of squares on a map. The reward is 1 for opening the door with the key, and 0 before."""

    def reset(self, record: Mapping[str, Any]) -> None:
        """Take the layout of a problem. The prompt stays the first message."""
        self._at, self._key, self._door = (tuple(record[name]) for name in ("start", "key", "door"))
        self._size, self._has_key = int(record["size"]), False

    def step(self, answer: str) -> EnvironmentStep:
        command = answer.strip()
        if command == "open door" and self._has_key and self._at == self._door:
            return EnvironmentStep(reward=1.0, done=True)
        if command == "take key" and self._at == self._key:
            self._has_key = True
        elif command in COMMANDS and command.startswith("go "):
            south, east = _MOVES[command.removeprefix("go ")]
            square = self._at[0] + south, self._at[1] + east
            if all(0 <= coordinate < self._size for coordinate in square):
                self._at = square
        return EnvironmentStep(_describe(self._at, None if self._has_key else self._key, self._door))

    def next_command(self) -> str:
        """Return the next command of a shortest solution."""
        goal = self._door if self._has_key else self._key
        for way, (south, east) in _MOVES.items():
            if _distance((self._at[0] + south, self._at[1] + east), goal) < _distance(self._at, goal):
                return f"go {way}"
        return "open door" if self._has_key else "take key"


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def _describe(at: tuple[int, int], key: tuple[int, int] | None, door: tuple[int, int]) -> str:
    """Return the observation: the squares of the policy, of the key unless the policy has it, and of the door."""
    have = "have key" if key is None else f"key {_name(key)}"
    return f"at {_name(at)}, {have}, door {_name(door)}"


def _name(square: tuple[int, int]) -> str:
    return f"{'abcdefghi'[square[0]]}{square[1] + 1}"
