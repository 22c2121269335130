"""`SglangDialect`: SGLang's launch command, URLs and JSON.

Requests and answers have token ids instead of text. The native path `/generate` reports the weight version of each
span of tokens. The server loads no tokenizer, and no weights from disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.config.generation import TRIED_SGLANG, SglangConfig
from rl_megatron.generation.interfaces import Request
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.generation.servers.dialect import Launch, RawAnswer, ServerFacts
from rl_megatron.weight_sync.servers import ServerRefused

# This module was tried with a stand-in that imitates `TRIED_SGLANG`, not with SGLang itself (docs/rollout_engines.md).
_LAUNCH = Path(__file__).with_name("launch.py")
_ID_END = "/"  # SGLang aborts all requests whose ids *begin* with the given one; so no id may begin with another


class SglangDialect:
    """The `ServerDialect` of SGLang 0.5.23."""

    name = "SGLang server"
    key = "generation.sglang"
    health_path = "/health"

    def __init__(self, settings: SglangConfig, context_length: int):
        """Keep the settings; a prompt with its completion has at most `context_length` tokens."""
        self._settings, self._context_length = settings, context_length

    # --- launching ---

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs `sglang.launch_server`, and its environment, without the token."""
        settings = self._settings
        options = {
            "model-path": launch.model_directory,
            "load-format": "dummy",
            "host": launch.host,
            "port": launch.port,
            "dtype": launch.plan.hf_config["dtype"],
            "context-length": self._context_length,
            "tp-size": settings.tp_size,
            "mem-fraction-static": settings.mem_fraction_static,
            "max-running-requests": settings.max_running_requests,
            "log-level": "warning",
        }
        flags = {
            "skip-tokenizer-init": True,
            "disable-cuda-graph": settings.disable_cuda_graph,
            "enable-deterministic-inference": settings.enable_deterministic_inference,
        }
        command = [settings.python, str(_LAUNCH)]
        command += [part for key, value in options.items() if value is not None for part in (f"--{key}", str(value))]
        command += [f"--{flag}" for flag, is_set in flags.items() if is_set]
        # By default, SGLang's health check generates a token, for which it would wait while the server is paused.
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        return [*command, *settings.extra_args], environment

    def explain(self, log: str) -> str | None:
        """Return the remedy for a server that ended before it was ready; see `ServerDialect.explain`."""
        text = log.lower()
        if "cannot be run" in text or "no module named sglang" in text or "no module named 'sglang'" in text:
            return (
                f"generation.sglang.python={self._settings.python} has no SGLang: set the key to the Python of an "
                "environment in which SGLang is installed"
            )
        if "are not supported for now" in text or "does not recognize this architecture" in text:
            return "this SGLang does not know the model's architecture; set generation.engine=transformers or embedded"
        if "unrecognized arguments" in text or "invalid choice" in text:
            return "SGLang does not accept one of generation.sglang.extra_args, or this version of it was not tried"
        if "out of memory" in text or "not enough memory" in text:
            return "the server has too little memory; set generation.sglang.mem_fraction_static or context_length"
        return None

    # --- the state of a server ---

    async def facts(self, server: ServerClient) -> ServerFacts:
        """Check the server's version and settings; see `ServerDialect.facts`."""
        info = await server.get("/server_info")
        if info["version"] not in TRIED_SGLANG:
            raise ServerRefused(
                f"{server.name} is SGLang {info['version']}, with which this package was not tried; install one of "
                f"{', '.join(TRIED_SGLANG)}, because SGLang's paths change between versions"
            )
        longest = info.get("context_length")
        if longest is not None and longest < self._context_length:
            raise ServerRefused(
                f"{server.name} takes at most {longest} tokens, but the policy allows {self._context_length}: start it "
                f"with --context-length {self._context_length}, or lower model.max_sequence_length"
            )
        if info.get("enable_deterministic_inference"):
            return ServerFacts()
        why = f"{server.name} was started without --enable-deterministic-inference"
        return ServerFacts(takes_seeds=False, why_no_seeds=why)

    async def pause(self, server: ServerClient) -> None:
        """Stop generation. Requests in flight wait, and drop their keys and values, because new weights follow."""
        await server.post("/pause_generation", {"mode": "retract"})

    async def resume(self, server: ServerClient) -> None:
        await server.post("/continue_generation", {})

    async def sleep(self, server: ServerClient) -> None:
        """Release the memory of weights and KV cache. The next weight sync sends all weights."""
        await server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def wake(self, server: ServerClient, part: str) -> None:
        await server.post("/resume_memory_occupation", {"tags": [part]})

    # --- completions ---

    def http_request(self, request: Request, with_seed: bool) -> tuple[str, dict[str, object]]:
        sampling = request.sampling
        parameters: dict[str, object] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if with_seed and sampling.temperature > 0:
            parameters["sampling_seed"] = request.seed
        return "/generate", {
            "rid": request.request_id + _ID_END,
            "input_ids": list(request.prompt),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,  # logprobs of the completion alone
        }

    def parse_response(self, body: Any) -> RawAnswer:
        ids, about = body["output_ids"], body["meta_info"]
        entries = about.get("output_token_logprobs") or []
        for token, entry in zip(ids, entries, strict=False):
            if entry[1] != token:
                raise ValueError(f"a logprob is that of token {entry[1]}, but the token is {token}")
        spans = about.get("weight_versions") or []
        return RawAnswer(
            ids=ids,
            logprobs=[entry[0] for entry in entries],
            versions=[(span["version"], span["start"], span["end"]) for span in spans if span["end"] > span["start"]],
            reason=about["finish_reason"]["type"],
        )
