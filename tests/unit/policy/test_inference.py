"""Copying a batch to the host must never move the caller's batch."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.policy.inference import on_host


class MovesInPlace(BatchedDataDict):
    """A batch whose `to` works in place, as NeMo RL's does."""

    def to(self, device):
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device, copy=True)
        return self


@pytest.mark.parametrize("kind", [BatchedDataDict, MovesInPlace])
def test_the_callers_batch_keeps_its_tensors_and_their_device(kind):
    tensor = torch.arange(6).view(2, 3)
    batch = kind({"input_ids": tensor, "prompts": ["a", "b"]})
    moved = on_host(batch)
    moved["more"] = tensor
    assert moved["input_ids"].device.type == "cpu" and moved["prompts"] == ["a", "b"]
    assert batch["input_ids"] is tensor and "more" not in batch
