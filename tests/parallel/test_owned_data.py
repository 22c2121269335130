"""Training data of which each rank reads its part only: what a policy learns from it is what one process learns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_megatron.data.batch import BatchedDataDict, Padding, span_mask
from rl_megatron.data.training_data import build_in_memory_loader
from rl_megatron.losses import build_loss
from rl_megatron.runs.stage import Stage
from tests.parallel.layouts import VOCAB_SIZE, build_policy, weights, worst_relative_error
from tests.parallel.test_sharded_algorithms import LAYOUTS

GLOBAL_BATCH_SIZE, NUM_STEPS, TOLERANCE = 16, 2, 1e-4


class Sequences:
    """Items of one or two sequences of random tokens, which count how many of them became batches."""

    def __init__(self, group_size: int):
        self.group_size, self.num_built = group_size, 0

    def __len__(self) -> int:
        return 40

    def batch(self, items: list[int]) -> BatchedDataDict:
        self.num_built += len(items)
        sequences = []
        for index in (item * self.group_size + each for item in items for each in range(self.group_size)):
            generator = torch.Generator().manual_seed(index)
            length = int(torch.randint(3, 20, (1,), generator=generator))
            sequences.append(torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist())
        batch = Padding(pad_id=0, multiple=1).collate(sequences)
        ends = batch["input_lengths"]
        batch["token_mask"] = span_mask(torch.ones_like(ends), ends, batch["input_ids"].size(1))
        return batch


def learned(parallel: dict, loss: str) -> tuple[dict[str, torch.Tensor], list[int], list[list[int]], int]:
    """Train some steps.

    Returns:
        The weights, how many items this rank made batches of, the sequences that it owned in each step, and the
        number of ranks that share a batch.
    """
    policy, loss_fn = build_policy(parallel, global_batch_size=GLOBAL_BATCH_SIZE), build_loss(loss, {})
    items = Sequences(getattr(loss_fn, "group_size", 1))
    train = SimpleNamespace(global_batch_size=GLOBAL_BATCH_SIZE, seed=3, share_prefixes="off")
    stage = SimpleNamespace(
        policy=policy, config=SimpleNamespace(train=train), use_loader=lambda loader: None,
        batch_number=lambda step: step, steps=lambda: range(1, NUM_STEPS + 1),
    )  # fmt: skip
    built, numbers = [], []
    for _, batch in Stage.batches(stage, build_in_memory_loader(items, train)):
        policy.train(batch, loss_fn, gbs=GLOBAL_BATCH_SIZE)
        built.append(items.num_built - sum(built))
        numbers.append(batch.numbers.tolist())
    return weights(policy), built, numbers, policy.topology.data


@pytest.mark.parametrize("loss", ["nll", "simpo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_reads_its_part_and_learns_what_one_process_does(ranks, layout, loss):
    wanted, all_items, all_numbers, _ = ranks.reference(learned, {}, loss)
    by_rank = ranks.run(LAYOUTS[layout][0], learned, LAYOUTS[layout][1], loss)
    assert worst_relative_error(by_rank[0][0], wanted)[0] < TOLERANCE
    for _, built, numbers, data in by_rank:
        assert all(-(-whole // data) >= part for whole, part in zip(all_items, built, strict=True))
        assert all(len(own) <= -(-len(whole) // data) + 1 for whole, own in zip(all_numbers, numbers, strict=True))
    for step, whole in enumerate(all_numbers):
        owned = {number for _, _, numbers, _ in by_rank for number in numbers[step]}
        assert owned == set(whole) == set(range(GLOBAL_BATCH_SIZE))
