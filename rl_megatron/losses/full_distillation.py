"""Distillation over the whole vocabulary, from a teacher's logits that are sharded like the student's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import FullDistillationLossConfig
from rl_megatron.logprobs import IGNORE_INDEX, DeferredLogits, Sharding, teacher_divergences
from rl_megatron.logprobs.next_token import next_token_temperature
from rl_megatron.logprobs.teacher_divergence import TeacherDivergence
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction
from rl_megatron.losses.distillation import weigh_terms
from rl_megatron.losses.functional import masked_mean
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.streams import require, require_integers, require_real

_DIVERGENCES: dict[str, TeacherDivergence] = {
    "forward_kl": "forward",
    "reverse_kl": "reverse",
    "jensen_shannon": "jensen_shannon",
}


class FullDistillationLossDataDict(TypedDict):
    """The batch of `FullDistillationLossFn`.

    Attributes:
        input_ids: Token ids, [B, S].
        token_mask: Which tokens count, [B, S].
        sample_mask: Which samples count, [B].
        teacher_logits: The teacher's logits, or `DeferredLogits` of its hidden states, in the same layout as the
            student's logits. Row t corresponds to token t+1. They have no gradient.
        temperature: A number, [B] or [B, S]. The logits of both models are divided by it.
    """

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    teacher_logits: Tensor | DeferredLogits
    temperature: NotRequired[Tensor]


@register_loss("full_distillation")
class FullDistillationLossFn(Loss):
    """The distillation loss over the whole vocabulary, L = Σ_t m_t·((1−α)·D_t − α·log q(y_t)) / N_tokens.

    p is the teacher's and q the student's next-token distribution after token t. D depends on kl_type:

        forward:         KL(p‖q) = Σ_v p·(log p − log q)
        reverse:         KL(q‖p) = Σ_v q·(log q − log p)
        mixed:           w·KL(p‖q) + (1−w)·KL(q‖p)
        jensen_shannon:  β·KL(p‖m) + (1−β)·KL(q‖m),  m = β·p + (1−β)·q

    w is mixed_kl_weight, β is jsd_beta and α is nll_weight. All terms are computed by one operator,
    `teacher_divergences`, which reads both models' logits shard by shard. For "mixed", it reads them only once.

    Metrics: see `metric_reductions`. `forward_kl`, `reverse_kl`, `jensen_shannon` and `nll` are the means of the terms;
    a term whose weight is 0 is not reported.

    Shapes: teacher_divergences is [B, S-1, D], with the D divergences in the order of `metric_reductions`;
    next_token_logprobs is [B, S-1], required if nll_weight is above 0. Both are in nats. Errors: see `Loss.evaluate`.

    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (arXiv:2306.13649). TRL's GKDTrainer
    computes the same with beta 0 ("forward"), 1 ("reverse") or jsd_beta ("jensen_shannon").
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DISTILLATION
    input_names = ("teacher_divergences",)
    output_keys = ("teacher_logits",)

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(FullDistillationLossConfig, cfg)

    @property
    def _weights(self) -> dict[str, float]:
        return weigh_terms(self.cfg)

    @property
    def _columns(self) -> list[str]:
        """Return the terms that are divergences, in the order of the columns of `teacher_divergences`."""
        return [name for name in self._weights if name in _DIVERGENCES]

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table("loss", "num_valid_samples", *self._weights)

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """Return the divergences of both models' next-token distributions, and log q(y) if this loss needs it."""
        name = self.display_name
        input_ids = require_integers(data, "input_ids", name).to(output.device)
        teacher = require(data, "teacher_logits", name)
        if not isinstance(teacher, DeferredLogits):
            teacher = require_real(teacher, "data['teacher_logits']", name)
        batch_shape = (input_ids.size(0), input_ids.size(1))
        layout = sharding.layout(output, batch_shape)
        counted = self.mask(data).tokens.to(output.device) != 0
        labels = pad(input_ids[:, 1:].masked_fill(~counted, IGNORE_INDEX), (0, 1), value=IGNORE_INDEX)
        temperature = data.get("temperature", 1.0)
        try:
            results = teacher_divergences(
                output,
                teacher,
                layout.scatter(labels, IGNORE_INDEX),
                sharding.tp_group,
                divergences=[_DIVERGENCES[column] for column in self._columns],
                beta=self.cfg.jsd_beta,
                temperature=next_token_temperature(temperature, layout, batch_shape),
                valid_vocab_size=sharding.valid_vocab_size,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        columns = torch.cat([results.divergences, results.logprobs[..., None]], dim=-1)
        whole = layout.gather(columns)[:, :-1]  # all streams in one collective
        streams = {"teacher_divergences": whole[..., :-1]}
        return streams | ({"next_token_logprobs": whole[..., -1]} if "nll" in self._weights else {})

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        teacher_divergences: Shaped[Tensor, "batch tokens divergences"],
        next_token_logprobs: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the loss and its metrics from the divergences of every token.

        Raises:
            ValueError: The shapes differ, or next_token_logprobs is needed but None. See also `Loss.evaluate`.
        """
        streams = self.streams(data, teacher_divergences)
        columns = streams.select("teacher_divergences", teacher_divergences, trailing=1)
        if columns.size(-1) != len(self._columns):
            raise ValueError(
                f"{self.display_name}: teacher_divergences {tuple(teacher_divergences.shape)} must have "
                f"{len(self._columns)} column(s), one for each of {self._columns}"
            )
        terms = dict(zip(self._columns, columns.unbind(-1), strict=True))
        if "nll" in self._weights:
            if next_token_logprobs is None:
                raise ValueError(f"{self.display_name}: nll_weight={self.cfg.nll_weight} needs next_token_logprobs")
            terms["nll"] = -streams.select("next_token_logprobs", next_token_logprobs)
        token_mean = partial(masked_mean, mask=streams.mask, global_normalization_factor=global_valid_toks)
        means = {name: token_mean(term) for name, term in terms.items()}
        loss = sum((weight * means[name] for name, weight in self._weights.items()), streams.mask.new_zeros(()))
        return loss, {
            "loss": loss.detach(),
            "num_valid_samples": streams.sample_mask.sum(),
            **{name: mean.detach() for name, mean in means.items()},
        }
