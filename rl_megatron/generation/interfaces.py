"""Define the interface of rollout engines: requests, completions and `RolloutEngine`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rl_megatron.config.errors import RunFailed
from rl_megatron.generation.stop_strings import StopStrings


@dataclass(frozen=True)
class Sampling:
    """The settings with which completions are sampled.

    Attributes:
        max_new_tokens: The maximum number of tokens in a completion.
        temperature: The divisor of the logits; 0 means greedy decoding.
        top_k: Sample only from this many of the most likely tokens; 0: off. It applies before `top_p`.
        top_p: Sample from the fewest most likely tokens whose probabilities sum to at least this; 1: off.
        stop_ids: Token ids that end a completion. They are part of it.
        stop_strings: Texts that end a completion and are part of it; None if there are none. Only engines registered
            with `stops_at_strings` obey them.

    Raises:
        ValueError: A number is out of its range. The message names it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (_is_whole(self.max_new_tokens, 1), "must be a whole number, at least 1"),
            "temperature": (
                math.isfinite(self.temperature) and self.temperature >= 0,
                "must be finite and not negative; 0 is greedy decoding",
            ),
            "top_k": (_is_whole(self.top_k, 0), "must be a whole number; 0 disables it"),
            "top_p": (0 < self.top_p <= 1, "must lie in (0, 1]; 1 disables it"),
            "stop_ids": (all(_is_whole(id_, 0) for id_ in self.stop_ids), "must be token ids, none negative"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} {rule}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


@dataclass(frozen=True)
class Served:
    """The identity of an engine's copy of the policy's weights. Equal values mean the same copy.

    Attributes:
        version: The policy's `weight_version` when copied; None if the engine uses the policy's weights without a copy.
        start: How many times the engine's processes were started; it tells restarted processes from earlier ones.
    """

    version: int | None
    start: int = 0


class EngineFailed(RunFailed):
    """The error if a rollout engine cannot continue, or its answer cannot be used. It is raised on every rank."""


class EngineLost(EngineFailed):
    """The error if a process of the engine has ended, so that its requests are lost. `sync` starts it again."""


@dataclass(frozen=True)
class Request:
    """A prompt to complete.

    Attributes:
        request_id: The name of the request, unique among the requests that an engine has at the same time.
        prompt: Token ids, at least one.
        sampling: How the completion is sampled.
        seed: The only source of the request's random numbers.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class WeightSpan:
    """The tokens of a completion that one version of the weights generated.

    Attributes:
        version: The policy's `weight_version`.
        start: The index of the first token in the completion.
        end: The index of the last token plus 1.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """The answer to a request, or the part of it that was generated before the request was aborted.

    Attributes:
        request_id: The id of the request.
        ids: Token ids, the stop token included. Only an aborted request may have none.
        logprobs: The log softmax(logits/temperature) of each token, before top-k and top-p; greedy sampling has
            temperature 1 here. A logprob is NaN if the logits were NaN.
        versions: One span for each weight version that generated tokens, in order. Together they cover all tokens.
        reason: "stop" after a stop token or stop string, "length" after `max_new_tokens`, "abort" otherwise.
        routed_experts: The experts chosen for each token that the model read (all but the last),
            [tokens − 1, layers, k] int16 on the CPU; None if they were not recorded. Layers without experts hold
            arbitrary values.
    """

    request_id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[WeightSpan, ...]
    reason: Literal["stop", "length", "abort"]
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes with the experts as a NumPy array; torch would pickle a tensor as a shared file."""
        experts = self.routed_experts
        return self.__dict__ | {"routed_experts": None if experts is None else experts.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes that `__getstate__` returned."""
        experts = state["routed_experts"]
        self.__dict__.update(state | {"routed_experts": None if experts is None else torch.from_numpy(experts)})

    def __post_init__(self) -> None:
        """Raise EngineFailed if the parts do not fit together, so that the answer cannot be used."""
        length = len(self.ids)
        if len(self.logprobs) != length:
            raise EngineFailed(f"request {self.request_id}: {length} tokens came with {len(self.logprobs)} logprobs")
        if length == 0 and self.reason != "abort":
            raise EngineFailed(f"request {self.request_id}: the completion ended ({self.reason}) without any token")
        ends = [0, *(span.end for span in self.versions)]
        if [span.start for span in self.versions] != ends[:-1] or ends[-1] != length or ends != sorted(set(ends)):
            raise EngineFailed(
                f"request {self.request_id}: the spans of weight versions {self.versions} do not cover its {length} "
                "tokens in order"
            )


class RolloutEngine(Protocol):
    """An engine that generates completions with a policy's weights.

    Every rank of the policy calls these methods at the same time. An engine may have two more methods:

    - `async submit(request)`, of an engine that runs beside the policy, returns the completion of one request. The
      engine batches the request with others, and generates each token with the weights that it serves at that time.
      Only rank 0 calls `submit`, at any time and on any asyncio loop. If the task that awaits it is cancelled, the
      engine aborts the request. It raises `EngineLost` if the request is lost; the caller may repeat it after the next
      `sync`. Asynchronous training needs this method.
    - `sleep()`, of an engine that shares devices with the policy, releases the engine's memory until the next `sync`.
      Every rank calls it. `served` is None afterwards.
    """

    @property
    def served(self) -> Served | None:
        """Return the copy of the weights that the engine serves now, or None if it has no weights yet."""
        ...

    def sync(self) -> dict[str, float]:
        """Make the engine serve the policy's current weights, and drop everything that it computed with older ones.

        It does nothing if the engine serves them already.

        Returns:
            The metrics of the last weight sync since the previous call, whether `sync` or `complete` made it:
            `refit_bytes`, and the seconds and GB/s of the sync and of each phase. Empty if there was no sync.

        Raises:
            WeightsRefused: The weights that arrived are not those that were sent. The engine then serves nothing.
        """
        ...

    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete requests together, with the policy's current weights, and return the completions in their order.

        Rank 0 passes the requests and gets the completions. Other ranks pass and get empty lists, so their memory
        does not grow with the number of requests.

        Raises:
            ConfigError: On every rank, if a prompt is empty, or too long for its `max_new_tokens`.
            EngineFailed: On every rank, if the engine does not serve the policy's current weights, or cannot continue.
        """
        ...

    def close(self) -> None:
        """End the processes that the engine started. The engine cannot be used afterwards."""
        ...
