"""The engine that runs in processes of its own: it draws what the embedded engine draws, its weights follow the policy,
and the run survives its failures."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rl_megatron.config.generation import GenerationConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import EngineFailed, Request, Sampling
from rl_megatron.generation.logprob_check import LIMITS, EngineMismatch, LogprobCheck
from rl_megatron.generation.transformers import engine as transformers_engine
from rl_megatron.generation.transformers import process as worker_process
from rl_megatron.generation.transformers.engine import TransformersEngine
from rl_megatron.generation.transformers.process import EngineRequests, EngineWorkers
from rl_megatron.losses import build_loss
from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import WeightExporter
from tests.forked_engines import is_engine
from tests.parallel.layouts import MODEL, VOCAB_SIZE, build_policy
from tests.parallel.test_generation import SAMPLINGS, prompts

LLAMA = dataclasses.replace(MODEL, qk_norm=False, qkv_bias=False)
SAMPLING = SAMPLINGS["temperature 0.7"]
SETTINGS = GenerationConfig(engine="transformers", batch_size=4, refit_bucket_mb=0.05)  # several buckets and batches


@contextmanager
def serving(parallel: dict, precision: str = "fp32", timeout_minutes: float = 10, model=LLAMA, peft=None, **settings):
    """Yield a policy and its engine, which serves the policy's first weights."""
    policy = build_policy(parallel, model, precision=precision, peft=peft)
    engine = TransformersEngine(policy, dataclasses.replace(SETTINGS, **settings), timeout_minutes)
    try:
        engine.sync()
        yield policy, engine
    finally:
        engine.close()


def drawn(engine, samplings=SAMPLINGS) -> dict:
    return {name: generate(engine, prompts(), sampling, seed=3).get_dict() for name, sampling in samplings.items()}


def learn(policy, rollouts) -> tuple[float, float]:
    """Train a step; return max|ratio − 1| against the engine's logprobs, before the step and after it."""
    rollouts["prev_logprobs"] = rollouts["generation_logprobs"]
    rollouts["advantages"] = torch.randn(rollouts["token_mask"].shape, generator=torch.Generator().manual_seed(0))
    loss_fn = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0})
    first = policy.train(rollouts, loss_fn, gbs=rollouts.size)
    second = policy.train(rollouts, loss_fn, eval_mode=True, gbs=rollouts.size)
    return tuple(max(abs(r["probs_ratio_max"] - 1), abs(r["probs_ratio_min"] - 1)) for r in (first, second))


def refusal(error: type[Exception], call, *arguments) -> str:
    with pytest.raises(error) as refused:
        call(*arguments)
    return str(refused.value)


@contextmanager
def patched(holder, name: str, value):
    """Replace an attribute for a block of code. (pytest's monkeypatch does not work on a rank.)"""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield before
    finally:
        setattr(holder, name, before)


def use_engine(parallel: dict, settings: dict) -> dict:
    """Start the engines once and use them in all the ways that the tests below check; return what they answered."""
    found: dict = {}
    with serving(parallel, **settings) as (policy, engine):
        found["again"] = engine.sync()
        found["engines"] = drawn(engine)
        found["embedded"] = drawn(EmbeddedEngine(policy))
        found["gate"] = logprob_check(policy).run(engine, prompts())
        found["ratios"] = learn(policy, generate(engine, prompts(), SAMPLING, seed=1))
        found["stale"] = refusal(EngineFailed, generate, engine, prompts(), SAMPLING, 1)
        found["costs"] = engine.sync()
        found["engines after a step"] = drawn(engine)
        found["embedded after a step"] = drawn(EmbeddedEngine(policy))

        policy.model.version += 1
        with patched(WeightExporter, "fill", dropping("model.layers.2.mlp.up_proj.weight")):
            found["refused"] = refusal(WeightsRefused, engine.sync)
        found["halted"] = refusal(EngineFailed, generate, engine, prompts(), SAMPLING, 1)
        engine.sync()
        found["recovered"] = drawn(engine)

        for model_chunk in policy.model.model_chunks:
            for parameter in model_chunk.parameters():
                parameter.data.fill_(torch.nan)
        policy.model.version += 1
        engine.sync()
        found["nan"] = refusal(NonFiniteLoss, generate, engine, prompts(), SAMPLING, 1)
    return found


def dropping(name: str):
    """Return a `WeightExporter.fill` that leaves one tensor at zero in its bucket."""
    fill = WeightExporter.fill

    def fill_without(self, bucket_index, buffer):
        filled, bucket = fill(self, bucket_index, buffer), self.plan.buckets[bucket_index]
        for index, spec in enumerate(bucket.tensors):
            if spec.name == name:
                bucket.tensor(filled, index).zero_()
        return filled

    return fill_without


LAYOUTS = {
    "tensor 2, shared memory, 2 engines": (2, {"tensor": 2}, {"refit": "shared_memory", "num_engines": 2}),
    "pipeline 2, collective": (2, {"pipeline": 2}, {}),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def by_rank(request, ranks):
    """Return the results of `use_engine` on every rank of a layout."""
    world_size, parallel, settings = LAYOUTS[request.param]
    return ranks.run(world_size, use_engine, parallel, settings)


def assert_same(found: dict, wanted: dict, atol: float) -> None:
    for name, record in wanted.items():
        assert found[name].keys() == record.keys()
        for key, values in record.items():
            tolerance = atol if key == "generation_logprobs" else 0
            torch.testing.assert_close(found[name][key], values, atol=tolerance, rtol=0, msg=f"{name}: {key}")


def test_the_engine_draws_what_the_embedded_engine_draws_on_every_rank(by_rank):
    for found in by_rank:
        assert_same(found["engines"], found["embedded"], atol=1e-5)
        assert found["again"] == {}, "the same weights were sent twice"


def test_the_engine_needs_and_gets_the_weights_of_each_step(by_rank):
    for found in by_rank:
        assert_same(found["engines after a step"], found["embedded after a step"], atol=1e-5)
        before, after = (found[key]["temperature 1"]["weight_version"] for key in ("engines", "engines after a step"))
        assert (after == before + 1).all()
        stale = found["stale"]
        assert "version 0" in stale and "policy's is 1" in stale and "call sync()" in stale
        costs = found["costs"]
        assert costs["refit_bytes"] > 100_000 and costs["refit_seconds"] > 0
        for phase in ("fill", "transfer", "verify", "copy"):
            assert f"refit_{phase}_seconds" in costs and f"refit_{phase}_gb_per_s" in costs


def test_the_on_policy_ratio_is_one_at_temperature_0_7(by_rank):
    for found in by_rank:
        before, after = found["ratios"]
        assert before <= 1e-4
        assert after > 1e-3, "the step moved the policy, so the ratio could have differed"


def test_the_engines_logprobs_pass_the_logprob_check(by_rank):
    for found in by_rank:
        assert found["gate"] == by_rank[0]["gate"] and found["gate"]["gate_mean"] < LIMITS["fp32"] / 10


def test_a_dropped_tensor_stops_the_engine_before_generation(by_rank):
    for found in by_rank:
        assert "model.layers.2.mlp.up_proj.weight" in found["refused"]
        assert "serves no weights" in found["halted"]
        for name, record in found["engines after a step"].items():  # the engine serves whole weights again
            assert torch.equal(found["recovered"][name]["generation_logprobs"], record["generation_logprobs"])


def test_nan_logits_are_refused_on_every_rank(by_rank):
    for found in by_rank:
        assert "logits are NaN" in found["nan"] and "token 1" in found["nan"]


# --- engines that die ---


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def logged():
    handler, logger = Messages(), logging.getLogger("rl_megatron")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def killed_while(method: str):
    """Kill every worker once, immediately after it is asked to do `method`."""
    ask, done = EngineWorkers.ask, []

    def ask_and_kill(self, asked, *arguments_of_each):
        ask(self, asked, *arguments_of_each)
        if asked == method and not done:
            done.append(kill(worker_children()))

    with patched(EngineWorkers, "ask", ask_and_kill):
        yield


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def deaths() -> dict:
    """Kill the engine while it is idle, while it generates, and once more than restarts are allowed."""
    found: dict = {}
    with serving({}, max_engine_restarts=2) as (_, engine), logged() as lines:
        found["undisturbed"] = drawn(engine)
        kill(worker_children())
        found["killed at idle"] = drawn(engine)
        with killed_while("generate"):
            found["killed while drawing"] = drawn(engine)
        (last,) = worker_children()
        kill([last])
        found["once more"] = refusal(EngineFailed, generate, engine, prompts(), SAMPLING, 3)
        found["log"], found["left"] = list(lines), [pid for pid in [last, *worker_children()] if is_alive(pid)]
    return found


def worker_children() -> list[int]:
    """Return the workers that are children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, children) if is_engine(pid)]


def test_a_killed_engine_is_restarted_and_draws_the_same(ranks):
    found = ranks.run(1, deaths)[0]
    for when in ("killed at idle", "killed while drawing"):
        assert_same(found[when], found["undisturbed"], atol=0)
    assert [("SIGKILL" in line, "of at most 2" in line) for line in found["log"]] == [(True, True)] * 2, found["log"]
    assert "SIGKILL" in found["once more"] and "max_engine_restarts=2" in found["once more"]
    assert found["left"] == []


def kill_during_refit() -> tuple[dict, dict, list[str], float]:
    """Kill the engine during a refit; return what it draws after it and before it, the log, and the refit's seconds."""
    with serving({"tensor": 2}) as (policy, engine), logged() as lines:
        undisturbed = drawn(engine, {"sampled": SAMPLING})
        policy.model.version += 1
        began = time.monotonic()
        with killed_while("receive"):
            engine.sync()
        seconds = time.monotonic() - began
        found = drawn(engine, {"sampled": SAMPLING})
        found["sampled"]["weight_version"] -= 1
        versions = found["sampled"]["token_weight_versions"]
        versions[versions >= 0] -= 1
    return found, undisturbed, list(lines), seconds


def test_all_ranks_survive_an_engine_killed_during_a_refit(ranks):
    by_rank = ranks.run(2, kill_during_refit)
    for found, undisturbed, _, seconds in by_rank:
        assert_same(found, undisturbed, atol=0)
        assert seconds < 300, "a rank waited for the timeout"
    assert len(by_rank[0][2]) == 1 and "SIGKILL" in by_rank[0][2][0]


@contextmanager
def first_port_taken():
    """Let another socket, which never answers, occupy the first address that the policy's rank 0 chooses."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        find_free_address, given = transformers_engine.find_free_address, []

        def address():
            given.append(taken.getsockname() if not given else find_free_address())
            return given[-1]

        hurry = EngineWorkers.hurry
        with (
            patched(transformers_engine, "find_free_address", address),
            patched(EngineWorkers, "hurry", lambda workers, _, reason: hurry(workers, 1.0, reason)),
        ):
            yield


def join_and_fail() -> dict:
    """Start an engine while its first port is taken; then let it raise while the policy's ranks send weights."""
    found, began = {}, time.monotonic()
    with (
        patched(worker_process, "WORKER_MODULE", "tests.parallel.failing_worker"),
        logged() as lines,
        first_port_taken(),
        serving({"tensor": 2}, timeout_minutes=2) as (policy, engine),
    ):
        found["seconds to join"] = time.monotonic() - began
        found["joined"] = drawn(engine, {"sampled": SAMPLING})["sampled"]["weight_version"].tolist()
        policy.model.version += 1
        began = time.monotonic()
        found["failed"] = refusal(EngineFailed, engine.sync)
        found["seconds to fail"] = time.monotonic() - began
        found["log"] = list(lines)
    return found


def test_a_taken_port_is_replaced_and_an_error_of_the_engine_ends_the_refit(ranks):
    first, second = ranks.run(2, join_and_fail)
    for found in (first, second):
        assert set(found["joined"]) == {0} and found["seconds to join"] < 100, "a rank waited for the timeout"
        assert "rollout engine 0" in found["failed"] and "RuntimeError: no memory for bucket 0" in found["failed"]
        assert found["seconds to fail"] < 20, "a rank waited for the timeout"
    (line,) = first["log"]  # of the taken port: an error that the engine raises is not retried
    assert "starting the engines again (1 of at most 3 times)" in line


def cancelled() -> list[str]:
    """Cancel a task that awaits a request; return the requests that the engine's process was told to end."""
    aborted, abort = [], EngineRequests.abort

    def recorded(self, request_id):
        aborted.append(request_id)
        abort(self, request_id)

    async def cancel(engine) -> None:
        task = asyncio.ensure_future(engine.submit(Request("a", (1, 2), SAMPLING, 1)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await engine.submit(Request("b", (1, 2), SAMPLING, 1))

    with serving({}) as (_, engine), patched(EngineRequests, "abort", recorded):
        asyncio.run(cancel(engine))
    return aborted


def test_a_request_that_nobody_awaits_any_more_is_ended(ranks):
    assert ranks.run(1, cancelled) == [["a"]]


# --- the logprob check ---


class Ids:
    def decode(self, ids):
        return " ".join(map(str, ids))


def logprob_check(policy) -> LogprobCheck:
    return LogprobCheck(policy, Ids(), Sampling(max_new_tokens=12), num_prompts=4, limit=LIMITS[policy.model.precision])


def perturbed() -> str:
    with (
        patched(worker_process, "WORKER_MODULE", "tests.parallel.perturbing_worker"),
        serving({}, refit="shared_memory") as (policy, engine),
    ):
        return refusal(EngineMismatch, logprob_check(policy).run, engine, prompts())


def test_a_weight_that_changed_after_it_was_verified_fails_the_logprob_check(ranks):
    message = ranks.run(1, perturbed)[0]
    assert "generation.gate_limit=0.0001" in message and "worst: prompt" in message
    assert "sequence" in message and "trainer -" in message and "engine -" in message


def test_the_vocabulary_is_the_tokenizers(by_rank):
    for record in by_rank[0]["engines"].values():
        assert record["input_ids"].max() < VOCAB_SIZE
