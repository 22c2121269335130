"""The section `generation`: sampling, the rollout engine, its servers, and the weight sync (rules: engines.py)."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, section

TRIED_VLLM = ("0.32.0",)  # versions of vLLM with which this package was tested
VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's --max-lora-rank
TRIED_SGLANG = ("0.5.23",)
NODE = r"^[^/\s]+:\d{1,5}$"  # a host and a port
MAX_PORT = 65535


@section
class ServersConfig:
    """Inference servers, which a run starts on its nodes, or which already run (`server_urls`, `server_nodes`).

    Attributes:
        key: The key path of the section.
        of_launches: The keys for starting servers. They have no effect with `server_urls`, whose servers run already.
    """

    key: ClassVar[str]
    of_launches: ClassVar[tuple[str, ...]] = ("num_servers", "host", "port", "extra_args")

    # Addresses of servers that run already, such as http://10.0.0.5:8000. Empty: the run starts servers, and ends them.
    server_urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")], ...] = ()
    # Nodes on which `rl-megatron serve` has started num_servers servers each with these settings, as HOST:PORT of a
    # node's first server; its other servers use the following ports.
    server_nodes: tuple[Annotated[str, Field(pattern=NODE)], ...] = ()
    num_servers: Positive = 1  # servers that each node starts
    host: str = "127.0.0.1"  # address that servers bind to. On several nodes: 0.0.0.0, or one that all nodes reach
    port: Positive | None = None  # port of a node's first server; the next ones follow. null: free ports
    # The run fails if a server is not ready within this time, whether the run started it or not.
    startup_timeout_seconds: PositiveFloat = 1800.0
    max_requests_in_flight: Positive = 256  # concurrent requests to one server; further ones wait in the run
    extra_args: tuple[str, ...] = ()  # further arguments of the server's command, passed on as they are

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of all servers that run already; empty if the run starts its servers."""
        nodes = (node.rpartition(":") for node in self.server_nodes)
        served = (f"http://{host}:{int(port) + index}" for host, _, port in nodes for index in range(self.num_servers))
        return (*self.server_urls, *served)

    def check(self) -> None:
        """Check addresses; refuse secrets in `extra_args`, and keys for starting servers beside `server_urls`."""
        self._check_addresses()
        keys = ("--api-key", "--admin-api-key")
        secret = next((argument for argument in self.extra_args if argument.startswith(keys)), None)
        if secret is not None:
            raise ConfigError(
                f"{self.key}.extra_args has {secret.partition('=')[0]}, which everybody on the machine can read; "
                "leave it out: servers that the run starts require the run's own token"
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
    tensor_parallel_size: Positive = 1  # GPUs, or processes on a CPU, over which a server splits the model
    # Share of a GPU's memory that a server takes. null: vLLM's default; on a CPU, see kv_cache_memory_bytes.
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    kv_cache_memory_bytes: Positive | None = None  # memory of the KV cache. null: on a CPU 1 GiB; on a GPU what is left
    max_model_len: Positive | None = None  # most tokens of a prompt and its completion. null: model.max_sequence_length
    max_num_seqs: Positive | None = None  # maximum sequences that a server decodes together. null: vLLM's default
    # Most tokens that a server processes in one step. null: vLLM's default; on a CPU at least 32768, because there the
    # prompt of a request with a seed must not be split.
    max_num_batched_tokens: Positive | None = None
    # no CUDA graphs and no compilation: slower, but ready sooner. null: only on a CPU
    enforce_eager: bool | None = None
    allow_insecure_serialization: bool = False  # must be false, because no refit uses pickle
    # Release the GPUs' memory while the policy trains. null: only if the run starts servers on the policy's GPUs
    # (generation.refit=shared_memory).
    enable_sleep_mode: bool | None = None

    def check(self) -> None:
        """Check the keys; see `ServersConfig.check`."""
        super().check()
        if self.gpu_memory_utilization is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"generation.vllm.gpu_memory_utilization={self.gpu_memory_utilization} does nothing, because "
                f"generation.vllm.kv_cache_memory_bytes={self.kv_cache_memory_bytes} sets the memory; leave one out"
            )


@section
class SglangConfig(ServersConfig):
    """SGLang servers (`generation.engine=sglang`). Keys that SGLang has too are named as its arguments.

    This engine was tested only with a stand-in that answers like SGLang, because SGLang needs a GPU.
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
    tp_size: Positive = 1  # GPUs over which a server splits the model
    # Share of a GPU's memory for weights and KV cache. null: SGLang's default.
    mem_fraction_static: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    context_length: Positive | None = None  # most tokens of a prompt and completion. null: model.max_sequence_length
    # Maximum sequences that a server decodes together. null: SGLang's default.
    max_running_requests: Positive | None = None
    disable_cuda_graph: bool = False  # no CUDA graphs: slower, but ready sooner
    # Send a seed with each request, and use kernels whose results do not depend on the batch. false: SGLang ignores
    # seeds, so a second run samples different tokens.
    enable_deterministic_inference: bool = False


@section
class GenerationConfig:
    """How completions are generated, for rollouts and for evaluation on problems.

    The keys from `num_engines` to `refit_bucket_mb` are for engines in their own processes, such as transformers.
    """

    max_new_tokens: Positive = 32  # most tokens of a completion
    # Divides the logits before sampling; 0: greedy. The evaluation on held-out data is always greedy.
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegative = 0  # sample from the k likeliest tokens; 0: off
    # Sample from the likeliest tokens, up to this total probability; 1: off.
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    # Tokens that end a completion, besides end-of-sequence and the token that ends a turn in the chat template. Each is
    # one token, and may be a special one such as <|im_end|>.
    stop_tokens: tuple[str, ...] = ()
    # Strings that end a completion, of any number of tokens. The completion includes the string.
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # For models with experts: the engine records to which experts it routes each token, and the trainer's logprobs and
    # training route the token to the same experts (router replay).
    router_replay: bool = False
    batch_size: Positive = 256  # sequences decoded together on one data-parallel rank, or in one engine process
    # auto: on a GPU, the embedded engine captures decoding steps in CUDA graphs, unless tensor or pipeline parallelism
    # splits the model, or the model has experts or layers with the gated delta rule. off: every kernel is launched
    # separately.
    cuda_graphs: Literal["auto", "off"] = "auto"
    # Name of a registered rollout engine. embedded: the sharded training model itself generates. transformers: a
    # Hugging Face model in its own processes, which get the policy's weights after each change.
    engine: str = "embedded"
    num_engines: Positive = 1  # engine processes, over which the prompts are divided
    # auto: the CPU if the policy computes on the CPU; otherwise the GPUs after those of the machine's ranks, or rank
    # 0's GPU with refit=shared_memory. cpu: the CPU. cuda: GPUs 0, 1, …. cuda:N: GPUs N, N+1, ….
    engine_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine_timeout_minutes: PositiveFloat = 30.0  # an engine that takes longer to answer counts as dead
    max_engine_restarts: NonNegative = 3  # restarts of dead engines in a stage; one more death ends the run
    # How weights are sent to the engines. collective: one all-reduce per bucket. shared_memory: through memory of the
    # one machine that both run on. disk: through files, for vLLM servers without rl_megatron's plugin. adapter: vLLM or
    # transformers gets the base weights once, and after each update only the adapter that peft trains.
    refit: Literal["collective", "shared_memory", "disk", "adapter"] = "collective"
    # Directory for refit=disk and adapter, at the same path for rank 0 and the servers. null: one in the run's
    # directory.
    refit_directory: str | None = None
    refit_bucket_mb: PositiveFloat = 256.0  # MiB of weights sent together; each side holds two such buckets
    # The logprob check: after each weight sync or restart, the engine first completes this many of the step's prompts,
    # and its logprobs are compared with the trainer's. 0: no check.
    gate_prompts: NonNegative = 4
    # Largest mean |trainer's − engine's logprob| that passes the check, in nats. null: 1e-4 for fp32, 0.1 for bf16.
    gate_limit: PositiveFloat | None = None
    vllm: VllmConfig = field(default_factory=VllmConfig)  # vLLM servers, for engine=vllm
    sglang: SglangConfig = field(default_factory=SglangConfig)  # SGLang servers, for engine=sglang
