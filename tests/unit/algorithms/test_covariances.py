"""Tests of the selection of tokens by covariance, against the authors' definition on all tokens at once."""

import pytest
import torch

from rl_megatron.algorithms.covariances import add_covariance_mask, find_largest, select_tokens
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import ClippedPGLossConfig, build_loss
from rl_megatron.topology.reductions import ALONE
from tests.unit.algorithms.fakes import whole

KL_COV = {"use_kl_cov": True, "kl_cov_ratio": 0.1}
CLIP_COV = {"use_clip_cov": True, "clip_cov_ratio": 0.1, "clip_cov_min": 0.2, "clip_cov_max": 1.5}


def rollouts(seed: int = 0) -> BatchedDataDict:
    """Return eight sequences with tokens that do not count; one sequence failed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 4, 12, 7, 12, 5, 3, 8])
    place = torch.arange(12)
    mask = ((place >= 2) & (place < lengths[:, None])).float()
    sample_mask = torch.ones(8)
    sample_mask[4] = 0
    streams = {key: torch.randn(8, 12, generator=generator) for key in ("advantages", "prev_logprobs")}
    streams = {key: torch.where(mask != 0, values, 1e6) for key, values in streams.items()}
    return BatchedDataDict(token_mask=mask, sample_mask=sample_mask, **streams)


def covariances(batch: BatchedDataDict) -> tuple[torch.Tensor, torch.Tensor]:
    counts = batch["token_mask"] * batch["sample_mask"][:, None] != 0
    centred = [batch[key] - batch[key][counts].mean() for key in ("advantages", "prev_logprobs")]
    return torch.where(counts, centred[0] * centred[1], -torch.inf), counts


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_selects_the_share_of_tokens_with_the_highest_covariances(seed):
    batch = rollouts(seed)
    found = select_tokens(whole(batch), ClippedPGLossConfig(**KL_COV), seed=1)
    covariance, counts = covariances(batch)
    wanted = torch.zeros(covariance.numel())
    wanted[covariance.flatten().topk(int(0.1 * counts.sum())).indices] = 1
    assert torch.equal(found.flatten(), wanted) and found.sum() == 3


def test_clip_cov_draws_its_share_of_tokens_between_the_bounds():
    batch = rollouts()
    covariance, counts = covariances(batch)
    candidates = (covariance > 0.2) & (covariance < 1.5)
    drawn = [select_tokens(whole(batch), ClippedPGLossConfig(**CLIP_COV), seed) != 0 for seed in range(200)]
    assert all(found.sum() == int(0.1 * counts.sum()) and not (found & ~candidates).any() for found in drawn)
    shares = torch.stack(drawn).float().mean(0)[candidates]
    expected = 3 / candidates.sum()
    assert ((shares - expected).abs() < 5 * (expected / 200) ** 0.5).all(), "every candidate is as likely as the others"


def test_clip_cov_leaves_out_all_candidates_if_there_are_fewer_than_its_share():
    batch = rollouts()
    covariance, _ = covariances(batch)
    cfg = ClippedPGLossConfig(**CLIP_COV | {"clip_cov_ratio": 0.9})
    assert torch.equal(select_tokens(whole(batch), cfg, seed=1) != 0, (covariance > 0.2) & (covariance < 1.5))
    nothing = ClippedPGLossConfig(**CLIP_COV | {"clip_cov_min": 90.0, "clip_cov_max": 99.0})
    assert select_tokens(whole(batch), nothing, seed=1).sum() == 0


def test_at_least_one_token_is_selected_unless_none_counts():
    batch = rollouts()
    cfg = ClippedPGLossConfig(use_kl_cov=True, kl_cov_ratio=1e-6)
    assert select_tokens(whole(batch), cfg, seed=1).sum() == 1
    batch["sample_mask"] = torch.zeros(8)
    assert select_tokens(whole(batch), cfg, seed=1).sum() == 0


def test_of_equal_values_the_earlier_tokens_are_the_largest():
    values, sequences = torch.tensor([1.0, 5.0, 2.0, 2.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    for count, wanted in [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])]:
        assert find_largest(values, sequences, count, ALONE).nonzero().flatten().tolist() == wanted


def test_a_loss_without_covariances_gets_no_mask():
    assert "covariance_mask" not in add_covariance_mask(whole(rollouts()), build_loss("clipped_pg", {}), seed=1)
    assert "covariance_mask" in add_covariance_mask(whole(rollouts()), build_loss("clipped_pg", KL_COV), seed=1)
