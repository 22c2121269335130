"""What a rollout engine takes and gives, whichever engine it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rl_megatron.data.batch import BatchedDataDict


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. top_k applies first."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()


class EngineFailed(RuntimeError):
    """A rollout engine that cannot go on, or whose answer cannot be used; raised on every rank."""


class RolloutEngine(Protocol):
    """Draws completions from a policy's weights; every rank of the policy calls every method with the same arguments
    and gets the same answer. To add an engine is to write these three methods."""

    def update_weights(self) -> dict[str, float]:
        """Makes the engine serve the policy's present weights, and drop what it kept of older ones; does nothing where
        it serves them already. Returns what the last hand-over cost, if there was one since the last call (`generate`
        may need one as well): nothing, or `refit_bytes`, `refit_seconds`, `refit_gb_per_s` and the seconds of each
        phase.

        Raises: WeightsRefused where what arrived is not what was sent. The engine then serves nothing.
        """
        ...

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """One completion for each prompt (token ids, each non-empty), in order.

        Returns, right-padded to the longest row, S tokens:
        `input_ids` [B, S] prompt and completion; `prompt_lengths` [B]; `input_lengths` [B] with the completion (its
        stop token included); `token_mask` [B, S] fp32, 1 on sampled tokens; `sample_mask` [B] fp32 of ones;
        `generation_logprobs` [B, S] fp32, entry t of token t, 0 off the completion: log softmax(logits/temperature),
        *before* top-k and top-p, at temperature 1 where sampling is greedy; `temperature` [B], the one those logprobs
        were taken at; `top_k` [B] int64 and `top_p` [B] fp32, as in `sampling`; `weight_version` [B] int64, of the
        policy's weights that drew the row; `stopped` [B] bool, true where a stop token ended the row.
        """
        ...

    def shutdown(self) -> None:
        """Ends what the engine started; it answers nothing afterwards."""
        ...
