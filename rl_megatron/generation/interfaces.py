"""Define what every rollout engine takes and returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.stop_strings import StopStrings


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    Attributes:
        max_new_tokens: Tokens of a completion, at most.
        temperature: Logits are divided by it; 0 is greedy decoding.
        top_k: Sample from so many most likely tokens; 0 is off. It applies before `top_p`.
        top_p: Sample from the fewest tokens with this probability together; 1 is off.
        stop_ids: Token ids that end a completion. They are part of it.
        stop_strings: Texts that end a completion, which includes them; None if there are none. An engine that obeys
            them says so when it is registered.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None


@dataclass(frozen=True)
class Served:
    """The identity of the copy of the policy's weights that an engine serves. Equal values are the same copy.

    Attributes:
        version: The policy's `weight_version` when it was copied; None if the engine uses the policy's own weights.
        start: How often the engine's processes have been started, so that restarted processes differ from those before.
    """

    version: int | None
    start: int = 0


class EngineFailed(RuntimeError):
    """A rollout engine cannot go on, or its answer cannot be used. It is raised on every rank."""


class RolloutEngine(Protocol):
    """An engine that generates completions with a policy's weights.

    Every rank of the policy calls every method with the same arguments and gets the same result. A new engine has these
    three methods and this attribute.
    """

    @property
    def served(self) -> Served | None:
        """Return the copy of the weights that the engine serves now, or None if it has no weights yet."""
        ...

    def update_weights(self) -> dict[str, float]:
        """Make the engine serve the policy's current weights, and drop what it kept of older ones.

        It does nothing if the engine serves them already.

        Returns:
            The metrics of the last weight sync, if there was one since the last call. `generate` may need one as well.
            They are `refit_bytes`, `refit_seconds`, `refit_gb_per_s` and the seconds of each phase, for reports only,
            while `served` says what the engine serves.

        Raises:
            WeightsRefused: The weights that arrived are not those that were sent. The engine then serves nothing.
        """
        ...

    def generate(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
        """Generate one completion for each prompt (token ids, none empty), in order.

        Returns:
            A batch, right-padded to the longest sequence of S tokens, with

            - `input_ids` [B, S]: prompt and completion;
            - `prompt_lengths` [B], and `input_lengths` [B] with the completion, its stop token included;
            - `token_mask` [B, S] fp32: 1 on sampled tokens; `sample_mask` [B] fp32: ones;
            - `generation_logprobs` [B, S] fp32: log softmax(logits/temperature) of token t at entry t, *before* top-k
              and top-p, at temperature 1 if sampling is greedy; 0 off the completion;
            - `temperature` [B]: the temperature of these logprobs; `top_k` [B] int64 and `top_p` [B] fp32, as in
              `sampling`;
            - `weight_version` [B] int64: the version of the policy's weights that generated the sequence;
            - `stopped` [B] bool: whether a stop token or stop string ended the sequence.
        """
        ...

    def shutdown(self) -> None:
        """End the processes that the engine started. It cannot be used afterwards."""
        ...
