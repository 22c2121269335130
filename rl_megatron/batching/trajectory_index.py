"""`TrajectoryIndex`: which sequences of a batch belong to one trajectory, and values of whole trajectories.

A trajectory is usually one sequence. It has several if a chat template rewrote its past, or if its turns were sampled
at different temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_megatron.data.batch import common_size

TRAJECTORY = "trajectory"  # a batch's key for the trajectory number of each sequence


class TrajectoryIndex:
    """The sequences of a batch by trajectory. Sequences of one trajectory follow each other.

    Attributes:
        owner: The trajectory number of each sequence, [B] int64, from 0 without a gap.
        num_trajectories: The number N of trajectories.
    """

    def __init__(self, rollouts: Mapping[str, Any]):
        """Read the key `trajectory`; without it, every sequence is a trajectory."""
        size = common_size(rollouts)
        if TRAJECTORY in rollouts and size:
            changes = rollouts[TRAJECTORY].diff() != 0
            self.owner = torch.cat([torch.zeros(1, dtype=torch.long), changes.long()]).cumsum(0)
        else:
            self.owner = torch.arange(size)
        self.num_trajectories = int(self.owner[-1]) + 1 if len(self.owner) else 0
        self.all_alone = self.num_trajectories == len(self.owner)
        counts = torch.bincount(self.owner, minlength=self.num_trajectories)
        self._last = counts.cumsum(0) - 1
        self._first = self._last - counts + 1
        self._most = int(counts.max()) if len(counts) else 0

    def take_first(self, values: Tensor) -> Tensor:
        """Return the value [N, …] of the first sequence of each trajectory."""
        return values if self.all_alone else values[self._first]

    def take_last(self, values: Tensor) -> Tensor:
        """Return the value [N, …] of the last sequence of each trajectory."""
        return values if self.all_alone else values[self._last]

    def is_last(self) -> Tensor:
        """Return which sequences are the last of their trajectory, [B] bool."""
        is_last = torch.zeros(len(self.owner), dtype=torch.bool)
        is_last[self._last] = True
        return is_last

    def total(self, values: Tensor) -> Tensor:
        """Return the sums [N] of the values [B] of each trajectory's sequences."""
        if self.all_alone:
            return values
        return torch.zeros(self.num_trajectories, dtype=values.dtype).index_add_(0, self.owner, values)

    def spread(self, values: Tensor) -> Tensor:
        """Return, for each sequence, the value of its trajectory: [N, …] becomes [B, …]."""
        return values if self.all_alone else values[self.owner]

    def join(self, values: Tensor) -> Tensor:
        """Return each trajectory's sequences as one: [B, S] becomes [N, K·S].

        K is the largest number of sequences in a trajectory. Zeros pad trajectories with fewer.
        """
        if self.all_alone:
            return values
        width = values.shape[1]
        whole = values.new_zeros((self.num_trajectories, self._most, width))
        whole[self.owner, self._number_within()] = values
        return whole.view(self.num_trajectories, self._most * width)

    def split(self, values: Tensor) -> Tensor:
        """Undo `join`: [N, K·S] becomes [B, S]."""
        if self.all_alone:
            return values
        return values.view(self.num_trajectories, self._most, -1)[self.owner, self._number_within()]

    def step_sizes(self, num_trajectories: int) -> list[int] | None:
        """Return the number of sequences in each step of `num_trajectories` trajectories; None if all have one."""
        return None if self.all_alone else torch.bincount(self.owner // num_trajectories).tolist()

    def _number_within(self) -> Tensor:
        """Return the number of each sequence within its trajectory, [B]."""
        return torch.arange(len(self.owner)) - self._first[self.owner]
