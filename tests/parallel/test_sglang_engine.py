"""SGLang's paths, over a stand-in that answers as SGLang does (tests/stand_ins/sglang): weights, requests, faults."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rl_megatron.config.loading.load import load_config
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.engines import build_engine
from rl_megatron.generation.interfaces import EngineFailed, Request, Sampling, WeightSpan
from rl_megatron.generation.logprob_check import EngineMismatch
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import WeightExporter
from tests.child_processes import servers
from tests.parallel.layouts import MODEL, build_policy
from tests.parallel.test_generation import SAMPLINGS, prompts
from tests.parallel.test_transformers_engine import dropping, learn, logprob_check, patched, refusal
from tests.stand_ins import python_with_sglang

LLAMA = dataclasses.replace(MODEL, qk_norm=False, qkv_bias=False)
GREEDY, SAMPLED = SAMPLINGS["greedy"], dataclasses.replace(SAMPLINGS["top-k and top-p"], stop_strings=None)
UP = "model.layers.2.mlp.up_proj.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"


@contextmanager
def serving(parallel: dict, directory: Path, **settings):
    """Yield a policy and its engine, which serves the policy's first weights."""
    policy = build_policy(parallel, LLAMA)
    python = python_with_sglang(directory) if policy.topology.rank == 0 else "unused"
    settings |= {"python": python, "enable_deterministic_inference": True, "extra_args": ["--separate-head"]}
    chosen = {"generation": {"engine": "sglang", "refit_bucket_mb": 0.05, "sglang": settings}}
    stage = dataclasses.replace(load_config(["data=arithmetic"], settings=chosen).first, model=LLAMA)
    engine = build_engine(policy, stage, directory)
    try:
        engine.sync()
        yield policy, engine
    finally:
        engine.close()


def stand_in(engine, **settings) -> list:
    """Set faults in the stand-ins, on rank 0, and return the paths that the last one was called with."""
    called: list = []
    for server in servers():
        command = server.cmdline()
        url = f"http://127.0.0.1:{command[command.index('--port') + 1]}/stand_in"
        request = urllib.request.Request(url, json.dumps(settings).encode())
        with urllib.request.urlopen(request, timeout=20) as answer:
            called = json.loads(answer.read())
    return called


def greedy_difference(policy, engine) -> float:
    """Return the largest |engine's − embedded engine's logprob|, after checking that the tokens are the same."""
    found, wanted = (generate(each, prompts(), GREEDY, seed=3) for each in (engine, EmbeddedEngine(policy)))
    assert torch.equal(found["input_ids"], wanted["input_ids"])
    assert found["weight_version"].unique().tolist() == [policy.weight_version]
    return (found["generation_logprobs"] - wanted["generation_logprobs"]).abs().max().item()


def update(policy) -> None:
    """Change every weight a little."""
    with torch.no_grad():
        for model_chunk in policy.model.model_chunks:
            for parameter in model_chunk.parameters():
                parameter.add_(0.01)
    policy.model.version += 1


def use_servers(parallel: dict, settings: dict, directory: Path) -> dict:
    """Start the servers once and use them in all the ways that the tests below check; return what they answered."""
    found: dict = {"differences": []}
    with serving(parallel, directory, **settings) as (policy, engine):
        found["differences"].append(greedy_difference(policy, engine))
        found["gate"] = logprob_check(policy).run(engine, prompts())
        found["ratios"] = learn(policy, generate(engine, prompts(), SAMPLED, seed=1))
        found["stale"] = refusal(EngineFailed, generate, engine, prompts(), GREEDY, 1)
        found["costs"] = engine.sync()
        found["differences"].append(greedy_difference(policy, engine))

        # Faults of ours, and of the servers.
        update(policy)
        with patched(WeightExporter, "fill", dropping(UP)):
            found["dropped here"] = refusal(WeightsRefused, engine.sync)
        found["halted"] = refusal(EngineFailed, generate, engine, prompts(), GREEDY, 1)
        engine.sync()
        found["differences"].append(greedy_difference(policy, engine))
        for name, faults in (
            ("dropped there", {"skipped": [DOWN]}),
            ("head left behind", {"skipped": ["lm_head.weight"]}),
            ("stale version", {"reported": "0"}),
        ):
            update(policy)
            stand_in(engine, **faults)
            found[name] = refusal(WeightsRefused, engine.sync)
            stand_in(engine, skipped=[], reported=None)
            engine.sync()
        update(policy)
        stand_in(engine, altered=[DOWN])
        engine.sync()
        found["altered there"] = refusal(EngineMismatch, logprob_check(policy).run, engine, prompts())
        stand_in(engine, altered=[])
        update(policy)
        engine.sync()
        found["differences"].append(greedy_difference(policy, engine))
        found["called"] = stand_in(engine)
        found["without the token"] = [status_without_the_token(server) for server in servers()]
    return found


def status_without_the_token(server) -> int:
    """Return what a server answers to a request that would abort all others."""
    command = server.cmdline()
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}/abort_request"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b'{"abort_all": true}'), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(
    scope="module",
    params=[("tensor 2, two servers", 2, {"tensor": 2}, {"num_servers": 2}), ("tp_size 2", 1, {}, {"tp_size": 2})],
    ids=lambda param: param[0],
)
def found(request, ranks, tmp_path_factory):
    _, world_size, parallel, settings = request.param
    return ranks.run(world_size, use_servers, parallel, settings, tmp_path_factory.mktemp("sglang"))


def test_the_servers_generate_what_the_policy_does_after_each_weight_sync(found):
    for each in found:
        assert len(each["differences"]) == 4 and max(each["differences"]) < 1e-5
        assert each["gate"]["gate_max"] < 1e-5
        assert each["ratios"][0] < 1e-4 < each["ratios"][1]


def test_servers_answer_only_the_run(found):
    statuses = [status for each in found for status in each["without the token"]]
    assert statuses and set(statuses) == {401}


def test_weights_go_through_the_paths_of_sglang_in_their_order(found):
    called = [path for path in found[0]["called"] if path not in ("health", "server_info", "model_info")]
    assert called[:2] == ["destroy_weights_update_group", "init_weights_update_group"]
    sync = called[2 : called.index("continue_generation") + 1]
    buckets = sync.count("update_weights_from_distributed")
    assert buckets > 1
    assert sync == [
        "pause_generation", "begin_weight_update", *["update_weights_from_distributed"] * buckets, "end_weight_update",
        "weights_checker", "continue_generation",
    ]  # fmt: skip
    assert found[0]["costs"]["refit_bytes"] > 0 < found[0]["costs"]["refit_verify_seconds"]


def test_every_fault_of_a_weight_sync_is_named_on_every_rank(found):
    for each in found:
        assert f"{UP} arrived altered" in each["dropped here"]
        assert f"{DOWN} did not change, although {DOWN} was sent" in each["dropped there"]
        assert "lm_head.weight did not change, although model.embed_tokens.weight was sent" in each["head left behind"]
        assert "reports that its weights have version '0'" in each["stale version"]
        assert "the rollout engine's logprobs differ from the trainer's" in each["altered there"]
        assert "serves no weights" in each["halted"] and "call sync() first" in each["stale"]


def interrupted(directory: Path) -> dict:
    """Update the weights while a request runs, and then kill the server."""
    found: dict = {}
    long = Sampling(max_new_tokens=40, temperature=0.0)
    with serving({}, directory) as (policy, engine):
        stand_in(engine, slowness=0.02)

        def with_new_weights():
            update(policy)
            engine.sync()

        async def across_a_weight_sync():
            request = asyncio.ensure_future(engine.submit(Request("3-1", (7, 8), long, 1)))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(with_new_weights)
            return await request

        found["across"] = asyncio.run(across_a_weight_sync())
        found["versions"] = (policy.weight_version - 1, policy.weight_version)
        logprobs = found["across"].logprobs
        after = next(span for span in found["across"].versions if span.version == policy.weight_version)
        prompt = [7, 8, *found["across"].ids[: after.start]]
        rest = generate(engine, [prompt], Sampling(max_new_tokens=40 - after.start, temperature=0.0), seed=0)
        again = rest["generation_logprobs"][0, len(prompt) :]
        found["difference"] = (again - torch.tensor(logprobs[after.start :])).abs().max().item()

        wanted = generate(engine, prompts(), SAMPLED, seed=2)
        (server,) = servers()
        server.kill()
        again = generate(engine, prompts(), SAMPLED, seed=2)
        found["same"], found["starts"] = torch.equal(wanted["input_ids"], again["input_ids"]), engine.served.start
    return found


@pytest.fixture(scope="module")
def disturbed(ranks, tmp_path_factory):
    (found,) = ranks.run(1, interrupted, tmp_path_factory.mktemp("interrupted"))
    return found


def test_a_killed_server_is_started_again_and_the_rollouts_are_the_same(disturbed):
    assert (disturbed["same"], disturbed["starts"]) == (True, 2)


def test_requests_go_on_with_new_weights(disturbed):
    found = disturbed
    across = found["across"]
    assert [span.version for span in across.versions] == list(found["versions"])
    assert across.versions[0].start == 0 and across.versions[1] == WeightSpan(
        found["versions"][1], across.versions[0].end, 40
    )
    assert found["difference"] < 1e-5  # the second part was computed with the new weights alone
