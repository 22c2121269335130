"""The engine on real vLLM servers on the CPU: exact logprobs, seeds and interruptions."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch

from rl_megatron.config.loading.load import load_config
from rl_megatron.config.peft import LoraConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import Request, Sampling
from rl_megatron.generation.vllm.engine import build_vllm_engine
from rl_megatron.losses import build_loss
from rl_megatron.model.lora.attach import switch_off
from tests.end_to_end.listening import reached_from_outside, watched
from tests.parallel.layouts import build_policy
from tests.vllm_servers import NUM_TOKENS, PYTHON, STEP_TOKENS, model_of_runs, needs_vllm, ready

pytestmark = needs_vllm
STOP = 7
SAMPLINGS = {
    "temperature 1": Sampling(max_new_tokens=12, stop_ids=(STOP,)),
    "temperature 0.7": Sampling(max_new_tokens=12, temperature=0.7, stop_ids=(STOP,)),
    "greedy": Sampling(max_new_tokens=12, temperature=0.0, stop_ids=(STOP,)),
}
LIMIT = 1e-4  # nats


def prompts(count: int = 11) -> list[list[int]]:
    """Return prompts of unequal length."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 40] + torch.randint(2, 30, (count - 2,), generator=generator).tolist()
    return [torch.randint(0, NUM_TOKENS, (length,), generator=generator).tolist() for length in lengths]


def engine_of(policy, directory, *keys):
    stage = load_config(["algorithm=grpo", "generation.engine=vllm", *keys]).first
    return build_vllm_engine(policy, stage, Path(directory))


def largest_difference(policy, rollouts) -> float:
    """Return max|trainer's − engine's logprob|, in nats."""
    difference = policy.get_logprobs(rollouts)["logprobs"] - rollouts["generation_logprobs"]
    return (difference * rollouts["token_mask"]).abs().max().item()


def train_a_step(policy, rollouts) -> None:
    rollouts["prev_logprobs"] = rollouts["generation_logprobs"]
    rollouts["advantages"] = torch.randn(rollouts["token_mask"].shape, generator=torch.Generator().manual_seed(0))
    policy.train(rollouts, build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}), gbs=rollouts.size)


async def interrupted(engine, policy) -> dict:
    """Cancel one of two long requests, and send other weights while the other one runs.

    How soon a server generates the first and the last token depends on the machine, so the delay until the weight sync
    grows while there is no token yet, and shrinks if the request has ended.
    """
    sampling, delay = Sampling(max_new_tokens=90), 0.1
    for attempt in range(20):
        cancelled, kept = (
            asyncio.ensure_future(engine.submit(Request(f"{name}-{attempt}", (5, 6), sampling, 1)))
            for name in ("cancelled", "kept")
        )
        await asyncio.sleep(delay)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        policy.model.version += 1
        engine.sync()
        completion = await kept
        if len(completion.versions) == 2:
            break
        delay *= 1.7 if completion.versions[0].version == policy.weight_version else 0.6  # no pair alternates
    return {"whole": await engine.submit(Request("whole", (5, 6), sampling, 1)), "kept": completion}


def use_servers(urls, directory, interrupts: bool) -> dict:
    """Use the servers in all the ways that the tests below check; return what they answered."""
    policy = build_policy({"tensor": 2} if not interrupts else {}, model_of_runs(), vocab_size=NUM_TOKENS)
    engine, found = engine_of(policy, directory, f"generation.vllm.server_urls=[{','.join(urls)}]"), {}
    try:
        for step in range(3):
            engine.sync()
            batches = {name: generate(engine, prompts(), sampling, seed=3) for name, sampling in SAMPLINGS.items()}
            found[step] = {name: largest_difference(policy, batch) for name, batch in batches.items()}
            batch = batches["temperature 1"]
            versions = batch["token_weight_versions"][batch["token_mask"] == 1]
            found[f"versions {step}"] = (set(versions.tolist()), policy.weight_version)
            train_a_step(policy, batch)
        engine.sync()
        group = [prompts()[1]] * 40
        assert len(group) * 52 > 2 * STEP_TOKENS, "far more tokens than a step takes"
        found["group"] = generate(engine, group, SAMPLINGS["temperature 1"], seed=9)["input_ids"].tolist()
        found["group again"] = generate(engine, group, SAMPLINGS["temperature 1"], seed=9)["input_ids"].tolist()
        if interrupts:
            found |= asyncio.run(interrupted(engine, policy))
    finally:
        engine.close()
    return found


@pytest.fixture(scope="module")
def answers(ranks, faulty_servers, tmp_path_factory):
    """Return what two ranks with tensor parallelism got of the servers."""
    first, second = ranks.run(2, use_servers, ready(faulty_servers), str(tmp_path_factory.mktemp("run")), False)
    assert first == second, "ranks decide alike"
    return first


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_logprobs_are_the_trainers_after_each_weight_sync(answers, sampling):
    differences = [answers[step][sampling] for step in range(3)]
    assert max(differences) <= LIMIT, differences


def test_every_token_has_the_version_of_the_policys_weights(answers):
    for step in range(3):
        versions, wanted = answers[f"versions {step}"]
        assert versions == {wanted}
    assert answers["versions 2"][1] > answers["versions 0"][1]


def test_a_group_larger_than_a_step_of_the_server_keeps_its_seeds(answers):
    """A CPU server's engine ends if a prompt with a seed is divided, so that the client keeps the tokens in flight."""
    group = answers["group"]
    assert group == answers["group again"]
    assert len({tuple(ids) for ids in group}) > 30, "each sample has a seed of its own"


def test_a_request_goes_on_with_other_weights_while_another_is_cancelled(ranks, faulty_servers, tmp_path):
    """On the server with one worker alone, which starts in half the time of both."""
    with watched([os.getpid()]) as addresses:
        (found,) = ranks.run(1, use_servers, ready(faulty_servers[1:]), str(tmp_path), True)
    assert addresses and reached_from_outside(addresses) == []
    kept, whole = found["kept"], found["whole"]
    assert kept.reason == whole.reason == "length" and len(kept.ids) == len(whole.ids) == 90
    first, second = kept.versions
    assert second.version == first.version + 1 and 0 < first.end < 90
    assert [span.version for span in whole.versions] == [second.version]
    assert max(found[2].values()) <= LIMIT


def use_a_server_with_adapters(directory: str) -> list[tuple[float, float]]:
    """Train an adapter for two steps on what a server of this run generates with it; return what differs."""
    lora = LoraConfig(r=4, lora_alpha=64.0, init_lora_weights=False)
    policy, found = build_policy({"tensor": 2}, model_of_runs(), vocab_size=NUM_TOKENS, peft=lora), []
    keys = ("peft.r=4", "generation.refit=adapter", f"generation.vllm.python={PYTHON}")
    engine = engine_of(policy, directory, *keys)
    try:
        for _ in range(2):
            engine.sync()
            batch = generate(engine, prompts(), SAMPLINGS["temperature 1"], seed=3)
            with switch_off(policy.model.model_chunks):
                of_base = largest_difference(policy, batch)
            found.append((largest_difference(policy, batch), of_base))
            train_a_step(policy, batch)
    finally:
        engine.close()
    return found


def test_a_server_applies_the_adapter_that_it_is_sent_alone(ranks, tmp_path):
    first, second = ranks.run(2, use_a_server_with_adapters, str(tmp_path))
    assert first == second
    assert all(difference < LIMIT and of_base > 100 * LIMIT for difference, of_base in first)
