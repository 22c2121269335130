"""The engine on servers, with fake ones: weights first, restarts, cancelled requests, and failures."""

import asyncio
import threading
import time

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import EngineFailed, Request, Served
from rl_megatron.generation.vllm.dialect import VllmDialect
from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused
from tests.fake_vllm import changed, logprob, status
from tests.unit.generation.servers.engines_of_fakes import PROMPTS, SAMPLING
from tests.unit.generation.servers.stub_policy import StubSync


def request(name, prompt=(5,)):
    return Request(name, tuple(prompt), SAMPLING, 1)


def test_weights_are_synced_before_the_first_request_and_after_each_change(engines):
    calls = []
    engine, fake = engines(fakes=1, sync_log=calls)
    with pytest.raises(EngineFailed, match=r"serves no weights; call sync\(\) first"):
        generate(engine, PROMPTS, SAMPLING, seed=1)
    assert engine.sync()["refit_bytes"] == 16.0 and engine.sync() == {}
    batch = generate(engine, PROMPTS, SAMPLING, seed=1)
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 7, 8, 9], [18, 19, 20, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 0]]
    assert batch["weight_version"].tolist() == [1, 1, 1] and batch["stopped"].tolist() == [False, True, False]
    engine.policy.weight_version = 2
    engine.sync()
    assert engine.served == Served(2, 1)
    assert generate(engine, PROMPTS, SAMPLING, seed=1)["weight_version"].tolist() == [2, 2, 2]
    assert calls == ["connect", "send 1", "send 2"]
    assert fake.called == ["/pause?mode=keep", "/finish_weight_update", "/resume"] * 2


def test_requests_of_a_batch_have_ids_and_seeds_of_their_own(engines):
    engine, fake = engines(fakes=1)
    engine.sync()
    generate(engine, [[1]] * 3, SAMPLING, seed=5)
    assert sorted(body["request_id"] for body in fake.asked) == ["5-0", "5-1", "5-2"]
    assert len({body["sampling_params"]["seed"] for body in fake.asked}) == 3


def test_an_answer_with_other_weights_than_the_policys_is_refused(engines):
    engine, fake = engines(fakes=1)
    engine.sync()
    fake.weights = "7"
    with pytest.raises(EngineFailed, match=r"generated tokens 1 to 4 with version 7 of the weights, but the policy's"):
        generate(engine, PROMPTS, SAMPLING, seed=1)


def test_logits_that_are_nan_end_the_run_as_with_every_engine(engines):
    engine, fake = engines(fakes=1)
    engine.sync()
    fake.wrong = logprob(-9999.0)
    with pytest.raises(NonFiniteLoss):
        generate(engine, PROMPTS, SAMPLING, seed=1)


def test_servers_sleep_while_the_policy_trains_and_wake_for_the_next_weights(engines):
    """The policy and the servers never need their memory at the same time."""
    engine, fake = engines(fakes=1, sleeps=True)
    engine.sync()
    fake.called.clear()
    engine.policy.offloads.clear()
    engine.sleep()
    engine.sleep()
    assert fake.called == ["/sleep?level=2"] and engine.served is None
    engine.sync()
    assert engine.policy.offloads == ["after", "after"], "before the servers take memory, and after the weight sync"
    woken = ["/pause?mode=keep", "/wake_up?tags=weights", "/finish_weight_update", "/wake_up?tags=kv_cache", "/resume"]
    assert fake.called[1:] == woken


def test_servers_that_cannot_sleep_stay_awake(engines):
    engine, fake = engines(fakes=1)
    engine.sync()
    fake.called.clear()
    engine.sleep()
    assert fake.called == [] and engine.served is not None and engine.policy.offloads == []


def test_a_server_that_dies_before_it_sleeps_costs_nothing_but_time(engines, monkeypatch):
    engine, fake = engines(fakes=1, sleeps=True)
    engine.sync()
    sleep = VllmDialect.sleep

    async def dies(self, server):
        raise ServerDied("gone")

    monkeypatch.setattr(VllmDialect, "sleep", dies)
    engine.sleep()
    monkeypatch.setattr(VllmDialect, "sleep", sleep)
    engine.sync()
    assert generate(engine, PROMPTS, SAMPLING, seed=1)["weight_version"].tolist() == [1, 1, 1]


def test_a_cancelled_request_leaves_its_place_to_the_next_one(engines):
    engine, fake = engines(fakes=1, settings={"max_requests_in_flight": 1})
    engine.sync()

    async def run():
        fake.going.clear()
        first, waiting, last = (asyncio.ensure_future(engine.submit(request(name))) for name in "abc")
        while not fake.asked:
            await asyncio.sleep(0.01)
        waiting.cancel()
        first.cancel()
        while len(fake.asked) < 2:
            await asyncio.sleep(0.01)
        assert first.cancelled() and waiting.cancelled() and not last.done()
        fake.going.set()
        return await last

    assert asyncio.run(run()).ids == (6, 7, 8, 9)
    assert [body["request_id"] for body in fake.asked] == ["a", "c"], "a request that waits is never sent"


def test_a_batch_with_a_request_that_somebody_else_aborted_is_refused(engines):
    engine, fake = engines(fakes=1)
    engine.sync()
    fake.wrong = changed(finish_reason="abort")
    with pytest.raises(EngineFailed, match=r"request '1-.' was aborted at token ., and not by this run"):
        generate(engine, PROMPTS, SAMPLING, seed=1)


def test_a_single_request_has_an_id_of_its_own_and_fits_the_policy(engines):
    engine, fake = engines(fakes=1)
    engine.sync()

    async def run():
        with pytest.raises(ConfigError, match="exceed"):
            await engine.submit(request("long", [1] * 61))
        fake.going.clear()
        first = asyncio.ensure_future(engine.submit(request("a")))
        while not fake.asked:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="request id 'a' belongs to a request that has no completion yet"):
            await engine.submit(request("a"))
        fake.going.set()
        await first

    asyncio.run(run())
    assert len(fake.asked) == 1


def test_a_refusal_of_a_healthy_server_ends_the_run_without_a_restart(engines, monkeypatch):
    calls = []
    engine, fake = engines(fakes=1, sync_log=calls)

    def refuse(self, version):
        raise ServerRefused(f"vLLM server 0 ({fake.url}) answered POST /start_weight_update with status 400: no plugin")

    monkeypatch.setattr(StubSync, "send", refuse)
    with pytest.raises(EngineFailed, match="no plugin$"):
        engine.sync()
    assert calls == ["connect"]


def test_a_server_that_describes_itself_in_another_form_is_named(engines):
    engine, fake = engines(fakes=1)
    fake.version = None
    with pytest.raises(EngineFailed, match=rf"{fake.url}.* describes itself in an unexpected form"):
        engine.sync()


def test_a_server_with_another_dtype_is_refused(engines):
    engine, fake = engines(fakes=1)
    fake.settings["model_config"]["dtype"] = "torch.bfloat16"
    with pytest.raises(EngineFailed, match="computes in bfloat16, but the policy in float32: start it with --dtype"):
        engine.sync()


def test_a_server_that_is_not_there_ends_the_run_within_its_limit(engines):
    engine, fake = engines(fakes=1, settings={"startup_timeout_seconds": 0.3})
    fake.close()
    began = time.monotonic()
    with pytest.raises(EngineFailed, match=rf"{fake.url}.* does not answer GET /health.*start the server, or correct"):
        engine.sync()
    assert time.monotonic() - began < 20


def test_a_server_of_another_version_ends_the_run(engines):
    engine, fake = engines(fakes=1)
    fake.version = "0.31.0"
    with pytest.raises(EngineFailed, match=r"vLLM 0\.31\.0, .* install one of 0\.32\.0"):
        engine.sync()


@pytest.mark.change
def test_a_dead_server_that_answers_again_gets_the_weights_and_the_open_requests(engines, logged):
    calls = []
    engine, fake = engines(fakes=1, sync_log=calls, settings={"max_requests_in_flight": 1})
    engine.sync()

    def dies_at_the_last(answer, handler, body):
        if body["request_id"] != "1-2":
            return answer
        fake.wrong, fake.healthy = None, False
        threading.Timer(1.5, lambda: setattr(fake, "healthy", True)).start()
        return status(500)(answer, handler, body)

    fake.wrong = dies_at_the_last
    batch = generate(engine, PROMPTS, SAMPLING, seed=1)
    assert batch["input_ids"][2].tolist() == [1, 2, 3, 4, 5, 6, 0]
    assert engine.served == Served(1, 2), "restarted servers are checked again"
    assert calls == ["connect", "send 1", "close", "connect", "send 1"]
    assert [body["request_id"] for body in fake.asked] == ["1-0", "1-1", "1-2", "1-2"]
    assert any("starting again (1 of at most 3 times)" in line for line in logged)


def test_a_server_that_dies_too_often_ends_the_run(engines):
    engine, fake = engines(fakes=1, max_engine_restarts=0)
    engine.sync()
    fake.wrong = lambda answer, handler, body: status(500)(answer, handler, body) or setattr(fake, "healthy", False)
    with pytest.raises(EngineFailed, match=r"max_engine_restarts=0 does not allow another restart"):
        generate(engine, PROMPTS, SAMPLING, seed=1)
