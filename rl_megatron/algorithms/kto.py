"""KTO: learn from single answers that are labelled desirable or undesirable.

Source: Ethayarajh et al. 2024, arXiv:2402.01306.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.algorithms.pairs import PAIR_KEYS, uses_reference
from rl_megatron.algorithms.registry import LossNeeds, register_algorithm
from rl_megatron.config.algorithms import KTOConfig
from rl_megatron.config.data import LABELLED
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.losses import KTOLossConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict, Padding
from rl_megatron.data.loader import DataLoader
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import check_dataset
from rl_megatron.evaluation.heldout import EvalResult, Evaluation, register_evaluation
from rl_megatron.generation.interfaces import RolloutEngine
from rl_megatron.losses import NLLLoss
from rl_megatron.losses.contract import LossFunction, LossInputType
from rl_megatron.losses.functional import masked_sum
from rl_megatron.losses.registry import configured_loss
from rl_megatron.policy.interfaces import PolicyInterface
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy

if TYPE_CHECKING:
    from rl_megatron.data.sources.source import HeldoutBatch

_LABEL = "desirable"
_KEYS = PAIR_KEYS | {_LABEL, "reference_policy_logprobs", "reference_point", "num_desirable"}
_BALANCED = 1.0, 4 / 3  # the paper's eq. 8: bounds of (λ_D·n_D) / (λ_U·n_U)


def _reads_labels(loss_fn: LossFunction) -> bool:
    return _LABEL in getattr(loss_fn, "required_keys", ()) and loss_fn.input_type is LossInputType.LOGPROB


def _check_data(stage: StageConfig, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Check the answers, and warn if the two labels have very different influence on the loss."""
    lengths = check_dataset(stage, tokenizer)
    if not stage.data.mix and not stage.data.streaming:
        loss = configured_loss(stage.loss)
        dataset: Any = build_source(stage).dataset(LABELLED, tokenizer)
        cfg = getattr(loss, "cfg", None)
        if isinstance(cfg, KTOLossConfig):
            warning = describe_imbalance(dataset.num_desirable, len(dataset) - dataset.num_desirable, cfg)
            if warning is not None:
                log.once(f"data.path={stage.data.path}: {warning}")
    return lengths


def describe_imbalance(num_desirable: int, num_undesirable: int, cfg: KTOLossConfig) -> str | None:
    """Return a warning, or None if neither label has much more influence than the other."""
    if not num_desirable or not num_undesirable:
        label, other = ("desirable", "undesirable") if num_desirable else ("undesirable", "desirable")
        return (
            f"all {num_desirable + num_undesirable} answers are {label}; KTO is meant for data with {other} answers too"
        )
    if not cfg.desirable_weight or not cfg.undesirable_weight:
        return None
    low, high = _BALANCED
    ratio = cfg.desirable_weight * num_desirable / (cfg.undesirable_weight * num_undesirable)
    if low <= ratio + 0.01 and ratio - 0.01 <= high:
        return None
    wanted = [bound * cfg.undesirable_weight * num_undesirable / num_desirable for bound in _BALANCED]
    return (
        f"{num_desirable} desirable and {num_undesirable} undesirable answers with loss.desirable_weight="
        f"{cfg.desirable_weight:g} and loss.undesirable_weight={cfg.undesirable_weight:g} do not balance; "
        f"set loss.desirable_weight to {wanted[0]:.3g} … {wanted[1]:.3g}"
    )


@register_algorithm(
    KTOConfig,
    loss=LossNeeds("labels of answers", _reads_labels, _KEYS, "kto"),
    uses_reference=uses_reference,
    check_data=_check_data,
)
def kto(loop: Loop, policy: MegatronPolicy, data: DataLoader[BatchedDataDict], algorithm: KTOConfig) -> None:
    """Train the policy by KTO, or by another loss of labelled answers."""
    loss_fn, length = configured_loss(loop.config.loss), loop.config.model.max_sequence_length
    if uses_reference(loop.config):
        policy.freeze_reference()
    for step, answers in loop.whole_batches(data):
        if uses_reference(loop.config):
            answers = add_reference_point(answers, policy, loop.tokenizer.pad_id, length, policy.topology.ranks)
        loop.record(step, loop.train(step, answers, loss_fn))


def add_reference_point(
    answers: BatchedDataDict, policy: PolicyInterface, pad_id: int, max_length: int, ranks: Ranks
) -> BatchedDataDict:
    """Add the reference's logprobs, z₀ (see `estimate_reference_point`) and the number of desirable answers.

    Collective. `reference_policy_logprobs` [B, S] are aligned with the tokens. `reference_point` [B] repeats z₀, and
    `num_desirable` [B] the number of desirable answers, for every sequence. Every rank passes the whole global batch,
    and the policy must have a reference. Sequences are padded with `pad_id` and have at most `max_length` tokens.
    """
    answers["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(answers)["reference_logprobs"]
    ones = torch.ones_like(answers["sample_mask"])
    answers["reference_point"] = estimate_reference_point(answers, policy, pad_id, max_length, ranks) * ones
    answers["num_desirable"] = (answers[_LABEL] * answers["sample_mask"]).sum() * ones
    return answers


def estimate_reference_point(
    answers: BatchedDataDict, policy: PolicyInterface, pad_id: int, max_length: int, ranks: Ranks
) -> float:
    """Return z₀, the same on every rank: the mean of log π − log π_ref over mismatched answers, at least 0.

    Collective. Arguments: see `add_reference_point`.
    """
    pairs = mismatch_answers(answers, pad_id, max_length)
    log_ratios = (
        policy.get_logprobs(pairs)["logprobs"] - policy.get_reference_policy_logprobs(pairs)["reference_logprobs"]
    )
    mean = masked_sum(log_ratios.double(), pairs["token_mask"].double(), dim=1).mean().clamp(min=0).item()
    return ranks.share(lambda: mean)


def mismatch_answers(answers: BatchedDataDict, pad_id: int, max_length: int) -> BatchedDataDict:
    """Return each sequence's prompt with the previous sequence's answer; the first prompt gets the last answer.

    The answer begins at the first token with token_mask 1. Sequences are cut at `max_length` tokens.
    """
    starts, ends = (answers["token_mask"] != 0).int().argmax(1).tolist(), answers["input_lengths"].tolist()
    ids, masks = [], []
    for number, start in enumerate(starts):
        answer = slice(starts[number - 1], ends[number - 1])
        prompt, mask = answers["input_ids"][number, :start], torch.zeros(start)
        ids.append(torch.cat([prompt, answers["input_ids"][number - 1, answer]])[:max_length])
        masks.append(torch.cat([mask, answers["token_mask"][number - 1, answer]])[:max_length])
    pairs = Padding(pad_id, multiple=1).collate([sequence.tolist() for sequence in ids])
    pairs["token_mask"] = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    return pairs


@register_evaluation(LABELLED)
@dataclass(frozen=True)
class HeldoutLabelled(Evaluation):
    """The evaluation on `batch`: held-out answers with labels under the key `desirable`."""

    batch: BatchedDataDict
    pad_id: int
    max_length: int

    @classmethod
    def from_stage(cls, stage: StageConfig, heldout: HeldoutBatch, tokenizer: Tokenizer) -> Self:
        """Return the evaluation on the held-out answers. At least one must be desirable."""
        if not heldout.batch[_LABEL].any():
            raise ConfigError(
                f"none of the {heldout.batch.size} held-out answers is desirable, but the evaluation needs one; "
                "raise data.heldout_fraction or data.num_eval_examples, or set data.eval_path to other data"
            )
        return cls(heldout.batch, tokenizer.pad_id, stage.model.max_sequence_length)

    @classmethod
    def metric_names(cls, stage: StageConfig, has_reference: bool) -> tuple[str, ...]:
        """Return the names of the eval metrics; `label_accuracy` only if the algorithm has a reference policy."""
        return ("nll_per_token",) + (("label_accuracy",) if has_reference else ())

    def evaluate(self, policy: MegatronPolicy, engine: RolloutEngine | None = None) -> EvalResult:
        """Return how likely desirable answers are, and how often the policy agrees with the labels.

        `nll_per_token` is −log π per token of the desirable answers. With a reference policy, `label_accuracy` is the
        share of answers with log π − log π_ref on the right side of the reference point: above it if desirable,
        otherwise below it. A tie counts half.
        """
        desirable = BatchedDataDict(self.batch)
        desirable["sample_mask"] = self.batch["sample_mask"] * self.batch[_LABEL]
        metrics = {"nll_per_token": policy.train(desirable, NLLLoss(), eval_mode=True, gbs=desirable.size)["loss"]}
        if policy.reference is not None:
            metrics["label_accuracy"] = self._accuracy(policy)
        return metrics, []

    def item_lengths(self) -> list[list[int]]:
        return self.batch["input_lengths"].view(-1, 1).tolist()

    def _accuracy(self, policy: MegatronPolicy) -> float:
        logprobs = policy.get_logprobs(self.batch)["logprobs"]
        reference = policy.get_reference_policy_logprobs(self.batch)["reference_logprobs"]
        rewards: Tensor = masked_sum(logprobs - reference, self.batch["token_mask"], dim=1).double()
        above = (
            rewards - estimate_reference_point(self.batch, policy, self.pad_id, self.max_length, policy.topology.ranks)
        ).sign()
        agrees = torch.where(self.batch[_LABEL] != 0, above, -above)
        return ((agrees + 1) / 2).mean().item()
