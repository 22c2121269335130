"""The JSON bodies of requests, with their limits. Fields that a server of this API may ignore are ignored."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rl_megatron.config.errors import ConfigError, shorten_value
from rl_megatron.training.adapter_runs import AdamParams

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
MOST_TOP_TOKENS = 1000
"""The most tokens of one position whose logprobs a request may ask for."""
Number = Annotated[int, Field(ge=0, lt=2**31)]
SavedName = Annotated[str, Field(pattern=_NAME)]


class Body(BaseModel):
    """The base of all bodies: values of another type or unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    type: str = ""


BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Return the body of a request in JSON.

    Raises:
        ValueError: A field is missing, unknown or wrong. The message names the first one.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"])) or "the body"
        value = "" if first["type"] == "missing" else f"={shorten_value(first['input'])}"
        raise ValueError(f"{name}{value}: {first['msg']}") from error


class CreateSession(Body):
    """Open a session."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class SessionOnly(Body):
    """A session."""

    session_id: str


class LoraSettings(Body):
    """The adapter of a new training run."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(Body):
    """The optimizer of a new training run; there is only adamw."""


class CreateModel(Body):
    """Begin a training run."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice(type="adamw")

    @model_validator(mode="after")
    def _check(self) -> CreateModel:
        if self.optimizer_config.type not in ("", "adamw"):
            raise ValueError(f"optimizer_config.type={self.optimizer_config.type!r}: this server has adamw")
        return self


class ModelOnly(Body):
    """A training run."""

    model_id: str


class Adam(Body):
    """The hyperparameters of an optimizer step."""

    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-30, allow_inf_nan=False)] = 1e-12  # AdamW divides by it where all gradients are 0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def params(self) -> AdamParams:
        return AdamParams(**self.model_dump(exclude={"type"}))


class Numbered(Body):
    """A request of a training run: what is read of it before the rest is checked, in its turn."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    model_id: str
    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class OptimStep(Body):
    """Take an optimizer step."""

    model_id: str
    seq_id: Number
    adam_params: Adam


class SaveBody(Body):
    """Save weights."""

    model_id: str
    seq_id: Number
    path: SavedName | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeights(SaveBody):
    """Save weights with the optimizer's state."""

    overwrite: bool = False


class SaveForSampler(SaveBody):
    """Save weights to sample from."""

    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"


class LoadHead(Body):
    """A request to load weights: what is read of it before the rest is checked, in its turn."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None


class LoadWeights(Body):
    """Load saved weights into a run, or begin a run with them."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Body):
    """Make a sampler."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(Body):
    """Get a number for a clone of a sampler."""

    sampling_session_id: str


class SamplingParams(Body):
    """How completions are sampled."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TextChunk(Body):
    """Tokens of a prompt. Other kinds of chunks are refused."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Prompt(Body):
    """A prompt."""

    chunks: list[TextChunk]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class TargetTokens(Body):
    """The tokens whose logprobs are wanted at positions of a prompt, dense or sparse."""

    data: list[int]
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def to_array(self, length: int) -> np.ndarray:
        """Return the tokens [length, K], with -1 where there is none.

        Raises:
            ValueError: The parts do not fit.
        """
        shape = tuple(self.shape or (len(self.data),))
        if len(shape) != 2 or shape[0] != length or not 1 <= shape[1] <= MOST_TOP_TOKENS:
            raise ValueError(
                f"target_prompt_logprobs.shape={list(shape)} must be [{length}, K], with K from 1 to {MOST_TOP_TOKENS}"
            )
        if self.sparse_crow_indices is None:
            if len(self.data) != shape[0] * shape[1]:
                raise ValueError(f"target_prompt_logprobs has {len(self.data)} tokens for the shape {list(shape)}")
            return np.array(self.data, dtype=np.int64).reshape(shape)
        starts, columns = np.array(self.sparse_crow_indices), np.array(self.sparse_col_indices or [], dtype=np.int64)
        counts = np.diff(starts)
        fits = len(starts) == length + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(self.data)
        if not fits or (counts < 0).any() or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
            raise ValueError("target_prompt_logprobs is sparse, and its data, row pointers and columns do not fit")
        dense = np.full(shape, -1, dtype=np.int64)
        dense[np.repeat(np.arange(length), counts), columns] = self.data
        return dense


class Sample(Body):
    """Sample completions of a prompt."""

    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_TOKENS)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_TOKENS)] = 0
    target_prompt_logprobs: TargetTokens | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Sample:
        if self.prompt_alt_tokens_k:
            raise ValueError("prompt_alt_tokens_k is not supported by this server")
        if self.record_stability_info:
            raise ValueError("record_stability_info is not supported by this server: it has no stable_reinforce loss")
        if self.prompt_logprobs_last_n is not None and not self.prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n needs prompt_logprobs")
        return self


class RetrieveFuture(Body):
    """Wait for the result of a request."""

    request_id: str
    allow_metadata_only: bool = False


class FuturesTarget(Body):
    """The clone of a sampler."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFutures(Body):
    """Wait until a request of a sampler is done."""

    target: FuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class RequestOnly(Body):
    """A request."""

    request_id: str


class WeightsPath(Body):
    """Saved weights."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    tinker_path: str


class Refused(Exception):
    """The error that answers a request.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


USER_ERRORS = (ConfigError, ValueError, FloatingPointError)
"""Errors of an operation that the client has caused, which leave everything as it was."""
