"""Distillation: train a student towards a teacher's next-token distribution, given by the top-k or all logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import DistillationLossConfig, FullDistillationLossConfig
from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction
from rl_megatron.losses.functional import masked_mean
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.streams import require, require_integers, require_real

# The teacher's log-probability of a token outside its top-k. It replaces log 0.
LOG_INFINITESIMAL = -100.0


class DistillationLossDataDict(TypedDict):
    """The batch of `DistillationLossFn`.

    Attributes:
        input_ids: Token ids, [B, S].
        token_mask: Which tokens count, [B, S].
        sample_mask: Which samples count, [B].
        teacher_topk_logits: [B, S, K]. Entry t holds the teacher's K largest logits at position t, so it corresponds to
            token t+1. The last entry is not used.
        teacher_topk_indices: The token ids of teacher_topk_logits, [B, S, K].
        teacher_weights: [B, 1, n] The weight of each of n teachers in the divergence of a sequence. Each teacher then
            has K/n of the K logits. Without this key, there is one teacher.
        temperature: A number, [B] or [B, S]. The logits of both models are divided by it.
    """

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
    teacher_weights: NotRequired[Tensor]
    temperature: NotRequired[Tensor]


def weigh_terms(cfg: FullDistillationLossConfig) -> dict[str, float]:
    """Return the nonzero weights of a distillation loss's terms, by metric name."""
    forward = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.mixed_kl_weight}.get(cfg.kl_type)
    if forward is None:
        divergences = {"jensen_shannon": 1.0}
    else:
        divergences = {"forward_kl": forward, "reverse_kl": 1.0 - forward}
    weights = {name: (1.0 - cfg.nll_weight) * weight for name, weight in divergences.items()} | {"nll": cfg.nll_weight}
    return {name: weight for name, weight in weights.items() if weight}


@register_loss("distillation")
class DistillationLossFn(Loss):
    """The distillation loss, L = Σ_t m_t·((1−α)·D_t − α·log q(y_t)) / N_tokens, with D = w·KL(p‖q) + (1−w)·KL(q‖p).

    p is the teacher's and q the student's next-token distribution after token t:

        KL(p‖q) = Σ_k p·(log p − log q)        KL(q‖p) = Σ_k q·(log q − log p)

    The sums are over the teacher's top-k ids k, and both distributions are renormalised over these ids. w is
    mixed_kl_weight, or 1 for "forward" and 0 for "reverse". α is nll_weight. For "jensen_shannon", with β = jsd_beta:

        D = β·KL(p‖m) + (1−β)·KL(q‖m),  m = β·p + (1−β)·q

    With zero_outside_topk, q is the student's softmax over the whole vocabulary; outside the top-k, p is 0, and in
    KL(q‖p) log p counts as −100:

        KL(q‖p) = Σ_v q·log q − Σ_k q·log p + 100·(1 − Σ_k q)
        KL(q‖m) = Σ_k q·(log q − log m) − log(1−β)·(1 − Σ_k q)

    With several teachers (`teacher_weights`), each has its own ids k and its own D, and the loss uses the weighted sum
    of the D. One pass over the student's logits computes its logprobs at the ids of all teachers, its entropy and log
    q(y).

    Metrics: see `metric_reductions`. `forward_kl`, `reverse_kl`, `jensen_shannon` and `nll` are the means of the terms;
    a term whose weight is 0 is not reported.

    Shapes: student_topk_logprobs and teacher_topk_logprobs are [B, S-1, K] with K ≥ 1. H_all is [B, S-1], Σ_v q·log q
    (the negative entropy of the student); it is required if `needs_entropy` is true. next_token_logprobs is [B, S-1],
    required if nll_weight is above 0. All are in nats. Errors: see `Loss.evaluate`.

    If the top-k is the whole vocabulary, TRL's DistillationTrainer computes the same with beta 0 ("forward"), 1
    ("reverse") or jsd_beta ("jensen_shannon").

    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (arXiv:2306.13649). The renormalisation
    over the top-k and the term 100·(1 − Σ_k q) follow NeMo RL's DistillationLossFn.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    reads = "logprobs"
    input_names = ("student_topk_logprobs", "teacher_topk_logprobs")
    output_keys = ("teacher_topk_logits", "teacher_topk_indices")
    next_token_keys = frozenset(output_keys)

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(DistillationLossConfig, cfg)

    @property
    def _weights(self) -> dict[str, float]:
        return weigh_terms(self.cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table("loss", "num_valid_samples", *self._weights)

    @property
    def needs_entropy(self) -> bool:
        return self.cfg.zero_outside_topk and "reverse_kl" in self._weights

    def read_output(
        self, output: Tensor | DeferredLogits, data: Mapping[str, Any], sharding: Sharding
    ) -> dict[str, Tensor]:
        """Return both models' logprobs at the teacher's top-k ids, and H_all and log q(y) if this loss needs them."""
        input_ids = require_integers(data, "input_ids", self.display_name)
        teacher_logits, indices = self._teacher(data, input_ids)
        temperature = data.get("temperature", 1.0)
        stats = next_token_stats(
            output,
            input_ids.to(output.device),
            sharding,
            temperature=temperature,
            entropy=self.needs_entropy,
            gather_ids=indices[:, :-1].to(output.device),
            mask=self.mask(data).including_first.to(output.device),
            most_counted=sharding.most_counted,
        )
        student = stats.gathered
        assert student is not None  # because of gather_ids
        teacher_logits = teacher_logits[:, :-1].to(student) / _per_prediction(temperature, stats.logprobs)
        if not self.cfg.zero_outside_topk:
            student = self._by_teacher(student, data).log_softmax(dim=-1).flatten(-2)
        teacher = self._by_teacher(teacher_logits, data).log_softmax(dim=-1).flatten(-2)
        streams = {"student_topk_logprobs": student, "teacher_topk_logprobs": teacher}
        streams |= {"next_token_logprobs": stats.logprobs} if "nll" in self._weights else {}
        return streams | ({} if stats.entropy is None else {"H_all": -stats.entropy})

    def _teacher(self, data: Mapping[str, Any], input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Check the teacher's logits and ids, and return both, [B, S, K]."""
        name = self.display_name
        logits = require_real(require(data, "teacher_topk_logits", name), "data['teacher_topk_logits']", name)
        indices = require_integers(data, "teacher_topk_indices", name)
        if indices.shape != logits.shape or logits.shape[:-1] != input_ids.shape or logits.shape[-1] == 0:
            raise ValueError(
                f"{self.display_name}: teacher_topk_logits {tuple(logits.shape)} and teacher_topk_indices "
                f"{tuple(indices.shape)} must both be [B, S, K] with the same K ≥ 1 for input_ids "
                f"{tuple(input_ids.shape)}"
            )
        return logits, indices

    def _by_teacher(self, stream: Tensor, data: Mapping[str, Any]) -> Tensor:
        """Return a stream [B, S-1, K] of n teachers as [B, S-1, n, K/n]."""
        num_teachers = data["teacher_weights"].size(-1) if "teacher_weights" in data else 1
        if stream.size(-1) % num_teachers:
            raise ValueError(
                f"{self.display_name}: teacher_weights {tuple(data['teacher_weights'].shape)} has {num_teachers} "
                f"teachers, so K of teacher_topk_logits, {stream.size(-1)}, must be a multiple of {num_teachers}"
            )
        return stream.unflatten(-1, (num_teachers, -1))

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        student_topk_logprobs: Shaped[Tensor, "batch tokens ids"],
        teacher_topk_logprobs: Shaped[Tensor, "batch tokens ids"],
        H_all: Shaped[Tensor, "batch tokens"] | None = None,
        next_token_logprobs: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the loss and its metrics from both models' logprobs at the teacher's top-k ids.

        Raises:
            ValueError: The shapes differ, or H_all or next_token_logprobs is needed but None. See also
                `Loss.evaluate`.
        """
        streams = self.streams(data, student_topk_logprobs)
        student = streams.select("student_topk_logprobs", student_topk_logprobs, trailing=1)
        teacher = streams.select("teacher_topk_logprobs", teacher_topk_logprobs, trailing=1)
        if teacher.shape != student.shape:
            raise ValueError(
                f"{self.display_name}: student_topk_logprobs {tuple(student.shape)} and teacher_topk_logprobs "
                f"{tuple(teacher.shape)} must both be [B, S-1, K] with the same K"
            )
        negative_entropy = None
        if self.needs_entropy:
            if H_all is None:
                raise ValueError(f"{self.display_name}: zero_outside_topk=True with a reverse KL needs H_all")
            negative_entropy = streams.select("H_all", H_all)[..., None]
        student, teacher = self._by_teacher(student, data), self._by_teacher(teacher, data)
        token_mean = partial(masked_mean, mask=streams.mask, global_normalization_factor=global_valid_toks)

        terms: dict[str, Tensor] = {}
        if "forward_kl" in self._weights:
            terms["forward_kl"] = forward_kl(student, teacher)
        if "reverse_kl" in self._weights:
            if negative_entropy is None:
                terms["reverse_kl"] = reverse_kl(student, teacher)
            else:
                terms["reverse_kl"] = reverse_kl_with_rest(student, teacher, negative_entropy)
        if "jensen_shannon" in self._weights:
            terms["jensen_shannon"] = jensen_shannon(student, teacher, self.cfg.jsd_beta, self.cfg.zero_outside_topk)
        weights = data["teacher_weights"].to(student) if "teacher_weights" in data else student.new_ones(1)
        terms = {name: (weights * by_teacher).sum(dim=-1) for name, by_teacher in terms.items()}
        if "nll" in self._weights:
            if next_token_logprobs is None:
                raise ValueError(f"{self.display_name}: nll_weight={self.cfg.nll_weight} needs next_token_logprobs")
            terms["nll"] = -streams.select("next_token_logprobs", next_token_logprobs)
        means = {name: token_mean(term) for name, term in terms.items()}
        loss = sum((weight * means[name] for name, weight in self._weights.items()), streams.mask.new_zeros(()))
        return loss, {
            "loss": loss.detach(),
            "num_valid_samples": streams.sample_mask.sum(),
            **{name: mean.detach() for name, mean in means.items()},
        }


def forward_kl(student: Float[Tensor, "*shape ids"], teacher: Float[Tensor, "*shape ids"]) -> Float[Tensor, "*shape"]:
    """Return Σ_k p·(log p − log q), from log q and log p [..., K]."""
    return _expectation(teacher, teacher - student)


def reverse_kl(student: Float[Tensor, "*shape ids"], teacher: Float[Tensor, "*shape ids"]) -> Float[Tensor, "*shape"]:
    """Return Σ_k q·(log q − log p), from log q and log p [..., K]."""
    return _expectation(student, student - teacher)


def reverse_kl_with_rest(
    student: Float[Tensor, "*shape ids"],
    teacher: Float[Tensor, "*shape ids"],
    negative_entropy: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return Σ_v q·log q − Σ_k q·log p + 100·(1 − Σ_k q), from log q and log p [..., K] and Σ_v q·log q [...].

    It is the reverse KL over the whole vocabulary, with −100 as the teacher's log p outside the top-k.
    """
    rest = 1.0 - student.exp().sum(dim=-1)
    return negative_entropy - _expectation(student, teacher) - LOG_INFINITESIMAL * rest


def jensen_shannon(
    student: Float[Tensor, "*shape ids"], teacher: Float[Tensor, "*shape ids"], beta: float, with_rest: bool = False
) -> Float[Tensor, "*shape"]:
    """Return β·KL(p‖m) + (1−β)·KL(q‖m) with m = β·p + (1−β)·q, from log q and log p [..., K].

    Args:
        student: log q.
        teacher: log p.
        beta: The teacher's weight β in m.
        with_rest: Whether q has probability outside the K ids, where p is 0 and m is (1−β)·q.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    student_kl = _expectation(student, student - mixture)
    if with_rest:
        student_kl = student_kl - math.log1p(-beta) * (1.0 - student.exp().sum(dim=-1))
    return beta * _expectation(teacher, teacher - mixture) + (1 - beta) * student_kl


def _expectation(logprobs: Tensor, values: Tensor) -> Tensor:
    """Return Σ_k p·v over [..., K]. An id with probability 0 adds 0, even if its v is infinite."""
    return (logprobs.exp() * torch.where(logprobs == -torch.inf, 0.0, values)).sum(dim=-1)


def _per_prediction(temperature: float | Tensor, like: Tensor) -> float | Tensor:
    """Return the temperature of each prediction as [B, S-1, 1], or unchanged if it is a scalar.

    The temperature is a number, [B], or [B, S] aligned with input_ids.
    """
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return temperature
    per_token = temperature[:, None] if temperature.dim() == 1 else temperature
    return per_token.expand(like.shape[0], like.shape[1] + 1)[:, 1:, None].to(like)
