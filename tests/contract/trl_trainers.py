"""What the comparisons with TRL share.

TRL computes its losses in methods of trainers. They are called on an object that has the attributes they read and
nothing else: no model, no tokenizer, no data set.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch

from tests.contract.loss_cases import policy_batch

EXACT = {"rtol": 1e-12, "atol": 1e-15}


def assert_equal(ours, theirs):
    """Of (value, gradients, …): the value and every gradient."""
    torch.testing.assert_close(ours[0], theirs[0], **EXACT)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


def one_process(model=None, **attributes):
    """What a trainer's method finds on `self` when it runs alone."""
    accelerator = SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    metrics = {"train": defaultdict(list)}
    model = model or SimpleNamespace(training=True)
    return SimpleNamespace(
        accelerator=accelerator, model=model, _metrics=metrics, aux_loss_enabled=False, _tp_size=1,
        _total_train_tokens=0, **attributes,
    )  # fmt: skip


def make_rollouts():
    """(batch, logprobs, entropy) in fp64: responses of unequal length, ratios from about 0.4 to 2.5."""
    generator = torch.Generator().manual_seed(0)
    batch = policy_batch(generator)
    batch["sample_mask"] = torch.ones_like(batch["sample_mask"])
    spread = 0.4 * torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64)
    entropy = torch.rand(spread[:, 1:].shape, generator=generator, dtype=torch.float64)
    return batch, (batch["prev_logprobs"] + spread)[:, 1:], entropy


def mask_of(batch):
    return (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]
