"""Copying a batch to the host must never move the caller's batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.training.inference import build_whole_batch, check_width

# What a policy checks a dictionary against.
MODEL = SimpleNamespace(config=ModelConfig(max_sequence_length=8), vocab_size=6)


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
    moved = build_whole_batch(MODEL, batch)
    moved["more"] = tensor
    assert moved["input_ids"].device.type == "cpu" and moved["prompts"] == ["a", "b"]
    assert batch["input_ids"] is tensor and "more" not in batch


def test_a_sequence_that_is_longer_than_the_models_limit_is_refused():
    model = ModelConfig(max_sequence_length=8)
    check_width(model, 8)
    with pytest.raises(ConfigError, match="a sequence has 9 tokens, but model.max_sequence_length=8"):
        check_width(model, 9)
