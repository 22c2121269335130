"""`VllmDialect`: vLLM's launch command, URLs and JSON.

Requests and answers have token ids instead of text. The path `/inference/v1/generate` reports the weight version
of each span of tokens. The server loads no tokenizer and, unless weight syncs send only an adapter, no weights.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_megatron.config.generation import TRIED_VLLM, VLLM_ADAPTER_RANKS, VllmConfig
from rl_megatron.generation.interfaces import Request
from rl_megatron.generation.servers.access import TokenRequired
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.generation.servers.dialect import Launch, RawAnswer, ServerFacts
from rl_megatron.weight_sync.servers import ServerRefused
from rl_megatron.weight_sync.stock_sync import ADAPTER

MODEL = "policy"  # the name under which a server that we launch serves the model
_GENERATE = "/inference/v1/generate"
_TOKEN_REQUIRED = f"{TokenRequired.__module__}.{TokenRequired.__name__}"
_RECORD_ROUTING = "--enable-return-routed-experts"
_NO_LOGPROB = -9999.0  # vLLM's number for a logprob that is NaN or −∞
_KV_CACHE_BYTES_ON_CPU = 1 << 30
_TOKENS_OF_A_STEP_ON_CPU = 32768


class VllmDialect:
    """The `ServerDialect` of vLLM 0.32."""

    name = "vLLM server"
    key = "generation.vllm"
    health_path = "/health"

    def __init__(
        self,
        settings: VllmConfig,
        max_model_len: int,
        logprobs_mode: str,
        launch_args: Sequence[str] = (),
        launch_environment: Mapping[str, str] | None = None,
        records_routing: bool = False,
        sleeps: bool = False,
        dtype: str = "float32",
        adapter_rank: int | None = None,
    ):
        """Keep the settings.

        Args:
            settings: The configuration section.
            max_model_len: The most tokens of a prompt with its completion.
            logprobs_mode: The value of `--logprobs-mode` with which vLLM returns logprobs as `Completion` defines them.
            launch_args: Arguments that the weight sync needs.
            launch_environment: Environment variables that the weight sync needs.
            records_routing: Whether the servers record the experts of each token.
            sleeps: Whether servers are started with the option to release their memory.
            dtype: The dtype of the policy's weights, in which servers compute.
            adapter_rank: The rank of the adapter that servers apply themselves; None if they get merged weights.
        """
        self._adapter_rank = adapter_rank
        self._settings, self._max_model_len = settings, max_model_len
        self._logprobs_mode, self._launch_args = logprobs_mode, tuple(launch_args)
        self._launch_environment = dict(launch_environment or {})
        self._records_routing, self._sleeps, self._dtype = records_routing, sleeps, dtype

    # --- launching ---

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        """Return the command of `vllm serve` and its environment."""
        settings, on_cpu = self._settings, not launch.devices
        kv_bytes, step_tokens = settings.kv_cache_memory_bytes, settings.max_num_batched_tokens
        if on_cpu and settings.gpu_memory_utilization is None:
            kv_bytes = kv_bytes or _KV_CACHE_BYTES_ON_CPU
        if on_cpu:
            step_tokens = step_tokens or max(_TOKENS_OF_A_STEP_ON_CPU, self._max_model_len)
        options = {
            "host": launch.host,
            "port": launch.port,
            "served-model-name": MODEL,
            "dtype": self._dtype,
            "load-format": "dummy" if launch.weights is None else "safetensors",
            "generation-config": "vllm",
            "max-model-len": self._max_model_len,
            "logprobs-mode": self._logprobs_mode,
            "tensor-parallel-size": settings.tensor_parallel_size,
            "gpu-memory-utilization": settings.gpu_memory_utilization,
            "kv-cache-memory-bytes": kv_bytes,
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": step_tokens,
            "uvicorn-log-level": "warning",
        }
        model = launch.weights or launch.model_directory
        command = [settings.python, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += [part for key, value in options.items() if value is not None for part in (f"--{key}", str(value))]
        command += ["--tokens-only"]  # registers `_GENERATE`, and starts without a tokenizer
        command += [_RECORD_ROUTING] if self._records_routing else []
        eager = on_cpu if settings.enforce_eager is None else settings.enforce_eager
        command += ["--enforce-eager"] if eager else []
        command += ["--enable-sleep-mode"] if self._sleeps else []
        if self._adapter_rank is not None:
            most = next(rank for rank in VLLM_ADAPTER_RANKS if rank >= self._adapter_rank)
            command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(most)]
        command += ["--middleware", _TOKEN_REQUIRED] if launch.token else []
        return [*command, *self._launch_args, *settings.extra_args], self._make_environment(launch)

    def _make_environment(self, launch: Launch) -> dict[str, str]:
        environment = self._launch_environment | {
            "VLLM_SERVER_DEV_MODE": "1",  # registers the paths for weight syncs and pauses
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if self._records_routing else {}),  # the V1 runner cannot record
        }
        if launch.devices:
            return environment
        return environment | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind all servers to the same cores
            "VLLM_CPU_CI_ENV": "1",  # no warm-up, which would compile for minutes
        }

    def explain(self, log: str) -> str | None:
        """Return the remedy for a server that ended before it was ready; see `ServerDialect.explain`."""
        text = log.lower()
        if "cannot be run" in text or "no module named vllm" in text or "no module named 'vllm'" in text:
            return (
                f"generation.vllm.python={self._settings.python} has no vLLM: run scripts/install_vllm.sh, or set the "
                "key to the Python of an environment that has it"
            )
        if "are not supported for now" in text or "does not recognize this architecture" in text:
            return "this vLLM does not know the model's architecture; set generation.engine=transformers or embedded"
        if "model runner v2 requires" in text or "routed-experts capture is not supported" in text:
            return (
                "this vLLM cannot record routed experts here, for example on a CPU; set generation.router_replay=false"
            )
        if "unrecognized arguments" in text or "invalid choice" in text:
            return "vLLM does not accept one of generation.vllm.extra_args, or this version of vLLM was not tried"
        if "out of memory" in text or "available kv cache memory" in text or "no available memory" in text:
            return (
                "the server has too little memory; set generation.vllm.gpu_memory_utilization, kv_cache_memory_bytes "
                "or max_model_len"
            )
        return None

    # --- the state of a server ---

    async def facts(self, server: ServerClient) -> ServerFacts:
        """Check the server's version and settings; see `ServerDialect.facts`."""
        version = (await server.get("/version"))["version"]
        if version.partition("+")[0] not in TRIED_VLLM:
            raise ServerRefused(
                f"{server.name} is vLLM {version}, with which this package was not tried; install one of "
                f"{', '.join(TRIED_VLLM)} (scripts/install_vllm.sh), because vLLM's paths change between versions"
            )
        try:
            config = (await server.get("/server_info?config_format=json"))["vllm_config"]
        except ServerRefused as refusal:
            raise ServerRefused(f"{refusal}; start the server with VLLM_SERVER_DEV_MODE=1") from refusal
        model, scheduler = config["model_config"], config["scheduler_config"]
        if model["logprobs_mode"] != self._logprobs_mode:
            raise ServerRefused(
                f"{server.name} was started with --logprobs-mode {model['logprobs_mode']}, but generation.temperature, "
                f"top_k and top_p need {self._logprobs_mode}: start it with --logprobs-mode {self._logprobs_mode}"
            )
        if model["dtype"] != f"torch.{self._dtype}":
            raise ServerRefused(
                f"{server.name} computes in {model['dtype'].removeprefix('torch.')}, but the policy in {self._dtype}: "
                f"start it with --dtype {self._dtype}"
            )
        if model["max_model_len"] < self._max_model_len:
            raise ServerRefused(
                f"{server.name} takes at most {model['max_model_len']} tokens, but the policy allows "
                f"{self._max_model_len}: start it with --max-model-len {self._max_model_len}, or lower "
                "model.max_sequence_length"
            )
        if self._records_routing and not config["aux_output_config"]["enable_return_routed_experts"]:
            raise ServerRefused(
                f"{server.name} does not record routed experts, which generation.router_replay=true needs: start it "
                f"with {_RECORD_ROUTING}, or set router_replay=false"
            )
        if self._adapter_rank is not None:
            self._check_adapters(server, config["lora_config"])
        if config["device_config"]["device"] != "cpu" or not scheduler["enable_chunked_prefill"]:
            return ServerFacts()
        most = scheduler["max_num_batched_tokens"]
        if most < self._max_model_len:
            why = f"{server.name} computes on a CPU with --max-num-batched-tokens {most}, less than a sequence can have"
            return ServerFacts(takes_seeds=False, why_no_seeds=why)
        # vLLM cannot reset a CPU's random generator, so its engine ends if a step has only a part of a prompt whose
        # request has a seed. If all tokens in flight fit into one step, no prompt is divided.
        return ServerFacts(max_tokens_in_flight=most)

    def _check_adapters(self, server: ServerClient, settings: Mapping[str, Any] | None) -> None:
        most = 0 if settings is None else settings["max_lora_rank"]
        if self._adapter_rank is not None and most < self._adapter_rank:
            raise ServerRefused(
                f"{server.name} takes adapters of rank {most} at most, but peft.r={self._adapter_rank}: start it with "
                f"--enable-lora --max-lora-rank {self._adapter_rank}, or set generation.refit=collective"
            )

    async def pause(self, server: ServerClient) -> None:
        """Stop generation; requests in flight are kept."""
        await server.post("/pause?mode=keep")

    async def resume(self, server: ServerClient) -> None:
        await server.post("/resume")

    async def sleep(self, server: ServerClient) -> None:
        """Drop weights and KV cache. The next weight sync sends all weights."""
        await server.post("/sleep?level=2")

    async def wake(self, server: ServerClient, part: str) -> None:
        await server.post(f"/wake_up?tags={part}")

    # --- completions ---

    def http_request(self, request: Request, with_seed: bool) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        parameters = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # `stop_ids` has all tokens that end a completion
            "logprobs": 0,  # that of the sampled token alone
            "detokenize": False,
        }
        if with_seed and sampling.temperature > 0:
            parameters["seed"] = request.seed
        body = {"request_id": request.request_id, "token_ids": list(request.prompt), "sampling_params": parameters}
        return _GENERATE, body if self._adapter_rank is None else body | {"model": ADAPTER}

    def parse_response(self, body: Any) -> RawAnswer:
        (choice,) = body["choices"]
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        for token, entry in zip(ids, content, strict=False):
            if entry["token_id"] != token:
                raise ValueError(f"a logprob is that of token {entry['token_id']}, but the token is {token}")
        return RawAnswer(
            ids=ids,
            logprobs=[None if _is_missing(entry["logprob"]) else entry["logprob"] for entry in content],
            versions=[(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or ()],
            reason=choice["finish_reason"],
            routed_experts=_decode_experts(choice["routed_experts"]) if self._records_routing else None,
        )


def _is_missing(logprob: float | None) -> bool:
    return logprob is None or logprob <= _NO_LOGPROB


def _decode_experts(encoded: str | None) -> Tensor:
    """Decode a base64 string with a .npy file, and return its array [tokens, layers, k] as int16."""
    if encoded is None:
        raise ValueError("it has no routed experts")
    array = np.load(BytesIO(b64decode(encoded)), allow_pickle=False)
    return torch.from_numpy(array.astype(np.int16))
