"""Computing common beginnings once changes neither a loss nor a gradient, in any layout."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from tests.parallel.layouts import MODEL, VOCAB_SIZE, build_policy, gradients, worst_relative_error

SETS, SAMPLES, WIDTH = 6, 4, 40


def tree_batch() -> BatchedDataDict:
    """Return samples of a few prompts. Some samples also begin alike, and one is the beginning of another."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB_SIZE, (SETS * SAMPLES, WIDTH), generator=generator)
    lengths = torch.randint(14, WIDTH + 1, (len(ids),), generator=generator)
    mask = torch.zeros(ids.shape)
    for first in range(0, len(ids), SAMPLES):
        prompt = 4 + first % 9
        ids[first : first + SAMPLES, :prompt] = ids[first, :prompt]
        ids[first + 2, : prompt + 7] = ids[first + 1, : prompt + 7]
        ids[first + 3, : lengths[first]] = ids[first, : lengths[first]]
        lengths[first + 3] = max(lengths[first], lengths[first + 3])
        mask[first : first + SAMPLES, prompt:] = 1
    mask[3, 6:12] = 0  # a token may count in one of the sequences that share it
    mask *= torch.arange(WIDTH) < lengths[:, None]
    return BatchedDataDict(
        {
            "input_ids": ids.where(torch.arange(WIDTH) < lengths[:, None], 0),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": (torch.arange(len(ids)) != 5).float(),
            "advantages": torch.randn(ids.shape, generator=generator),
            "generation_logprobs": -3 + torch.rand(ids.shape, generator=generator),
            "prev_logprobs": -3 + torch.rand(ids.shape, generator=generator),
            PREFIX_SET: torch.arange(len(ids)) // SAMPLES,
        }
    )


def one_step(parallel: dict, batching: Batching, model=MODEL):
    policy = build_policy(parallel, model, batching=batching)
    batch = tree_batch()
    logprobs = policy.get_logprobs(batch)["logprobs"]
    loss = build_loss("clipped_pg", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.0})
    plan = policy.plan(batch, loss)
    metrics = policy.accumulate_gradients(batch, loss)
    trees = [microbatch.tree for microbatch in plan.microbatches]
    return metrics, gradients(policy), logprobs, trees


@pytest.fixture(scope="session")
def one_process(ranks):
    return ranks.reference(one_step, {}, Batching("packed", tokens=160))


def assert_same(found, wanted):
    metrics, found_gradients, logprobs, trees = found
    assert all(tree is not None for tree in trees), "no prefix was shared"
    torch.testing.assert_close(logprobs, wanted[2], rtol=0, atol=1e-5)
    assert metrics == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    error, name = worst_relative_error(found_gradients, wanted[1])
    assert error <= 1e-4, name


LAYOUTS = [
    {},
    {"tensor": 2, "sequence": True},
    {"context": 2},
    {"context": 2, "tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2},
]


@pytest.mark.parametrize("kind", ["packed", "dynamic", "padded"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_shared_prefixes_change_no_value_and_no_gradient(ranks, one_process, parallel, kind):
    by_rank = ranks.run(4, one_step, parallel, Batching(kind, sequences=4, tokens=160, share_prefixes=True))
    assert_same(by_rank[0], one_process)
