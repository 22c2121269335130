"""Distillation: the student's next-token distribution drawn to a teacher's, which is known by its top-k logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats
from rl_megatron.losses.base import Loss, accepts_deferred_logits
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction
from rl_megatron.losses.functional import masked_mean
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.settings import check_types, parse_settings
from rl_megatron.losses.streams import real, require, require_integers

KL_TYPES = ("forward", "reverse", "mixed")
# What stands for log 0 where the teacher says nothing: log-probability of a token outside its top-k.
LOG_INFINITESIMAL = -100.0


class DistillationLossDataDict(TypedDict):
    """The batch. teacher_topk_logits, teacher_topk_indices [B, S, K]: entry t holds the teacher's logits at position t
    and their ids, so it speaks of token t+1, and the last entry is not used. temperature (a number, [B] or [B, S])
    divides the logits of both models."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
    temperature: NotRequired[Tensor]


@dataclass(frozen=True)
class DistillationLossConfig:
    """Key names and meanings follow NeMo RL.

    kl_type: "forward", KL(teacher‖student), covers what the teacher finds likely; "reverse", KL(student‖teacher),
        avoids what it finds unlikely; "mixed", both.
    mixed_kl_weight: in [0, 1], the weight of the forward KL in the mix.
    zero_outside_topk: the student keeps its probabilities over the whole vocabulary, where the teacher has none outside
        its top-k; False: both are renormalised over the teacher's top-k.
    """

    kl_type: str = "mixed"
    mixed_kl_weight: float = 0.5
    zero_outside_topk: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.kl_type not in KL_TYPES:
            raise ValueError(f"kl_type={self.kl_type!r} is none of {KL_TYPES}")
        if not 0 <= self.mixed_kl_weight <= 1:
            raise ValueError(
                f"mixed_kl_weight={self.mixed_kl_weight} must lie in [0, 1]: it is the forward KL's share, the reverse "
                "KL has the rest"
            )


@register_loss("distillation")
class DistillationLossFn(Loss):
    """L = Σ_t m_t·(w·KL(p‖q) + (1−w)·KL(q‖p))_t / N_tokens, with p the teacher and q the student after token t:

        KL(p‖q) = Σ_k p·(log p − log q)        KL(q‖p) = Σ_k q·(log q − log p)

    over the teacher's top-k ids k, both renormalised over them. w = mixed_kl_weight, or 1 and 0 for "forward" and
    "reverse". With zero_outside_topk q is the student's softmax over the whole vocabulary, p is 0 outside the top-k,
    and log p counts as −100 there:

        KL(q‖p) = Σ_v q·log q − Σ_k q·log p + 100·(1 − Σ_k q)

    The student is read as its logprobs at k and its entropy, in one pass over its logits.

    Metrics: those of `metric_reductions`; `forward_kl` and `reverse_kl` are the means of the two terms, present where
    their weight is not 0.

    Shapes: student_topk_logprobs, teacher_topk_logprobs [B, S-1, K]; H_all [B, S-1] = Σ_v q·log q, minus the student's
        entropy, needed where `needs_entropy`. K ≥ 1.
    Units: nats. Raises: see `Loss.evaluate`.
    TRL's DistillationTrainer computes the same with beta 0 ("forward") and 1 ("reverse") where the top k is the whole
    vocabulary; between them its beta mixes the distributions (Jensen-Shannon), mixed_kl_weight the divergences.
    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (arXiv:2306.13649); top-k renormalisation
        and the rest term as in NeMo RL's DistillationLossFn.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    input_names = ("student_topk_logprobs", "teacher_topk_logprobs")
    output_keys = ("teacher_topk_logits", "teacher_topk_indices")
    next_token_keys = frozenset(output_keys)

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = parse_settings(DistillationLossConfig, cfg)

    @property
    def _weights(self) -> dict[str, float]:
        """The weight of each divergence whose weight is not 0."""
        forward = {"forward": 1.0, "reverse": 0.0, "mixed": self.cfg.mixed_kl_weight}[self.cfg.kl_type]
        return {name: weight for name, weight in {"forward_kl": forward, "reverse_kl": 1.0 - forward}.items() if weight}

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table("loss", "num_valid_samples", *self._weights)

    @property
    def needs_entropy(self) -> bool:
        """Whether `evaluate` wants H_all."""
        return self.cfg.zero_outside_topk and "reverse_kl" in self._weights

    @accepts_deferred_logits
    def read_output(
        self, output: Tensor | DeferredLogits, data: Mapping[str, Any], sharding: Sharding
    ) -> dict[str, Tensor]:
        input_ids = require_integers(data, "input_ids", self.display_name)
        teacher_logits, indices = self._teacher(data, input_ids)
        temperature = data["temperature"] if "temperature" in data else 1.0
        stats = next_token_stats(
            output,
            input_ids.to(output.device),
            sharding,
            temperature=temperature,
            entropy=self.needs_entropy,
            gather_ids=indices[:, :-1].to(output.device),
            mask=self.mask(data).including_first.to(output.device),
        )
        student = stats.gathered
        assert student is not None  # ids to gather were given
        teacher_logits = teacher_logits[:, :-1].to(student) / _per_prediction(temperature, stats.logprobs)
        if not self.cfg.zero_outside_topk:
            student = student.log_softmax(dim=-1)
        streams = {"student_topk_logprobs": student, "teacher_topk_logprobs": teacher_logits.log_softmax(dim=-1)}
        return streams | ({} if stats.entropy is None else {"H_all": -stats.entropy})

    def _teacher(self, data: Mapping[str, Any], input_ids: Tensor) -> tuple[Tensor, Tensor]:
        name = self.display_name
        logits = real(require(data, "teacher_topk_logits", name), "data['teacher_topk_logits']", name)
        indices = require_integers(data, "teacher_topk_indices", name)
        if indices.shape != logits.shape or logits.shape[:-1] != input_ids.shape or logits.shape[-1] == 0:
            raise ValueError(
                f"{self.display_name}: teacher_topk_logits {tuple(logits.shape)} and teacher_topk_indices "
                f"{tuple(indices.shape)} must both be [B, S, K] with one K ≥ 1, for input_ids {tuple(input_ids.shape)}"
            )
        return logits, indices

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        student_topk_logprobs: Shaped[Tensor, "batch tokens ids"],
        teacher_topk_logprobs: Shaped[Tensor, "batch tokens ids"],
        H_all: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        streams = self.streams(data, student_topk_logprobs)
        student = streams.select("student_topk_logprobs", student_topk_logprobs, trailing=1)
        teacher = streams.select("teacher_topk_logprobs", teacher_topk_logprobs, trailing=1)
        if teacher.shape != student.shape:
            raise ValueError(
                f"{self.display_name}: student_topk_logprobs {tuple(student.shape)} and teacher_topk_logprobs "
                f"{tuple(teacher.shape)} must both be [B, S-1, K] with one K"
            )
        negative_entropy = None
        if self.needs_entropy:
            if H_all is None:
                raise ValueError(f"{self.display_name}: zero_outside_topk=True with a reverse KL needs H_all")
            negative_entropy = streams.select("H_all", H_all)
        token_mean = partial(masked_mean, mask=streams.mask, global_normalization_factor=global_valid_toks)

        kls: dict[str, Tensor] = {}
        if "forward_kl" in self._weights:
            kls["forward_kl"] = token_mean(forward_kl(student, teacher))
        if "reverse_kl" in self._weights:
            if negative_entropy is None:
                kls["reverse_kl"] = token_mean(reverse_kl(student, teacher))
            else:
                kls["reverse_kl"] = token_mean(reverse_kl_with_rest(student, teacher, negative_entropy))
        loss = sum((weight * kls[name] for name, weight in self._weights.items()), streams.mask.new_zeros(()))
        return loss, {
            "loss": loss.detach(),
            "num_valid_samples": streams.sample_mask.sum(),
            **{name: kl.detach() for name, kl in kls.items()},
        }


def forward_kl(
    student: Float[Tensor, "*shape ids"], teacher: Float[Tensor, "*shape ids"]
) -> Float[Tensor, "*shape"]:
    """Return Σ_k p·(log p − log q), from log q and log p [..., K]."""
    return _expectation(teacher, teacher - student)


def reverse_kl(
    student: Float[Tensor, "*shape ids"], teacher: Float[Tensor, "*shape ids"]
) -> Float[Tensor, "*shape"]:
    """Return Σ_k q·(log q − log p), from log q and log p [..., K]."""
    return _expectation(student, student - teacher)


def reverse_kl_with_rest(
    student: Float[Tensor, "*shape ids"],
    teacher: Float[Tensor, "*shape ids"],
    negative_entropy: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return Σ_v q·log q − Σ_k q·log p + 100·(1 − Σ_k q), from log q and log p [..., K] and Σ_v q·log q [...].

    It is the reverse KL over the whole vocabulary if the teacher's log p is −100 outside the top-k.
    """
    rest = 1.0 - student.exp().sum(dim=-1)
    return negative_entropy - _expectation(student, teacher) - LOG_INFINITESIMAL * rest


def _expectation(logprobs: Tensor, values: Tensor) -> Tensor:
    """Return Σ_k p·v over [..., K]; what has probability 0 adds 0, however infinite v is there."""
    return (logprobs.exp() * torch.where(logprobs == -torch.inf, 0.0, values)).sum(dim=-1)


def _per_prediction(temperature: float | Tensor, like: Tensor) -> float | Tensor:
    """A number, [B] or [B, S] aligned with input_ids → a number or [B, S-1, 1] aligned with predictions [B, S-1]."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return temperature
    per_token = temperature[:, None] if temperature.dim() == 1 else temperature
    return per_token.expand(like.shape[0], like.shape[1] + 1)[:, 1:, None].to(like)
