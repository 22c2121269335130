"""Operations: what all ranks do together for a request. They are plain data, which rank 0 sends to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_megatron.config.peft import LoraConfig
from rl_megatron.service.datums import Datum
from rl_megatron.service.sampling import SamplePrompt
from rl_megatron.training.adapter_runs import AdamParams


@dataclass(frozen=True)
class Create:
    """Make a run with initial weights or, with `path`, with saved ones."""

    config: LoraConfig
    seed: int
    path: str | None = None
    with_optimizer: bool = False


@dataclass(frozen=True)
class ComputeLoss:
    """Compute a loss of datums and, with `backward`, add its gradient to the run's."""

    data: Sequence[Datum]
    loss_fn: str
    options: Mapping[str, object]
    backward: bool


@dataclass(frozen=True)
class Step:
    """Take an optimizer step."""

    params: AdamParams


@dataclass(frozen=True)
class Save:
    """Write a run's weights to the directory `path`; with `overwrite`, also if it exists."""

    path: str
    manifest: Mapping[str, object]
    with_optimizer: bool
    overwrite: bool = False


@dataclass(frozen=True)
class Load:
    """Replace a run's weights by saved ones."""

    path: str
    with_optimizer: bool


@dataclass(frozen=True)
class Unload:
    """Drop a run."""


@dataclass(frozen=True)
class Fail:
    """Answer a request that cannot be executed with an error, in its turn: the run's later requests wait for it."""

    message: str


@dataclass(frozen=True)
class Restore:
    """Make a run with the state in a directory that `Executor.keep` wrote."""

    config: LoraConfig
    path: str


@dataclass(frozen=True)
class Sample:
    """Sample completions of a prompt with saved weights, or with the base model if `path` is None."""

    path: str | None
    prompt: SamplePrompt


Work = Create | ComputeLoss | Step | Save | Load | Unload | Fail | Restore | Sample


@dataclass(frozen=True)
class Operation:
    """Work for a request.

    Attributes:
        request_id: The request, whose future gets the result.
        run: The training run; None for samples.
        work: What is done.
        answer: JSON values of the answer that are known before.
    """

    request_id: str
    run: str | None
    work: Work
    answer: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of an operation, on rank 0.

    Attributes:
        body: The answer: JSON or a protobuf message. For an error, its message.
        is_protobuf: Whether the answer is a protobuf message.
        error: "user" if the client has caused an error, "server" if not, None if there is none.
    """

    body: bytes
    is_protobuf: bool = False
    error: str | None = None
