"""What a rank uses if responses have a mean length, from what it uses if all are the longest."""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.plan.phases import Collective, PhaseUse, RankUse
from rl_megatron.plan.settings import Settings

_OF_SEQUENCES = ("logprobs", "reference", "values", "train_critic", "train")  # phases that compute whole sequences


def with_mean_lengths(use: RankUse, settings: Settings) -> RankUse:
    """Return what a rank that was run with the longest responses uses on average; peaks stay.

    Args:
        use: What was counted.
        settings: The settings, which know the mean length.
    """
    of_responses = settings.mean_response_tokens / settings.response_tokens
    batches = settings.batches
    shares = {"generate": (of_responses, of_responses)}
    for name in _OF_SEQUENCES:
        is_training = name.startswith("train")
        batch = batches.training if is_training else batches.rollout
        number = settings.mean_number(batch, batches.optimizer_steps if is_training else 1)
        shares[name] = (settings.computed_share, number / batch.number)
    return replace(use, phases=tuple(_scale(phase, *shares.get(phase.name, (1.0, 1.0))) for phase in use.phases))


def _scale(phase: PhaseUse, share: float, of_calls: float) -> PhaseUse:
    """Return a phase with a share of its operations and bytes, and a share of its calls."""
    if share == of_calls == 1.0:
        return phase
    return replace(
        phase,
        flops=round(share * phase.flops),
        kernels=round(of_calls * phase.kernels),
        memory_bytes=round(share * phase.memory_bytes),
        collectives=tuple(
            replace(
                collective,
                bytes=round(collective.bytes * share / of_calls),
                count=max(1, round(collective.count * of_calls)),
            )
            if _is_of_tokens(collective)
            else collective
            for collective in phase.collectives
        ),
    )


def _is_of_tokens(collective: Collective) -> bool:
    """Return whether a collective has activations, and not gradients or weights."""
    return collective.group in ("tensor", "context", "expert") or collective.kind in ("send", "recv")
