"""`ServerDialect`: what differs between kinds of inference servers: launch commands, URLs, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rl_megatron.generation.interfaces import Request
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.weight_sync.buckets import RefitPlan


@dataclass(frozen=True)
class RawAnswer:
    """A server's answer before it is checked. The attributes have the names of `Completion`'s.

    Attributes:
        ids: The completion's token ids, its stop token included.
        logprobs: The logprob of each token as the server gave it. It may be NaN; None means that it is missing.
        versions: (version, start, end) of each span of tokens, as the server gave them.
        reason: Why the completion ended: "stop", "length", "abort", or the server's word for another reason.
        routed_experts: The experts of each token that the model read, [tokens, layers, k]; None if not requested.
    """

    ids: Sequence[int]
    logprobs: Sequence[float | None]
    versions: Sequence[tuple[Any, int, int]]
    reason: str
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class ServerFacts:
    """The properties that a server reports once it is ready.

    Attributes:
        takes_seeds: Whether requests may have seeds.
        max_tokens_in_flight: The maximum number of tokens in the prompts and completions of all requests in flight;
            None if there is no limit.
        why_no_seeds: Why requests cannot have seeds, for a log line.
    """

    takes_seeds: bool = True
    max_tokens_in_flight: int | None = None
    why_no_seeds: str = ""


@dataclass(frozen=True)
class Launch:
    """The settings of a server that this node launches.

    Attributes:
        index: The number of the server on this node.
        model_directory: A directory with the model's config.json, but without weights and tokenizer.
        plan: The model and the weights that will be sent.
        host: The address to which the server binds.
        port: The port at which it listens.
        devices: The numbers of the node's GPUs on which it computes; empty for the CPU.
        token: The token that the server requires in every request, and gets in the environment variable
            `access.TOKEN`; empty for none.
        weights: A directory with config.json and the weights that it starts with; None if all weights are sent later.
    """

    index: int
    model_directory: Path
    plan: RefitPlan
    host: str
    port: int
    devices: tuple[int, ...] = ()
    token: str = ""
    weights: Path | None = None


class ServerDialect(Protocol):
    """One kind of inference server: its launch command, its URLs and its JSON. It has no state.

    Attributes:
        name: The name of such a server in messages, such as "vLLM server".
        key: The configuration section of the engine, such as "generation.vllm".
        health_path: The path that answers 200 once the server is ready.
    """

    name: str
    key: str
    health_path: str

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts a server, and the environment variables to set for it.

        The caller keeps the values of variables that the user has set.
        """
        ...

    def explain(self, log: str) -> str | None:
        """Return a remedy, based on the log, for a server that ended before it was ready; None if none is known."""
        ...

    async def facts(self, server: ServerClient) -> ServerFacts:
        """Ask a ready server for its version, model and settings.

        Raises:
            ServerRefused: Its version was not tried, or a setting makes its answers unusable.
            ServerDied: There is no answer.
        """
        ...

    def http_request(self, request: Request, with_seed: bool) -> tuple[str, dict[str, object]]:
        """Return the path and the JSON body for a request. It may be sent again if there is no answer."""
        ...

    def parse_response(self, body: object) -> RawAnswer:
        """Parse the answer to an `http_request`.

        Raises:
            KeyError: The answer has another form. IndexError, TypeError and ValueError mean the same.
        """
        ...

    async def pause(self, server: ServerClient) -> None:
        """Stop generation. Requests in flight wait."""
        ...

    async def resume(self, server: ServerClient) -> None:
        """Continue generation after `pause`."""
        ...

    async def sleep(self, server: ServerClient) -> None:
        """Release the memory of weights, keys and values. The server has no requests then."""
        ...

    async def wake(self, server: ServerClient, part: str) -> None:
        """Allocate memory again: `part` is "weights" before a weight sync, and "kv_cache" before generation."""
        ...
