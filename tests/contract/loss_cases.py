"""The table the contract tests run over: for each registered loss, the settings worth certifying and a batch for it.

A loss that takes next-token logprobs joins by a row here; `test_every_loss_has_cases` fails until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
VOCAB = 13


@dataclass(frozen=True)
class LossCase:
    name: str  # in the registry
    label: str
    cfg: dict[str, Any]
    make_batch: Callable[[torch.Generator], Batch]
    differentiable: bool = True  # no stop-gradient: the gradient is the derivative of the value

    def __str__(self) -> str:
        return f"{self.name}-{self.label}"


def token_batch(generator: torch.Generator, rows: int = 6, length: int = 8) -> Batch:
    """Prompts of length 2, responses of various lengths, right padding, one sample masked out altogether."""
    ends = torch.tensor([8, 5, 8, 3, 6, 7])[:rows, None]
    position = torch.arange(length)
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[2] = 0
    return {
        "input_ids": torch.randint(VOCAB, (rows, length), generator=generator),
        "token_mask": ((position >= 2) & (position < ends)).double(),
        "sample_mask": sample_mask,
    }


def policy_batch(generator: torch.Generator) -> Batch:
    """Rollouts whose four policies differ by up to a nat or so, so that clips and truncations bite on some tokens."""
    batch = token_batch(generator)
    shape = batch["input_ids"].shape
    base = -2.5 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    for key, spread in {"prev_logprobs": 0.2, "generation_logprobs": 0.3, "reference_policy_logprobs": 0.5}.items():
        batch[key] = base + spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    batch["advantages"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    batch["rewards"] = torch.tensor([1.0, -1.0, 1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    return batch


def _clipped_pg(label: str, differentiable: bool = True, **cfg: Any) -> LossCase:
    return LossCase("clipped_pg", label, cfg, policy_batch, differentiable)


_NO_KL = {"reference_policy_kl_penalty": 0.0}
_GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}
_IS = {"use_importance_sampling_correction": True}


def _truncated(kind: str, low: float | None, high: float) -> dict[str, Any]:
    return _IS | {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


CASES = [
    LossCase("nll", "default", {}, token_batch),
    _clipped_pg("defaults", differentiable=False),  # the KL's score-function weight
    _clipped_pg("ppo", **_NO_KL),
    _clipped_pg("dapo", ratio_clip_min=0.1, ratio_clip_max=0.3, **_NO_KL),
    _clipped_pg("dual clip", ratio_clip_c=1.3, **_NO_KL),
    _clipped_pg("reinforce", disable_ppo_ratio=True, ratio_clip_c=3.0, **_NO_KL),
    _clipped_pg("sequence mean", token_level_loss=False, **_NO_KL),
    _clipped_pg("gspo", **_GSPO, **_NO_KL),
    _clipped_pg("gspo with correction", **_GSPO, **_IS, **_NO_KL),
    _clipped_pg("cispo", differentiable=False, use_cispo=True, **_NO_KL),
    _clipped_pg("forced on-policy", differentiable=False, force_on_policy_ratio=True, **_NO_KL),
    _clipped_pg("correction", **_IS, **_NO_KL),
    _clipped_pg("tis", **_truncated("tis", None, 1.2), **_NO_KL),
    _clipped_pg("icepop", **_truncated("icepop", 0.8, 1.2), **_NO_KL),
    _clipped_pg("seq-mask-tis", **_truncated("seq-mask-tis", 0.95, 1.05), **_NO_KL),
    _clipped_pg("k1", differentiable=False, reference_policy_kl_penalty=0.3, reference_policy_kl_type="k1"),
    _clipped_pg("k2", differentiable=False, reference_policy_kl_penalty=0.3, reference_policy_kl_type="k2"),
    _clipped_pg("k3 tight clamps", differentiable=False, reference_policy_kl_penalty=0.3, kl_input_clamp_value=0.4,
                kl_output_clamp_value=0.05),
    _clipped_pg("on-policy KL", use_on_policy_kl_approximation=True, reference_policy_kl_penalty=0.3),
    _clipped_pg("KL per sequence", differentiable=False, token_level_loss=False, reference_policy_kl_penalty=0.3),
    _clipped_pg("KL in reward", use_kl_in_reward=True, reference_policy_kl_penalty=0.3),
    _clipped_pg("positive NLL", positive_example_nll_weight=0.7, **_NO_KL),
    _clipped_pg("entropy bonus", entropy_coeff=0.1, **_NO_KL),
    _clipped_pg("entropy bonus per sequence", entropy_coeff=0.1, token_level_loss=False, **_NO_KL),
]  # fmt: skip
