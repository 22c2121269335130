"""A step of KTO in layouts of two and four ranks, packed or padded, equals that of one process."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.algorithms.kto import add_reference_point
from rl_megatron.batching.config import Batching
from rl_megatron.losses import KTOLossFn, NLLLoss
from tests.parallel.layouts import build_policy, gradients, weights, worst_relative_error
from tests.parallel.test_layouts import GRADIENT_TOLERANCE, LAYOUTS, LOSS_TOLERANCE, random_batch

WHOLE, PADDED, PACKED = Batching(sequences=16), Batching(sequences=3), Batching("packed", tokens=64)


def kto_step(parallel: dict, batching: Batching):
    """Return the metrics, gradient and weights of a step of KTO, with a reference that the policy has left."""
    policy = build_policy(parallel, batching=batching)
    policy.freeze_reference()
    batch = random_batch(10, 20, 0)
    policy.train(batch, NLLLoss(), gbs=batch.size)
    batch["desirable"] = (torch.arange(10) % 3 != 0).float()
    batch["sample_mask"][5] = 0.0
    batch = add_reference_point(batch, policy, pad_id=0, max_length=20, ranks=policy.topology.ranks)
    loss_fn = KTOLossFn({"beta": 0.5, "undesirable_weight": 1.5})
    policy.accumulate_gradients(batch, loss_fn)
    gradient = gradients(policy)
    return policy.train(batch, loss_fn, gbs=batch.size), gradient, weights(policy)


@pytest.mark.parametrize(
    ("layout", "batching"),
    [
        ("tensor 2 sequence", PADDED),
        ("data 2", PADDED),
        ("data 2", PACKED),
        ("context 2", PACKED),
        ("pipeline 2 data 2", PADDED),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_loss_metrics_and_every_gradient_equal_one_process(ranks, layout, batching):
    size, parallel = LAYOUTS[layout]
    wanted = ranks.reference(kto_step, {}, WHOLE)
    found = ranks.run(size, kto_step, parallel, batching)[0]
    assert wanted[0]["reference_point"] > 0.01 and wanted[0]["rewards_desirable_mean"] > 0.01
    for name in wanted[0].keys() - {"packing_efficiency"}:  # it depends on the microbatches
        assert found[0][name] == pytest.approx(wanted[0][name], rel=10 * LOSS_TOLERANCE, abs=1e-6), name
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        error, name = worst_relative_error(ours, theirs)
        assert error <= GRADIENT_TOLERANCE, (name, error)
