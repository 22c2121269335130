"""Draft models for speculative decoding: train a small model towards the policy's own next-token distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import DraftCrossEntropyLossConfig
from rl_megatron.logprobs import Sharding, vocab_parallel_soft_cross_entropy, vocab_subset
from rl_megatron.losses.base import Loss
from rl_megatron.losses.calling import Call
from rl_megatron.losses.contract import Count, CountOfSequences, LossInputType, LossType, Reduction
from rl_megatron.losses.functional import masked_mean
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.streams import require, require_real


class DraftCrossEntropyLossDataDict(TypedDict):
    """The batch of `DraftCrossEntropyLossFn`.

    Attributes:
        token_mask: Which tokens count, [B, S].
        sample_mask: Which samples count, [B].
        teacher_logits: The policy's logits, in the same layout as the draft's. Row t corresponds to token t+1. They
            have no gradient.
    """

    token_mask: Tensor
    sample_mask: Tensor
    teacher_logits: Tensor


@register_loss("draft_cross_entropy")
class DraftCrossEntropyLossFn(Loss):
    """The draft loss, L = Σ_t m_{t+1}·CE_t / N_tokens, with CE_t = −Σ_v p_{t+1}(v)·log q_t(v).

    q_t is the draft's distribution at position t, and p_{t+1} is the policy's at the next position. A draft head reads
    token t+1 and the policy's hidden state at token t, and predicts the policy's distribution of token t+2. The policy
    is a constant. Both distributions are at temperature 1.

    A draft with a smaller vocabulary needs `d2t`. The policy's distribution is then restricted to the draft's ids and
    renormalised. If the vocabulary is sharded, the policy's columns are sent to the ranks that hold the draft's columns
    of the same ids: see `vocab_subset`. The policy's ids from valid_vocab_size on are padding, and so are columns after
    the draft's last id.

    Besides the call forms of `Loss`, a call may pass teacher_logits= and mask= with student_logits=. The caller must
    then align all three: it rolls the policy's logits and token_mask by −1, so that entry t of each belongs to CE_t.

    Shapes: student_logits is [B, S, V/tp], with context parallelism [B, S/cp, V/tp], packed [1, T/cp, V/tp].
    draft_cross_entropy is [B, S-1], and its entry t is CE_t, in nats. Errors: see `Loss.evaluate`.

    Args:
        cfg: Empty settings.
        d2t: [V_draft] integer offsets: the draft's id i is the policy's id i + d2t[i]. None: the vocabularies are
            equal.
        vocab_parallel_group: The tensor-parallel group for calls that pass teacher_logits= but no group.

    Source: Li et al. 2025, "EAGLE-3" (arXiv:2503.01840). Alignment, d2t and mask follow NeMo RL's draft training.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.DRAFT
    output_name = "student_logits"
    input_names = ("draft_cross_entropy",)
    output_keys = ("teacher_logits",)

    def __init__(
        self, cfg: object = None, *, d2t: Tensor | None = None, vocab_parallel_group: dist.ProcessGroup | None = None
    ) -> None:
        self.cfg = parse_settings(DraftCrossEntropyLossConfig, cfg)
        self._policy_ids = None if d2t is None else _read_policy_ids(d2t)
        self._vocab_parallel_group = vocab_parallel_group

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table("loss", "num_valid_samples")

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """Return draft_cross_entropy of the draft's logits against data["teacher_logits"]."""
        name, mask = self.display_name, self.mask(data).including_first.to(output.device)
        layout = sharding.layout(output, (mask.size(0), mask.size(1)))
        teacher = require_real(require(data, "teacher_logits", name), "data['teacher_logits']", name)
        self._check_alike(output, teacher)
        teacher, vocab_size = self._restrict_to_draft(teacher, output, sharding.tp_group, sharding.valid_vocab_size)
        teacher, positions = layout.locate_next_tokens(teacher)
        counted = layout.scatter(pad(mask[:, 1:], (0, 1)), 0) != 0
        cross_entropy = vocab_parallel_soft_cross_entropy(
            output,
            teacher,
            sharding.tp_group,
            teacher_rows=torch.where(counted, positions, -1),
            valid_vocab_size=vocab_size,
        )
        return {"draft_cross_entropy": layout.gather(cross_entropy)[:, :-1]}

    def prepare(self, call: Call) -> Call:
        """Turn a call with teacher_logits= and mask= into a call with draft_cross_entropy, and return it."""
        student, keywords = call.output, dict(call.keywords)
        if student is None or "teacher_logits" not in keywords:
            return call
        teacher = require_real(keywords.pop("teacher_logits"), "teacher_logits", self.display_name)
        mask = keywords.pop("mask", keywords.pop("token_mask", None))
        if mask is None or mask.shape != student.shape[:-1]:
            raise ValueError(
                f"{self.display_name}: teacher_logits= needs mask= [B, S] for student_logits "
                f"{tuple(student.shape)}, but got {None if mask is None else tuple(mask.shape)}"
            )
        self._check_alike(student, teacher)
        group = call.sharding.tp_group or self._vocab_parallel_group
        teacher, vocab_size = self._restrict_to_draft(teacher, student, group, call.sharding.valid_vocab_size)
        data = {**call.data, "token_mask": pad(mask, (1, 0))}  # entry t of the mask corresponds to token t+1
        counted = self.mask(data).tokens.to(student.device) != 0
        positions = torch.arange(mask.numel(), device=student.device).view(mask.shape)
        cross_entropy = vocab_parallel_soft_cross_entropy(
            student, teacher, group, teacher_rows=torch.where(counted, positions, -1), valid_vocab_size=vocab_size
        )
        return replace(call, data=data, output=None, keywords={**keywords, "draft_cross_entropy": cross_entropy})

    def _check_alike(self, student: Tensor, teacher: Tensor) -> None:
        """Raise ValueError unless both models' logits have the same layout. With d2t, the last dimensions may differ.

        The message names both shapes.
        """
        columns_differ = self._policy_ids is None and teacher.shape[-1] != student.shape[-1]
        if teacher.shape[:-1] != student.shape[:-1] or columns_differ:
            raise ValueError(
                f"{self.display_name}: teacher_logits {tuple(teacher.shape)} must be laid out like student_logits "
                f"{tuple(student.shape)}" + ("; a draft with a vocabulary of its own needs d2t" * columns_differ)
            )

    def _restrict_to_draft(
        self, teacher: Tensor, student: Tensor, group: dist.ProcessGroup | None, valid_vocab_size: int | None
    ) -> tuple[Tensor, int | None]:
        """Return the policy's logits over the draft's vocabulary, sharded like the draft's, and this vocabulary's size.

        Without d2t, `teacher` and `valid_vocab_size` are returned unchanged.
        """
        if self._policy_ids is None:
            return teacher, valid_vocab_size
        columns = vocab_subset(teacher, self._policy_ids, student.shape[-1], group, valid_vocab_size=valid_vocab_size)
        return columns, len(self._policy_ids)

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        draft_cross_entropy: Shaped[Tensor, "batch tokens"],
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        streams = self.streams(data, draft_cross_entropy)
        cross_entropy = streams.select("draft_cross_entropy", draft_cross_entropy)
        loss = masked_mean(cross_entropy, streams.mask, global_normalization_factor=global_valid_toks)
        return loss, {"loss": loss.detach(), "num_valid_samples": streams.sample_mask.sum()}


def _read_policy_ids(d2t: Tensor) -> Tensor:
    """Return the policy's id for each of the draft's ids, on the CPU."""
    if d2t.dim() != 1 or len(d2t) == 0 or d2t.is_floating_point():
        raise ValueError(f"d2t must be [V_draft] integer offsets, got {tuple(d2t.shape)} {d2t.dtype}")
    ids = torch.arange(len(d2t)) + d2t.cpu()
    if len(ids.unique()) != len(ids):
        raise ValueError("d2t maps several of the draft's ids to one of the policy's; it maps id i to i + d2t[i]")
    return ids


class DraftLossWrapper(Loss):
    """The sum L = L_policy + w·L_draft, for a policy and a draft model that are trained together.

    The output is the policy's logits; data["student_logits"] has the draft's logits in the same layout. The draft
    learns from the policy, whose logits are a constant in L_draft. Metrics: those of the policy's loss, with L as
    `loss`, and `draft_loss`, which does not include w.

    Args:
        loss_fn: The policy's loss, over logits.
        loss_weight: The weight w ≥ 0 of the draft's loss.
        d2t: See `DraftCrossEntropyLossFn`.

    Raises:
        ValueError: loss_weight is negative, or d2t is refused.
    """

    def __init__(self, loss_fn: Loss, loss_weight: float = 1.0, *, d2t: Tensor | None = None) -> None:
        if not loss_weight >= 0:
            raise ValueError(f"loss_weight={loss_weight} must not be negative")
        self.loss_fn, self.loss_weight, self.draft_loss_fn = loss_fn, loss_weight, DraftCrossEntropyLossFn(d2t=d2t)
        self.loss_type, self.input_type = loss_fn.loss_type, loss_fn.input_type
        self.output_name, self.group_size = loss_fn.output_name, loss_fn.group_size
        self.next_token_keys, self.output_keys = loss_fn.next_token_keys, (*loss_fn.output_keys, "student_logits")
        self.input_names = (*loss_fn.input_names, *self.draft_loss_fn.input_names)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return {**self.loss_fn.metric_reductions, "draft_loss": Reduction.SUM}

    @property
    def required_keys(self) -> tuple[str, ...]:
        return (*self.loss_fn.required_keys, "student_logits")

    @property
    def global_counts(self) -> Mapping[str, CountOfSequences]:
        return self.loss_fn.global_counts

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        policy = self.loss_fn.read_output(output, data, sharding)
        # The draft's forward comes last, so that its backward runs first. The policy's backward overwrites the policy's
        # logits, which are the draft's teacher, with their gradient. In the other order, the draft's backward raises.
        name = self.display_name
        student = require_real(require(data, "student_logits", name), "data['student_logits']", name)
        draft = self.draft_loss_fn.read_output(student, {**data, "teacher_logits": output.detach()}, sharding)
        return policy | draft

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        draft_cross_entropy: Shaped[Tensor, "batch tokens"],
        **keywords: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        counts = global_valid_seqs, global_valid_toks
        policy_loss, metrics = self.loss_fn.evaluate(data, *counts, **keywords)
        draft_loss, _ = self.draft_loss_fn.evaluate(data, *counts, draft_cross_entropy)
        loss = policy_loss + self.loss_weight * draft_loss
        return loss, {**metrics, "loss": loss.detach(), "draft_loss": draft_loss.detach()}
