"""The losses that a client of the training service chooses by name: sums over target tokens, not means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rl_megatron.config.errors import nearest
from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction

LOSS_SUM = "loss:sum"
TARGETS = "target_tokens"
COUNTS = "target_mask"
Values = Float[Tensor, "batch positions targets"]
Formula = Callable[[Values, Mapping[str, Values]], Values]


def compute_cross_entropy(logprobs: Values, inputs: Mapping[str, Values]) -> Values:
    """Return −w·log p of each target, where w is its weight."""
    return -logprobs * inputs["weights"]


def compute_importance_sampling(logprobs: Values, inputs: Mapping[str, Values]) -> Values:
    """Return −(p/q)·A of each target, where q is the probability with which it was sampled."""
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def compute_ppo(logprobs: Values, inputs: Mapping[str, Values]) -> Values:
    """Return −min(ρ·A, clip(ρ)·A) of each target, with ρ = p/q.

    Source: Schulman et al. 2017 (arXiv:1707.06347).
    """
    return _clip_objective(torch.exp(logprobs - inputs["logprobs"]), inputs)


def compute_cispo(logprobs: Values, inputs: Mapping[str, Values]) -> Values:
    """Return −clip(ρ)·A·log p of each target, with ρ = p/q and no gradient through clip(ρ).

    Source: MiniMax 2025 (arXiv:2506.13585).
    """
    ratio = torch.exp(logprobs.detach() - inputs["logprobs"])
    return -_clip(ratio, inputs) * logprobs * inputs["advantages"]


def compute_dro(logprobs: Values, inputs: Mapping[str, Values]) -> Values:
    """Return −(A·log p − ½·β·(log p/q)²) of each target.

    Source: Richemond et al. 2024 (arXiv:2405.19107).
    """
    log_ratio = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * inputs["beta"] * log_ratio.square())


def compute_gspo(logprobs: Values, inputs: Mapping[str, Values]) -> Values:
    """Return −min(s·A, clip(s)·A) of each target, where s is the ratio of its sequence.

    The ratio is the geometric mean of p/q over the tokens whose `sequence_ratio_mask` is not 0. Each token has the
    value of s, but the gradient of its own logprob (GSPO-token).

    Source: Zheng et al. 2025 (arXiv:2507.18071).
    """
    in_ratio = inputs["sequence_ratio_mask"] != 0
    log_ratio = torch.where(in_ratio, logprobs.detach() - inputs["logprobs"], 0.0)
    mean = log_ratio.sum(dim=(1, 2)) / in_ratio.sum(dim=(1, 2)).clamp(min=1)
    ratio = torch.exp(mean[:, None, None] + logprobs - logprobs.detach())
    return _clip_objective(ratio, inputs)


def _clip(ratio: Values, inputs: Mapping[str, Values]) -> Values:
    return ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def _clip_objective(ratio: Values, inputs: Mapping[str, Values]) -> Values:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, inputs) * advantages)


@dataclass(frozen=True)
class NamedLoss:
    """A loss that clients choose by name.

    Attributes:
        formula: Returns the loss of each target from its logprob and the inputs.
        required: The inputs beside the targets, which have a value for each target.
        optional: The inputs that a client may leave out, with the value that each target then has.
        many_targets: Whether a position may have several targets.
    """

    formula: Formula
    required: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    many_targets: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of all inputs beside the targets."""
        return (*self.required, *self.optional)


_SAMPLED = ("logprobs", "advantages")
_CLIPPING = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, NamedLoss] = {
    "cross_entropy": NamedLoss(compute_cross_entropy, optional={"weights": 1.0}, many_targets=True),
    "importance_sampling": NamedLoss(compute_importance_sampling, _SAMPLED),
    "ppo": NamedLoss(compute_ppo, _SAMPLED, _CLIPPING),
    "cispo": NamedLoss(compute_cispo, _SAMPLED, _CLIPPING),
    "dro": NamedLoss(compute_dro, _SAMPLED, {"beta": 0.05}),
    "gspo": NamedLoss(compute_gspo, (*_SAMPLED, "sequence_ratio_mask"), _CLIPPING),
}


def choose_loss(name: str, options: Mapping[str, object] | None = None) -> TargetLoss:
    """Return the loss with this name and these options.

    Raises:
        ValueError: There is no such loss or option, or an option is not a number. The message lists what there is.
    """
    if name not in LOSSES:
        raise ValueError(
            f"loss_fn={name!r} is not a loss of this server{nearest(name, LOSSES)}; it has: {', '.join(LOSSES)}"
        )
    chosen, values = LOSSES[name], {}
    for option, value in (options or {}).items():
        if option not in chosen.optional:
            options_of_loss = ", ".join(chosen.optional) or "no option"
            raise ValueError(f"loss_fn_config.{option} is not an option of {name}, which has {options_of_loss}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"loss_fn_config.{option}={value!r} must be a number")
        values[option] = float(value)
    return TargetLoss(name, replace(chosen, optional={**chosen.optional, **values}))


class TargetLoss(Loss):
    """The sum of a formula over the targets of a batch, L = Σ_b Σ_t Σ_k f(log p(y_btk), inputs_btk).

    A position t of a sequence has K targets, of which `target_mask` says which count; their logprobs are those of the
    next token. It keeps the logprobs that it has read, which the client gets.

    Attributes:
        name: The name by which the client chose it.
        named: The formula and its inputs; the defaults of optional inputs are the client's options.
        logprobs: The logprobs [b, S-1, K] of each microbatch so far, on the last pipeline stage.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    reads = "logprobs"
    input_names = ("target_logprobs",)

    def __init__(self, name: str, named: NamedLoss) -> None:
        self.name, self.named = name, named
        self.next_token_keys = frozenset({TARGETS, COUNTS, *named.inputs})
        self.logprobs: list[Tensor] = []

    @property
    def display_name(self) -> str:
        return self.name

    @property
    def required_keys(self) -> tuple[str, ...]:
        return ("token_mask", "sample_mask", COUNTS, *self.named.inputs)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table(LOSS_SUM)

    def read_output(
        self, output: Tensor | DeferredLogits, data: Mapping[str, Any], sharding: Sharding
    ) -> dict[str, Tensor]:
        """Return `target_logprobs` [B, S-1, K]. If the batch has no targets, these are the next tokens of the input."""
        targets = data.get(TARGETS)
        stats = next_token_stats(
            output,
            data["input_ids"].to(output.device),
            sharding,
            gather_ids=None if targets is None else targets[:, :-1].to(output.device),
            mask=self.mask(data).including_first.to(output.device),
            most_counted=sharding.most_counted,
        )
        gathered = stats.logprobs[..., None] if stats.gathered is None else stats.gathered
        return {"target_logprobs": gathered}

    def evaluate(
        self, data: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count, target_logprobs: Values
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Return the sum over the targets that count, and its metric."""
        counts = data[COUNTS][:, :-1].to(target_logprobs.device) != 0
        counts &= data["sample_mask"].to(target_logprobs.device)[:, None, None] != 0
        inputs = {key: torch.where(counts, data[key][:, :-1].to(target_logprobs), 0.0) for key in self.named.inputs}
        logprobs = torch.where(counts, target_logprobs, 0.0)
        self.logprobs.append(logprobs.detach())
        loss = torch.where(counts, self.named.formula(logprobs, inputs), 0.0).sum()
        return loss, {LOSS_SUM: loss.detach()}
