"""A first update without `prev_logprobs` is the one with the policy's own, in every layout, packed or padded."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from tests.parallel.layouts import VOCAB_SIZE, build_policy, gradients, worst_relative_error

LOSSES = {
    "grpo": {"reference_policy_kl_penalty": 0.05},
    "corrected": {
        "reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.02,
    },
    "gspo": {
        "reference_policy_kl_penalty": 0.0, "sequence_level_importance_ratios": True, "token_level_loss": False,
    },
    "cispo": {"reference_policy_kl_penalty": 0.0, "use_cispo": True},
}  # fmt: skip
KINDS = (Batching("padded", sequences=3), Batching("packed", tokens=40))
MISMATCH = ("mismatch_mean", "mismatch_max", "gen_kl_error", "token_mult_prob_error", "sampling_importance_ratio")
LAYOUTS = [
    (2, {"tensor": 2, "sequence": True}), (2, {"pipeline": 2}), (2, {"context": 2}), (2, {}),
    (4, {"tensor": 2, "pipeline": 2}),
]  # fmt: skip


def rollouts() -> BatchedDataDict:
    """Return ten random sequences with the keys of a rollout. One is masked, as a sample."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(5, 19, (10,), generator=generator)
    positions = torch.arange(int(lengths.max()))
    mask = ((positions >= 3) & (positions < lengths[:, None])).float()
    shape = mask.shape
    return BatchedDataDict(
        input_ids=torch.randint(0, VOCAB_SIZE, shape, generator=generator),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.tensor([1.0] * 4 + [0.0] + [1.0] * 5),
        advantages=torch.randn(shape, generator=generator) * mask,
        reference_policy_logprobs=-3.0 + torch.randn(shape, generator=generator),
        temperature=torch.full((10,), 0.8),
    )


def first_updates(parallel: dict) -> dict[tuple[str, str, bool], tuple[dict, dict]]:
    """Return (metrics, gradients) by loss, kind of batching and whether `prev_logprobs` were recomputed, on rank 0."""
    policy, batch = build_policy(parallel), rollouts()
    own = policy.get_logprobs(batch)["logprobs"]
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(8))
    batch["generation_logprobs"] = own + 0.03 * noise
    found = {}
    for name, settings in LOSSES.items():
        for policy.batching in KINDS:
            for recomputed in (True, False):
                given = BatchedDataDict(dict(batch) | ({"prev_logprobs": own} if recomputed else {}))
                report = policy.accumulate_gradients(given, build_loss("clipped_pg", settings))
                found[name, policy.batching.kind, recomputed] = report, gradients(policy)
    return found


@pytest.mark.parametrize(("world_size", "parallel"), [(1, {}), *LAYOUTS], ids=str)
def test_the_gradient_is_that_of_recomputed_logprobs_in_one_process(ranks, world_size, parallel):
    wanted = ranks.reference(first_updates, {})
    found = ranks.run(world_size, first_updates, parallel)[0]
    for name in LOSSES:
        for kind in ("padded", "packed"):
            report, gradient = found[name, kind, False]
            of_recomputed, reference = wanted[name, "padded", True]
            error, where = worst_relative_error(gradient, reference)
            assert error < 2e-5, (name, kind, where)
            assert report["loss"] == pytest.approx(of_recomputed["loss"], rel=1e-5, abs=1e-7)
            assert report["probs_ratio_min"] == report["probs_ratio_max"] == 1.0
            assert report["clip_fraction"] == 0.0
            for metric in MISMATCH:
                assert report[metric] == pytest.approx(of_recomputed[metric], rel=1e-3, abs=1e-6), (name, kind, metric)
            assert report["mismatch_max"] > 0.03


CORRECTED = {"disable_ppo_ratio": True, "use_importance_sampling_correction": True}


def trained(settings: dict, options: dict) -> str:
    """Return what an update without `prev_logprobs` says."""
    policy = build_policy({})
    try:
        policy.train(rollouts(), build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0} | settings), **options)
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({}, {"gbs": 10}, "ClippedPGLossFn needs 'prev_logprobs', which the batch does not have"),
        ({}, {"gbs": 4, "on_policy": True}, "needs 'prev_logprobs', because only the first of 3"),
        ({}, {"sizes": [4, 6], "on_policy": True}, "needs 'prev_logprobs', because only the first of 2"),
        ({}, {"gbs": 10, "on_policy": True}, "trained"),
        ({"disable_ppo_ratio": True}, {"gbs": 4}, "trained"),
        (CORRECTED, {"gbs": 10}, "ClippedPGLossFn needs 'prev_logprobs', which the batch does not have"),
        ({"force_on_policy_ratio": True}, {"gbs": 4}, "trained"),
    ],
    ids=["not said", "several steps", "several sizes", "on-policy", "REINFORCE", "corrected", "forced"],
)
def test_prev_logprobs_are_left_out_only_where_it_is_said_and_for_one_step(ranks, settings, options, said):
    assert said in ranks.run(1, trained, settings, options)[0]
