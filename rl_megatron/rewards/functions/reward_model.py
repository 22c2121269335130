"""The reward function `reward_model` with `url`: a reward model on a server, which is sent text or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from rl_megatron.rewards.endpoint import BadReply, Endpoint
from rl_megatron.rewards.registry import register_reward
from rl_megatron.rewards.reward_function import SCORE

Protocol = Literal["pooling", "classify", "score"]
Sent = Literal["string", "tokens", "completion"]


@register_reward("reward_model")
class RewardModelServer:
    """The score of a prompt with its completion, from a server with vLLM's endpoints for reward models.

    The request is a POST to `url` with `model` and the keys of the chosen `protocol`:

    - pooling: `{"input": sequence}` → `{"data": [{"data": [score]}]}`; the last number of a list is used.
    - classify: `{"input": sequence}` → `{"data": [{"probs": [score]}]}`
    - score: `{"text_1": prompt, "text_2": completion}` → `{"data": [{"score": score}]}`

    `sends` selects the form of the sequence:

    - string: the text of all prompt and completion tokens, with special tokens, including the stop token. The tokens
      that the tokenizer puts before every text (BOS) are left out, because the server adds them.
    - tokens: the ids of the same tokens, for a model with the policy's tokenizer.
    - completion: the prompt as reward functions get it, and the completion, without special tokens.

    The result is (score − mean) / std, limited to ±clip. The metrics are `raw` (the server's score) and `attempts`.

    Args:
        url: The whole address, such as http://127.0.0.1:8000/pooling.
        model: The model's name at the server.
        protocol: pooling, classify or score.
        sends: string, tokens or completion; None is "completion" for the protocol `score`, which allows nothing else,
            and otherwise "string".
        mean: Subtracted from the score.
        std: The divisor of the difference.
        clip: The largest magnitude of the result; None: no limit.
        **endpoint: `api_key_env`, `request_seconds`, `retries`, `backoff_seconds` and `longest_wait_seconds` of
            `Endpoint`.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        protocol: Protocol = "pooling",
        sends: Sent | None = None,
        mean: float = 0.0,
        std: float = 1.0,
        clip: float | None = None,
        **endpoint: Any,
    ):
        if protocol not in _READERS:
            raise ValueError(f"protocol={protocol!r} must be one of {', '.join(_READERS)}")
        if sends is None:
            sends = "completion" if protocol == "score" else "string"
        if sends not in get_args(Sent):
            raise ValueError(f"sends={sends!r} must be one of {', '.join(get_args(Sent))}")
        if protocol == "score" and sends != "completion":
            raise ValueError(f"sends={sends} needs protocol=pooling or classify; protocol=score sends two texts")
        if not std > 0:
            raise ValueError(f"std={std} must be more than 0")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip} must be more than 0, or null")
        self._endpoint = Endpoint(url, **endpoint)
        self._model, self._protocol, self._sends, self._read = model, protocol, sends, _READERS[protocol]
        self._mean, self._std, self._clip = mean, std, clip

    async def __call__(
        self, prompt: str, completion: str, sequence_text: str | None = None, sequence_ids: Sequence[int] = ()
    ) -> dict[str, float]:
        """Return the score and the metrics.

        Raises:
            ValueError: `sends` needs the tokens of the whole sequence, which the sample lacks.
            EndpointFailed: The server gave no score.
            TimeoutError: It took too long.
        """
        if self._sends != "completion" and not sequence_ids:
            raise ValueError(f"sends={self._sends} needs the tokens of the whole sequence, which this sample lacks")
        sequences = {"string": sequence_text, "tokens": list(sequence_ids), "completion": prompt + completion}
        pair = {"text_1": prompt, "text_2": completion}
        body = {"model": self._model, **(pair if self._protocol == "score" else {"input": sequences[self._sends]})}
        raw, attempts = await self._endpoint.post(body, lambda reply: _read_number(self._read, reply))
        score = (raw - self._mean) / self._std
        if self._clip is not None:
            score = min(max(score, -self._clip), self._clip)
        return {SCORE: score, "raw": raw, "attempts": float(attempts)}


def _take_last(value: object) -> object:
    """Return the last number of a list, which may be nested: the score after the last token."""
    while isinstance(value, list) and value:
        value = value[-1]
    return value


_READERS: dict[Protocol, Callable[[Any], Any]] = {
    "pooling": lambda reply: _take_last(reply["data"][0]["data"]),
    "classify": lambda reply: _take_last(reply["data"][0]["probs"]),
    "score": lambda reply: reply["data"][0]["score"],
}


def _read_number(read: Callable[[Any], object], reply: object) -> float:
    try:
        value = read(reply)
    except (KeyError, IndexError, TypeError):
        value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadReply("has no score where the protocol says; set protocol to pooling, classify or score")
    return float(value)
