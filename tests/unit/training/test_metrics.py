"""What losses and metrics divide by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.training.metrics import Denominators

BATCH = BatchedDataDict(
    input_ids=torch.zeros(3, 5, dtype=torch.long),
    input_lengths=torch.tensor([5, 4, 3]),
    token_mask=torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]]),
    sample_mask=torch.tensor([1.0, 0.0, 1.0]),
)


def numbers(denominators: Denominators) -> tuple[float, float, float]:
    return denominators.sequences.item(), denominators.tokens.item(), denominators.positions.item()


def test_failed_samples_prompts_and_first_tokens_do_not_count():
    assert numbers(Denominators.count(BATCH)) == (2.0, 5.0, 8.0)
    without_lengths = BatchedDataDict({key: value for key, value in BATCH.items() if key != "input_lengths"})
    assert numbers(Denominators.count(without_lengths)) == (2.0, 5.0, 10.0)


def test_sequences_of_all_ranks_count():
    two_ranks: Any = SimpleNamespace(sum=lambda own: 2 * own)
    assert numbers(Denominators.count(BATCH, two_ranks)) == (4.0, 10.0, 16.0)
