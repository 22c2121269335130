"""The section `generation`: sampling, the rollout engine, its servers, and the weight sync (rules: engines.py)."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, section

TRIED_VLLM = ("0.32.0",)  # versions of vLLM with which this package was tried
VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes space for
TRIED_SGLANG = ("0.5.23",)
NODE = r"^[^/\s]+:\d{1,5}$"  # a host and a port
MAX_PORT = 65535


@section
class ServersConfig:
    """Inference servers, which a run starts on its nodes, or which run already (`server_urls`, `server_nodes`).

    Attributes:
        key: Where the section is.
        of_launches: The keys that say how servers are started; servers of `server_urls` were started otherwise.
    """

    key: ClassVar[str]
    of_launches: ClassVar[tuple[str, ...]] = ("num_servers", "host", "port", "extra_args")

    # Addresses of servers that run already, such as http://10.0.0.5:8000. Empty: the run starts servers, and ends them.
    server_urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")], ...] = ()
    # Nodes, as HOST:PORT, on each of which `rl-megatron serve` has started num_servers servers with these settings, the
    # first one at this port and the next ones after it.
    server_nodes: tuple[Annotated[str, Field(pattern=NODE)], ...] = ()
    num_servers: Positive = 1  # servers that each node starts
    host: str = "127.0.0.1"  # address that servers bind to. On several nodes: 0.0.0.0 or an address that nodes reach
    port: Positive | None = None  # port of a node's first server; the next ones follow. null: free ports
    # A server that is not ready within this time ends the run; one that the run did not start is waited for as well.
    startup_timeout_seconds: PositiveFloat = 1800.0
    max_requests_in_flight: Positive = 256  # requests that one server has at the same time; further ones wait here
    extra_args: tuple[str, ...] = ()  # further arguments of the server's command, passed on as they are

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of all servers that run already; empty if the run starts its servers."""
        nodes = (node.rpartition(":") for node in self.server_nodes)
        served = (f"http://{host}:{int(port) + index}" for host, _, port in nodes for index in range(self.num_servers))
        return (*self.server_urls, *served)

    def check(self) -> None:
        """Check the addresses, and that every key has an effect: servers at `server_urls` are started elsewhere."""
        self._check_addresses()
        keys = ("--api-key", "--admin-api-key")
        secret = next((argument for argument in self.extra_args if argument.startswith(keys)), None)
        if secret is not None:
            raise ConfigError(
                f"{self.key}.extra_args has {secret.partition('=')[0]}: servers that are started here ask for the "
                "token of the run, and everybody on the machine can read arguments; leave it out"
            )
        if not self.server_urls:
            return
        default = type(self)()
        for name in self.of_launches:
            value = getattr(self, name)
            if value != getattr(default, name):
                raise ConfigError(
                    f"{self.key}.{name}={value} does nothing: {self.key}.server_urls names servers that run already; "
                    f"leave {name} out and start the servers with this setting, or leave server_urls out"
                )

    def _check_addresses(self) -> None:
        for url in self.server_urls:
            try:
                usable = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
            except ValueError:  # the port is not a number, or above 65535
                usable = False
            if not usable:
                raise ConfigError(
                    f"{self.key}.server_urls has {url!r}, whose host or port is wrong; write it as http://10.0.0.5:8000"
                )
        for node in self.server_nodes:
            if not 0 < int(node.rpartition(":")[2]) <= MAX_PORT + 1 - self.num_servers:
                raise ConfigError(
                    f"{self.key}.server_nodes has {node!r}, whose port is wrong for {self.num_servers} server(s); "
                    "write it as 10.0.0.5:8000"
                )
        if self.server_urls and self.server_nodes:
            raise ConfigError(
                f"{self.key}.server_nodes and {self.key}.server_urls both name servers; leave one of them out"
            )
        for name, addresses in (("server_urls", self.server_urls), ("server_nodes", self.server_nodes)):
            if len(set(addresses)) < len(addresses):
                raise ConfigError(f"{self.key}.{name}={list(addresses)} names a server twice; name each once")


@section
class VllmConfig(ServersConfig):
    """vLLM servers (`generation.engine=vllm`). Keys that vLLM has too are named as its arguments, and mean the same."""

    key: ClassVar[str] = "generation.vllm"
    of_launches: ClassVar[tuple[str, ...]] = (
        *ServersConfig.of_launches,
        "python",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enforce_eager",
        "enable_sleep_mode",
    )

    # Python of the environment that has vLLM, which scripts/install_vllm.sh makes. A relative path is relative to the
    # current directory.
    python: str = ".venv-vllm/bin/python"
    tensor_parallel_size: Positive = 1  # GPUs, or processes on a CPU, among which a server divides the model
    # Share of a GPU's memory that a server takes. null: vLLM's default; on a CPU, see kv_cache_memory_bytes.
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    kv_cache_memory_bytes: Positive | None = None  # memory of the KV cache. null: on a CPU 1 GiB; on a GPU what is left
    max_model_len: Positive | None = None  # most tokens of a prompt and its completion. null: model.max_sequence_length
    max_num_seqs: Positive | None = None  # most sequences that a server decodes together. null: vLLM's default
    # Most tokens that a server processes in one step. null: vLLM's default; on a CPU at least 32768, because there a
    # prompt with a seed must not be divided.
    max_num_batched_tokens: Positive | None = None
    enforce_eager: bool | None = None  # no CUDA graphs and no compilation: slower, but ready sooner. null: on a CPU
    allow_insecure_serialization: bool = False  # always false: no way of sending weights needs pickles
    # Release the GPUs' memory while the policy trains. null: if servers compute on the policy's GPUs, which
    # generation.refit decides.
    enable_sleep_mode: bool | None = None

    def check(self) -> None:
        """Check the keys; see `ServersConfig.check`."""
        super().check()
        if self.gpu_memory_utilization is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"generation.vllm.gpu_memory_utilization={self.gpu_memory_utilization} does nothing, because "
                f"generation.vllm.kv_cache_memory_bytes={self.kv_cache_memory_bytes} decides the memory; leave one out"
            )


@section
class SglangConfig(ServersConfig):
    """SGLang servers (`generation.engine=sglang`). Keys that SGLang has too are named as its arguments.

    These servers were tried only as a stand-in that answers as SGLang does, because SGLang needs a GPU.
    """

    key: ClassVar[str] = "generation.sglang"
    of_launches: ClassVar[tuple[str, ...]] = (
        *ServersConfig.of_launches,
        "python",
        "tp_size",
        "mem_fraction_static",
        "context_length",
        "max_running_requests",
        "disable_cuda_graph",
        "enable_deterministic_inference",
    )

    # Python of the environment that has SGLang. A relative path is relative to the current directory.
    python: str = ".venv-sglang/bin/python"
    tp_size: Positive = 1  # GPUs among which a server divides the model
    # Share of a GPU's memory for weights and KV cache. null: SGLang's default.
    mem_fraction_static: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    context_length: Positive | None = None  # most tokens of a prompt and completion. null: model.max_sequence_length
    # Most sequences that a server decodes together. null: SGLang's default.
    max_running_requests: Positive | None = None
    disable_cuda_graph: bool = False  # no CUDA graphs: slower, but ready sooner
    # Give each request a seed, with kernels that do not depend on the batch. Without it SGLang takes no seeds, so that
    # another run samples other tokens.
    enable_deterministic_inference: bool = False


@section
class GenerationConfig:
    """How completions are generated, for the rollouts of grpo and ppo and to evaluate on problems.

    The keys from `num_engines` to `refit_bucket_mb` are for engines in their own processes, such as transformers.
    """

    max_new_tokens: Positive = 32  # most tokens of a completion
    # Divides the logits before sampling; 0: greedy. The evaluation on the stage's own problems is always greedy.
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegative = 0  # sample from the k likeliest tokens; 0: off
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # sample from the likeliest tokens of this total mass; 1: off
    # Tokens that end a completion, besides end-of-sequence and the token that ends a turn in the chat template. Each is
    # one token, and may be a special one such as <|im_end|>.
    stop_tokens: tuple[str, ...] = ()
    # Texts of any number of tokens that end a completion, which includes them.
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # For models with experts: the engine records to which experts it routes each token, and the trainer's logprobs and
    # training route the token to the same experts (router replay).
    router_replay: bool = False
    batch_size: Positive = 256  # sequences decoded together on one data-parallel rank, or in one engine process
    # auto: on a GPU, the embedded engine captures decoding steps in CUDA graphs, unless tensor or pipeline parallelism
    # splits the model, or it has experts or layers with the gated delta rule. off: it starts each kernel by itself.
    cuda_graphs: Literal["auto", "off"] = "auto"
    # Name of a registered rollout engine. embedded: the sharded training model itself generates. transformers: a
    # Hugging Face model in its own processes, which get the policy's weights after each change.
    engine: str = "embedded"
    num_engines: Positive = 1  # engine processes, among which the prompts are divided
    # auto: the CPU if the policy computes on the CPU; otherwise the GPUs after those of the machine's ranks, or rank
    # 0's GPU with refit=shared_memory. cpu: the CPU. cuda: GPUs 0, 1, …. cuda:N: GPUs N, N+1, ….
    engine_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine_timeout_minutes: PositiveFloat = 30.0  # an engine that takes longer over an answer counts as dead
    max_engine_restarts: NonNegative = 3  # engine deaths that a stage survives by a restart; one more ends the run
    # How weights reach the engines. collective: one all-reduce per bucket; shared_memory: on one machine only; disk:
    # in files, for vLLM servers without our plugin. adapter: vLLM or transformers gets the base once and then the
    # adapter that peft trains, which it applies itself.
    refit: Literal["collective", "shared_memory", "disk", "adapter"] = "collective"
    # Directory that rank 0 and the servers reach under the same path, for refit=disk and adapter. null: the run's own.
    refit_directory: str | None = None
    refit_bucket_mb: PositiveFloat = 256.0  # MiB of weights sent together; each side holds two such buckets
    # The logprob check: once for each copy of the weights that an engine serves, it completes this many of the step's
    # prompts, and its logprobs are compared with the trainer's before anything is learned from it. 0: no check.
    gate_prompts: NonNegative = 4
    # Largest mean |trainer's − engine's logprob| of that check, in nats; more stops the run. null: fp32 1e-4, bf16 0.1.
    gate_limit: PositiveFloat | None = None
    vllm: VllmConfig = field(default_factory=VllmConfig)  # vLLM servers, for engine=vllm
    sglang: SglangConfig = field(default_factory=SglangConfig)  # SGLang servers, for engine=sglang
