"""Routed experts of vLLM's servers: they are asked for, decoded, and refused if they are missing or of other tokens."""

import asyncio
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rl_megatron.config.generation import VllmConfig
from rl_megatron.generation.interfaces import EngineFailed, Request, Sampling
from rl_megatron.generation.servers.answers import check_answer
from rl_megatron.generation.servers.dialect import Launch
from rl_megatron.generation.vllm.dialect import VllmDialect
from rl_megatron.weight_sync.servers import ServerRefused
from tests.fake_vllm import SETTINGS

DIALECT = VllmDialect(VllmConfig(), 64, "processed_logprobs", records_routing=True)
REQUEST = Request("a", (3, 4, 5), Sampling(2), 7)


def answer(experts):
    encoded = None
    if experts is not None:
        buffer = BytesIO()
        np.save(buffer, experts)
        encoded = b64encode(buffer.getvalue()).decode()
    content = [{"token_id": token, "logprob": -0.5} for token in (6, 7)]
    choice = {
        "token_ids": [6, 7], "logprobs": {"content": content}, "finish_reason": "length", "routed_experts": encoded,
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
    }  # fmt: skip
    return check_answer(REQUEST, DIALECT.parse_response({"choices": [choice]}), 50, "vLLM server 0")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_are_those_of_the_prompt_and_of_all_sampled_tokens_but_the_last(dtype):
    experts = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    assert answer(experts.astype(dtype)).routed_experts.tolist() == experts.tolist()


def test_missing_experts_and_those_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="it has no routed experts"):
        answer(None)
    with pytest.raises(EngineFailed, match=r"shape \(5, 3, 2\), but the model read 4 tokens"):
        answer(np.zeros((5, 3, 2), np.uint8))


def test_a_server_is_started_with_the_flag_and_refused_without_it():
    launch = Launch(0, Path("model"), SimpleNamespace(hf_config={"dtype": "float32"}), "127.0.0.1", 1234)
    command, environment = DIALECT.command(launch)
    assert "--enable-return-routed-experts" in command and environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert (
        "--enable-return-routed-experts" not in VllmDialect(VllmConfig(), 64, "processed_logprobs").command(launch)[0]
    )

    def facts(enabled):
        config = SETTINGS | {"aux_output_config": {"enable_return_routed_experts": enabled}}

        async def get(path):
            return {"version": "0.32.0"} if path == "/version" else {"vllm_config": config}

        return asyncio.run(DIALECT.facts(SimpleNamespace(name="vLLM server 0", get=get)))

    assert facts(True).max_tokens_in_flight == 512
    with pytest.raises(ServerRefused, match="start it with --enable-return-routed-experts"):
        facts(False)
