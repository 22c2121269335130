"""SGLang's command, requests and answers, and the servers that are refused with the remedy."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_megatron.config.generation import SglangConfig
from rl_megatron.generation.interfaces import Request, Sampling
from rl_megatron.generation.servers.access import TOKEN
from rl_megatron.generation.servers.dialect import Launch
from rl_megatron.generation.sglang.dialect import SglangDialect
from rl_megatron.weight_sync.buckets import RefitPlan
from rl_megatron.weight_sync.servers import ServerRefused
from rl_megatron.weight_sync.sglang import check_server

PLAN = RefitPlan({"dtype": "float32", "architectures": ["LlamaForCausalLM"]}, 50, ())
INFO = {"version": "0.5.23", "context_length": 64, "dp_size": 1, "pp_size": 1, "tp_size": 1, "dtype": "float32"}


def dialect(**settings):
    return SglangDialect(SglangConfig(**settings), 64)


class Telling:
    """A server that answers /server_info."""

    name = "SGLang server 0 (http://x)"

    def __init__(self, **info):
        self._info = INFO | info

    async def get(self, path):
        assert path == "/server_info"
        return self._info


def facts(**info):
    return asyncio.run(dialect().facts(Telling(**info)))


def test_a_version_that_was_not_tried_and_a_short_context_are_refused():
    with pytest.raises(ServerRefused, match=r"is SGLang 0.4.1, with which this package was not tried; .* 0\.5\.23"):
        facts(version="0.4.1")
    with pytest.raises(ServerRefused, match="takes at most 32 tokens, but the policy allows 64: start it with --con"):
        facts(context_length=32)


def test_seeds_are_sent_only_to_servers_that_obey_them():
    assert facts(enable_deterministic_inference=True).takes_seeds
    told = facts(enable_deterministic_inference=False)
    assert not told.takes_seeds and "without --enable-deterministic-inference" in told.why_no_seeds
    request = Request("a", (3,), Sampling(4, 0.7), 9)
    assert dialect().http_request(request, True)[1]["sampling_params"]["sampling_seed"] == 9
    assert "sampling_seed" not in dialect().http_request(request, False)[1]["sampling_params"]
    greedy = Request("a", (3,), Sampling(4, 0.0), 9)
    assert "sampling_seed" not in dialect().http_request(greedy, True)[1]["sampling_params"]


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"dtype": "bfloat16"}, "computes in bfloat16, but the policy in float32; start it with --dtype float32"),
        ({"dp_size": 2}, "has dp_size=2, but its endpoints for weights need dp_size=1"),
        ({"pp_size": 2}, "has pp_size=2"),
    ],
)
def test_a_server_that_cannot_take_the_weights_is_refused(info, said):
    with pytest.raises(ServerRefused, match=said):
        check_server("SGLang server 0", INFO | info, {}, PLAN)
    with pytest.raises(ServerRefused, match="serves Qwen2ForCausalLM, but the policy is LlamaForCausalLM"):
        check_server("SGLang server 0", INFO, {"architectures": ["Qwen2ForCausalLM"]}, PLAN)
    check_server("SGLang server 0", INFO, {"architectures": ["LlamaForCausalLM"]}, PLAN)


def test_the_command_has_the_settings_and_neither_a_tokenizer_nor_weights():
    command, _ = dialect(tp_size=2, disable_cuda_graph=True, extra_args=("--x", "1")).command(
        Launch(0, Path("/model"), PLAN, "127.0.0.1", 30000, (0, 1))
    )
    text = " ".join(command)
    for part in ("/sglang/launch.py ", "--model-path /model", "--load-format dummy", "--skip-tokenizer-init"):
        assert part in text
    assert "--tp-size 2" in text and "--disable-cuda-graph" in text and text.endswith("--x 1")
    assert "None" not in text


# What SGLang's module is, as far as it matters: its processes are spawned, and so import it again.
SPAWNS = """
import argparse
import json, multiprocessing, os, sys

def report(queue):
    queue.put([__name__, sys.argv[1:]])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=report, args=(queue,))
    process.start()
    child = queue.get()
    process.join()
    command = open(f"/proc/{os.getpid()}/cmdline").read()
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key", default="")
    key, others = parser.parse_known_args()
    print(json.dumps({"key": key.api_key, "others": others, "child": child, "command": command, "path": sys.path}))
"""


@pytest.mark.parametrize("token", ["the-token-of-the-run", "-the-token", ""])
def test_the_token_is_the_key_of_the_server_and_is_not_in_its_command(tmp_path, token):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(SPAWNS)
    launch = Launch(0, Path("/model"), PLAN, "0.0.0.0", 30000, (), token)
    command, environment = dialect(python=sys.executable).command(launch)
    assert not any("token" in part and "tokenizer" not in part for part in command)
    variables = environment | {"PYTHONPATH": str(tmp_path), TOKEN: token}
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True).stdout
    told = json.loads(printed)
    assert told["key"] == token and told["others"] == command[2:]
    assert told["child"] == ["__mp_main__", command[2:] + ([f"--api-key={token}"] if token else [])]
    assert "the-token" not in told["command"]
    assert not any(path.endswith("generation/sglang") for path in told["path"]), "its engine.py would be found"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (".venv-sglang/bin/python cannot be run: No such file", "generation.sglang.python=.venv-sglang/bin/python has"),
        ("No module named sglang", "has no SGLang"),
        ("error: unrecognized arguments: --y", "does not accept one of generation.sglang.extra_args"),
        ("torch.OutOfMemoryError: CUDA out of memory", "set generation.sglang.mem_fraction_static"),
        ("Model architectures ['X'] are not supported for now", "set generation.engine=transformers or embedded"),
    ],
)
def test_a_server_that_ended_is_explained(log, said):
    assert said in str(dialect().explain(log))


def body(**about):
    return {"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "length"}, **about}}


def test_an_answer_has_ids_logprobs_and_versions_and_a_logprob_of_another_token_is_an_error():
    pairs = [[-0.5, 5, None], [None, 6, None]]
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 2}]
    answer = dialect().parse_response(body(output_token_logprobs=pairs, weight_versions=spans))
    assert (answer.ids, answer.logprobs, answer.reason) == ([5, 6], [-0.5, None], "length")
    assert answer.versions == [("3", 0, 2)]
    with pytest.raises(ValueError, match="a logprob is that of token 7, but the token is 6"):
        dialect().parse_response(body(output_token_logprobs=[[-0.5, 5, None], [-0.5, 7, None]]))
    assert dialect().parse_response(body()).logprobs == []  # which `checked` refuses
