"""An engine of several ranks on fake servers: rank 0 alone asks, and all ranks get the batch or the failure."""

import asyncio
import re
import threading

import pytest
import torch.distributed as dist

from rl_megatron.config.generation import VllmConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import EngineFailed, Request
from tests.fake_vllm import FakeVllm, changed, status
from tests.unit.generation.servers.engines_of_fakes import PROMPTS, SAMPLING, make
from tests.unit.generation.servers.stub_policy import StubPolicy


def ask_on_each_rank(directory, url):
    policy = StubPolicy(dist.get_rank(), dist.get_world_size())
    engine = make(directory, VllmConfig(server_urls=(url,)), policy=policy)
    try:
        engine.sync()
        return generate(engine, PROMPTS, SAMPLING, seed=1)["input_ids"].tolist()
    except EngineFailed as failure:
        return str(failure)
    finally:
        engine.close()


def use_single_requests_on_rank_0(directory, url) -> list:
    """Lose the server in a single request; return what each rank saw."""
    policy = StubPolicy(dist.get_rank(), dist.get_world_size())
    engine = make(directory, VllmConfig(server_urls=(url,), startup_timeout_seconds=30.0), policy=policy)
    leads, seen = dist.get_rank() == 0, []
    try:
        engine.sync()
        policy.weight_version = 2
        engine.sync()
        seen.append(generate(engine, PROMPTS, SAMPLING, seed=1)["weight_version"].tolist())
        if leads:
            with pytest.raises(EngineFailed, match=r"sync\(\) starts the server again"):
                asyncio.run(engine.submit(Request("lost", (5,), SAMPLING, 1)))
        engine.sync()
        return [*seen, engine.served, generate(engine, PROMPTS, SAMPLING, seed=2)["weight_version"].tolist()]
    finally:
        engine.close()


@pytest.mark.change
def test_ranks_decide_alike_after_single_requests_of_rank_0(ranks, tmp_path):
    fake = FakeVllm()

    def loses_the_server(answer, handler, body):
        if body["request_id"] != "lost":
            return answer
        fake.healthy = False
        threading.Timer(1.0, lambda: setattr(fake, "healthy", True)).start()
        return status(500)(answer, handler, body)

    fake.wrong = loses_the_server
    try:
        first, second = ranks.run(2, use_single_requests_on_rank_0, str(tmp_path), fake.url)
        assert first == second and first[0] == first[2] == [2, 2, 2] and first[1].version == 2
    finally:
        fake.close()


def reach_a_wrong_address(directory, url):
    policy = StubPolicy(dist.get_rank(), dist.get_world_size())
    settings = VllmConfig(server_urls=(url,), startup_timeout_seconds=0.5)
    engine = make(directory, settings, policy=policy)
    try:
        engine.sync()
        return "it was reached"
    except EngineFailed as failure:
        return str(failure)
    finally:
        engine.close()


@pytest.mark.change
def test_a_wrong_address_ends_every_rank(ranks, tmp_path):
    fake = FakeVllm()
    fake.health_status = 404
    try:
        for each in ranks.run(2, reach_a_wrong_address, str(tmp_path), fake.url):
            assert "does not answer GET /health with status 200" in each
    finally:
        fake.close()


@pytest.mark.change
def test_every_rank_gets_the_batch_or_the_failure(ranks, tmp_path):
    fake = FakeVllm()
    try:
        first, second = ranks.run(2, ask_on_each_rank, str(tmp_path), fake.url)
        assert first == second and first[0] == [3, 4, 5, 6, 7, 8, 9]
        assert sorted(body["request_id"] for body in fake.asked) == ["1-0", "1-1", "1-2"], "rank 0 alone asks"
        fake.wrong = changed(finish_reason="stop")
        first, second = ranks.run(2, ask_on_each_rank, str(tmp_path), fake.url)
        assert first == second and re.search(r"wrong answer to request", first)
    finally:
        fake.close()
