"""The table the contract tests run over: for each registered loss the settings worth certifying, a batch, an output.

A loss joins by a row in CASES; `test_every_loss_has_cases` fails until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_megatron.losses import ClippedPGLossConfig
from rl_megatron.losses.base import Loss

Batch = dict[str, Tensor]
Streams = dict[str, Tensor]
Counts = tuple[Tensor, Tensor]  # global_valid_seqs, global_valid_toks
VOCAB = 13


def token_logits(generator: torch.Generator, batch: Batch, vocab_size: int) -> Tensor:
    """[B, S, V], whose logprobs are near those of `policy_batch`."""
    return 0.5 * torch.randn(*batch["input_ids"].shape, vocab_size, generator=generator, dtype=torch.float64)


def plain_logprobs(loss: Loss, logits: Tensor, batch: Batch) -> Streams:
    """Next-token logprobs and entropy by log_softmax over the first VOCAB ids, for `plain_streams`."""
    temperature = batch["temperature"][:, None, None] if "temperature" in batch else 1.0
    log_p = (logits[:, :-1, :VOCAB] / temperature).log_softmax(-1)
    streams = {"next_token_logprobs": log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]}
    return streams | ({"next_token_entropy": -(log_p.exp() * log_p).sum(-1)} if loss.needs_entropy else {})


@dataclass(frozen=True)
class LossCase:
    """One row.

    name: in the registry. label: what is special about this row. cfg: the settings.
    make_batch(generator): six rows in fp64, of which at least one is masked as a sample.
    make_output(generator, batch, vocab_size): what the model gives for it, in fp64: logits [B, S, vocab_size], of which
        ids from VOCAB on are padding, or scores [B, S] or [B]. What a second model gives goes into the batch, under
        `outputs_in_batch`, laid out like the output.
    plain_streams(loss, output, batch): what `loss.read_output` makes of it, in plain torch, unmasked.
    gradient(batch, streams, counts): for a loss that stops gradients, the gradient of each stream that has one, in
        closed form; None where the gradient is the derivative of the value, which is then taken by finite differences.
    """

    name: str
    label: str
    cfg: dict[str, Any]
    make_batch: Callable[[torch.Generator], Batch]
    make_output: Callable[[torch.Generator, Batch, int], Tensor] = token_logits
    plain_streams: Callable[[Loss, Tensor, Batch], Streams] = plain_logprobs
    gradient: Callable[[Batch, Streams, Counts], Streams] | None = None
    outputs_in_batch: tuple[str, ...] = ()

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
    batch["covariance_mask"] = ((torch.arange(shape[0])[:, None] + torch.arange(shape[1])) % 3 == 0).double()
    return batch


def pair_batch(generator: torch.Generator) -> Batch:
    """Three pairs, of which one counts by half of its rows only, and so not at all; reference logprobs rolled by −1."""
    batch = token_batch(generator)
    noise = torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64)
    return batch | {"reference_policy_logprobs": -2.5 + 0.5 * noise}


def labelled_batch(generator: torch.Generator) -> Batch:
    """Answers of both labels, with what a global batch of them shares."""
    batch = pair_batch(generator)
    desirable = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    one = torch.ones_like(desirable)
    shared = {"reference_point": 0.3 * one, "num_desirable": (desirable * batch["sample_mask"]).sum() * one}
    return batch | {"desirable": desirable} | shared


def value_batch(generator: torch.Generator) -> Batch:
    batch = token_batch(generator)
    shape = batch["input_ids"].shape
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    returns = values + torch.randn(shape, generator=generator, dtype=torch.float64)
    return batch | {"values": values, "returns": returns}


def token_scores(generator: torch.Generator, batch: Batch, vocab_size: int) -> Tensor:
    """[B, S], near the old values where the batch has them."""
    noise = torch.randn(batch["input_ids"].shape, generator=generator, dtype=torch.float64)
    return torch.roll(batch["values"], -1, dims=1) + 0.5 * noise if "values" in batch else noise


def row_scores(generator: torch.Generator, batch: Batch, vocab_size: int) -> Tensor:
    return torch.randn(len(batch["input_ids"]), generator=generator, dtype=torch.float64)


def plain_values(loss: Loss, values: Tensor, batch: Batch) -> Streams:
    return {"next_token_values": values[:, :-1]}


def plain_rewards(loss: Loss, scores: Tensor, batch: Batch) -> Streams:
    """The score of each row's last token, or the row's own."""
    last = [max(t for t, counts in enumerate(row) if counts) for row in batch["token_mask"].tolist()]
    return {"rewards": scores if scores.dim() == 1 else torch.stack([s[t] for s, t in zip(scores, last, strict=True)])}


def policy_gradient(cfg: dict[str, Any]) -> Callable[[Batch, Streams, Counts], Streams]:
    """The gradient of the clipped policy gradient loss where it stops gradients, from the papers, token by token:

        m/N · ( w·slope of the surrogate + β·(k + dk/dlp)·[no clamp bites] )

    slope = −A·clip(r) for CISPO, −A where r is forced to 1, else −A·r, or 0 where the clipped branch is the larger one.
    w = π_prev/π_generation with the importance sampling correction, else 1. m/N is 1/N_tokens, or for a mean over
    sequences 1/(tokens of the sequence · N_sequences).
    """
    settings = ClippedPGLossConfig(**cfg)

    def gradient(batch: Batch, streams: Streams, counts: Counts) -> Streams:
        lp = streams["next_token_logprobs"].detach()
        names = ("advantages", "prev_logprobs", "reference_policy_logprobs")
        advantages, prev, reference = (batch[key][:, 1:] for key in names)
        mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        weight = mask / (counts[1] if settings.token_level_loss else mask.sum(1, keepdim=True).clamp(min=1) * counts[0])

        ratio = (lp - prev).exp()
        clipped = ratio.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
        slope = torch.where(-advantages * ratio >= -advantages * clipped, -advantages * ratio, 0.0)
        if settings.use_cispo:
            slope = -advantages * clipped
        if settings.force_on_policy_ratio:
            slope = -advantages
        if settings.use_importance_sampling_correction:
            slope = slope * (prev - batch["generation_logprobs"][:, 1:]).exp()

        x = reference - lp
        k, derivative = {
            "k1": (-x, torch.ones_like(x)),
            "k2": (x.square() / 2, -x),
            "k3": (x.exp() - 1 - x, 1 - x.exp()),
        }[settings.reference_policy_kl_type]
        clamped = (x.abs() > settings.kl_input_clamp_value) | (k.abs() > settings.kl_output_clamp_value)
        kl_slope = torch.where(clamped, 0.0, k + derivative)
        return {"next_token_logprobs": weight * (slope + settings.kl_coefficient * kl_slope)}

    return gradient


def distillation_batch(generator: torch.Generator) -> Batch:
    """A teacher that says its 4 favourite tokens at every position."""
    batch = token_batch(generator)
    shape = batch["input_ids"].shape
    batch["teacher_topk_indices"] = torch.rand(*shape, VOCAB, generator=generator).argsort(-1)[..., :4]
    batch["teacher_topk_logits"] = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    return batch


def plain_distillation(loss: Loss, logits: Tensor, batch: Batch) -> Streams:
    temperature = batch["temperature"][:, None, None] if "temperature" in batch else 1.0
    log_p = (logits[:, :-1, :VOCAB] / temperature).log_softmax(-1)
    student = log_p.gather(-1, batch["teacher_topk_indices"][:, :-1])
    return {
        "student_topk_logprobs": student if loss.cfg.zero_outside_topk else student.log_softmax(-1),
        "teacher_topk_logprobs": (batch["teacher_topk_logits"][:, :-1] / temperature).log_softmax(-1),
        **({"H_all": (log_p.exp() * log_p).sum(-1)} if loss.needs_entropy else {}),
        **({"next_token_logprobs": of_targets(log_p, batch)} if loss.cfg.nll_weight else {}),
    }


def of_targets(log_p: Tensor, batch: Batch) -> Tensor:
    return log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


def plain_full_distillation(loss: Loss, logits: Tensor, batch: Batch) -> Streams:
    """The student's position t against the teacher's, over all ids."""
    temperature = batch["temperature"][:, None, None] if "temperature" in batch else 1.0
    log_q, log_p = (
        (x[:, :-1, :VOCAB] / temperature).log_softmax(-1) for x in (logits, batch["teacher_logits"])
    )  # fmt: skip
    q, p, beta = log_q.exp(), log_p.exp(), loss.cfg.jsd_beta
    log_m = (beta * p + (1 - beta) * q).log()
    columns = {
        "forward_kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jensen_shannon": (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1),
    }
    used = [columns[name] for name in loss.metric_reductions if name in columns]
    return {
        "teacher_divergences": torch.stack(used, dim=-1),
        **({"next_token_logprobs": of_targets(log_q, batch)} if loss.cfg.nll_weight else {}),
    }


def draft_logits(generator: torch.Generator, batch: Batch, vocab_size: int) -> Tensor:
    """The draft's or the student's; the policy's or the teacher's go into the batch."""
    batch["teacher_logits"] = 4 * token_logits(generator, batch, vocab_size)
    return token_logits(generator, batch, vocab_size)


def plain_draft(loss: Loss, logits: Tensor, batch: Batch) -> Streams:
    """The draft's position t against the policy's t+1."""
    policy = batch["teacher_logits"][:, 1:, :VOCAB].softmax(-1)
    return {"draft_cross_entropy": -(policy * logits[:, :-1, :VOCAB].log_softmax(-1)).sum(-1)}


def _distillation(label: str, **cfg: Any) -> LossCase:
    return LossCase("distillation", label, cfg, distillation_batch, plain_streams=plain_distillation)


def _full_distillation(label: str, **cfg: Any) -> LossCase:
    return LossCase("full_distillation", label, cfg, token_batch, draft_logits, plain_full_distillation,
                    outputs_in_batch=("teacher_logits",))  # fmt: skip


def _clipped_pg(label: str, stops_gradients: bool = False, **cfg: Any) -> LossCase:
    return LossCase("clipped_pg", label, cfg, policy_batch, gradient=policy_gradient(cfg) if stops_gradients else None)


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
    _clipped_pg("defaults", stops_gradients=True),  # the KL's score-function weight
    _clipped_pg("ppo", **_NO_KL),
    _clipped_pg("dapo", ratio_clip_min=0.1, ratio_clip_max=0.3, **_NO_KL),
    _clipped_pg("dual clip", ratio_clip_c=1.3, **_NO_KL),
    _clipped_pg("reinforce", disable_ppo_ratio=True, ratio_clip_c=3.0, **_NO_KL),
    _clipped_pg("sequence mean", token_level_loss=False, **_NO_KL),
    _clipped_pg("fixed length", fixed_sequence_length=5.0, entropy_coeff=0.1, **_NO_KL),
    _clipped_pg("gspo", **_GSPO, **_NO_KL),
    _clipped_pg("gspo with correction", **_GSPO, **_IS, **_NO_KL),
    _clipped_pg("gspo with tis", **_GSPO, **_truncated("tis", 0.8, 1.2), **_NO_KL),
    _clipped_pg("gspo with icepop", **_GSPO, **_truncated("icepop", 0.8, 1.2), ratio_clip_c=1.1, **_NO_KL),
    _clipped_pg("cispo", stops_gradients=True, use_cispo=True, **_NO_KL),
    _clipped_pg("cispo with KL", stops_gradients=True, use_cispo=True, reference_policy_kl_penalty=0.3),
    _clipped_pg("cispo with correction", stops_gradients=True, use_cispo=True, **_IS, **_NO_KL),
    _clipped_pg("forced on-policy", stops_gradients=True, force_on_policy_ratio=True, **_NO_KL),
    _clipped_pg("forced on-policy with KL", stops_gradients=True, force_on_policy_ratio=True,
                reference_policy_kl_penalty=0.3, token_level_loss=False),
    _clipped_pg("reinforce with correction", disable_ppo_ratio=True, **_IS, **_NO_KL),
    _clipped_pg("correction", **_IS, **_NO_KL),
    _clipped_pg("tis", **_truncated("tis", None, 1.2), **_NO_KL),
    _clipped_pg("icepop", **_truncated("icepop", 0.8, 1.2), **_NO_KL),
    _clipped_pg("seq-mask-tis", **_truncated("seq-mask-tis", 0.95, 1.05), **_NO_KL),
    _clipped_pg("gmpo", token_level_loss=False, use_gmpo=True, **_NO_KL),
    _clipped_pg("gmpo with correction", token_level_loss=False, use_gmpo=True, **_IS, **_NO_KL),
    _clipped_pg("sapo", token_level_loss=False, use_sapo=True, **_NO_KL),
    _clipped_pg("sapo, temperatures", use_sapo=True, sapo_temperature_pos=2.0, sapo_temperature_neg=3.0, **_NO_KL),
    _clipped_pg("clip-cov", use_clip_cov=True, **_NO_KL),
    _clipped_pg("clip-cov with dual clip and correction", use_clip_cov=True, ratio_clip_c=1.3, **_IS, **_NO_KL),
    _clipped_pg("kl-cov", use_kl_cov=True, kl_cov_coef=0.7, **_NO_KL),
    _clipped_pg("kl-cov per sequence", use_kl_cov=True, token_level_loss=False, **_IS, **_NO_KL),
    _clipped_pg("geometric rejection", sequence_rejection_type="geometric", sequence_rejection_min=0.95,
                sequence_rejection_max=1.05, **_NO_KL),
    _clipped_pg("k3 rejection", sequence_rejection_type="k3", sequence_rejection_max=0.06, token_level_loss=False,
                **_truncated("tis", None, 1.2), **_NO_KL),
    _clipped_pg("token veto", token_veto_threshold=0.6, **_NO_KL),
    _clipped_pg("token veto and geometric rejection", token_veto_threshold=0.57, sequence_rejection_type="geometric",
                sequence_rejection_min=0.8, sequence_rejection_max=1.1, token_level_loss=False, **_IS, **_NO_KL),
    _clipped_pg("k1", stops_gradients=True, reference_policy_kl_penalty=0.3, reference_policy_kl_type="k1"),
    _clipped_pg("k2", stops_gradients=True, reference_policy_kl_penalty=0.3, reference_policy_kl_type="k2"),
    _clipped_pg("k3 tight clamps", stops_gradients=True, reference_policy_kl_penalty=0.3, kl_input_clamp_value=0.4,
                kl_output_clamp_value=0.05),
    _clipped_pg("on-policy KL", use_on_policy_kl_approximation=True, reference_policy_kl_penalty=0.3),
    _clipped_pg("KL per sequence", stops_gradients=True, token_level_loss=False, reference_policy_kl_penalty=0.3),
    _clipped_pg("KL in reward", use_kl_in_reward=True, reference_policy_kl_penalty=0.3),
    _clipped_pg("positive NLL", positive_example_nll_weight=0.7, **_NO_KL),
    _clipped_pg("entropy bonus", entropy_coeff=0.1, **_NO_KL),
    _clipped_pg("entropy bonus per sequence", entropy_coeff=0.1, token_level_loss=False, **_NO_KL),
    LossCase("preference", "scores of tokens", {}, token_batch, token_scores, plain_rewards),
    LossCase("preference", "scores of rows", {"beta": 0.5}, token_batch, row_scores, plain_rewards),
    LossCase("dpo", "default", {}, pair_batch),
    LossCase("dpo", "with SFT", {"reference_policy_kl_penalty": 0.2, "sft_loss_weight": 0.3}, pair_batch),
    LossCase("dpo", "averages", {"preference_average_log_probs": True, "sft_average_log_probs": True,
                                 "preference_loss_weight": 0.5, "sft_loss_weight": 2.0}, pair_batch),
    LossCase("ipo", "default", {}, pair_batch),
    LossCase("ipo", "averages", {"tau": 0.5, "preference_average_log_probs": True}, pair_batch),
    LossCase("kto", "default", {}, labelled_batch),
    LossCase("kto", "weights", {"beta": 0.7, "desirable_weight": 0.5, "undesirable_weight": 2.0}, labelled_batch),
    LossCase("simpo", "default", {}, pair_batch),
    LossCase("simpo", "with SFT", {"beta": 1.5, "gamma": 0.3, "sft_loss_weight": 0.5}, pair_batch),
    LossCase("cpo", "default", {}, pair_batch),
    LossCase("cpo", "averages", {"beta": 0.5, "sft_loss_weight": 0.3, "sft_average_log_probs": True}, pair_batch),
    LossCase("orpo", "default", {"beta": 0.7}, pair_batch),
    LossCase("mse_value", "default", {}, value_batch, token_scores, plain_values),
    LossCase("mse_value", "clipped", {"cliprange": 0.4, "scale": 0.5}, value_batch, token_scores, plain_values),
    _distillation("mixed"),
    _distillation("forward", kl_type="forward"),
    _distillation("reverse", kl_type="reverse"),
    _distillation("mixed, zero outside", zero_outside_topk=True, mixed_kl_weight=0.3),
    _distillation("forward, zero outside", zero_outside_topk=True, kl_type="forward"),
    _distillation("reverse, zero outside", zero_outside_topk=True, kl_type="reverse"),
    _distillation("jensen-shannon with NLL", kl_type="jensen_shannon", jsd_beta=0.3, nll_weight=0.4),
    _distillation("jensen-shannon, zero outside", kl_type="jensen_shannon", zero_outside_topk=True),
    _full_distillation("mixed"),
    _full_distillation("forward with NLL", kl_type="forward", nll_weight=0.4),
    _full_distillation("reverse", kl_type="reverse"),
    _full_distillation("jensen-shannon", kl_type="jensen_shannon", jsd_beta=0.3),
    LossCase("draft_cross_entropy", "default", {}, token_batch, draft_logits, plain_draft,
             outputs_in_batch=("teacher_logits",)),
]  # fmt: skip
