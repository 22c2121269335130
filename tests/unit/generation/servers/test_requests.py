"""Requests to servers: wrong answers are refused by name, what is unanswered is repeated, and loads stay in bounds."""

import asyncio
import math
import re
from contextlib import asynccontextmanager

import pytest

from rl_megatron.config.generation import VllmConfig
from rl_megatron.generation.interfaces import EngineFailed, Request, Sampling, WeightSpan
from rl_megatron.generation.servers.client import ServerClient
from rl_megatron.generation.servers.requests import RequestSender
from rl_megatron.generation.vllm.dialect import VllmDialect
from rl_megatron.weight_sync.servers import ServerDied, ServerRefused
from tests.fake_vllm import VOCAB_SIZE, FakeVllm, changed, closes_in_mid_answer, is_not_json, logprob, status

DIALECT = VllmDialect(VllmConfig(), 64, "processed_logprobs")
SAMPLING = Sampling(max_new_tokens=4, stop_ids=(20,))


@pytest.fixture
def servers():
    """Yield a function that starts fake servers."""
    started = []

    def start(count=1):
        started.extend(FakeVllm() for _ in range(count))
        return started if count > 1 else started[-1]

    yield start
    for server in started:
        server.close()


@asynccontextmanager
async def sender(*fakes, max_requests=64, timeout_seconds=20.0):
    loop = asyncio.get_running_loop()
    clients = [
        ServerClient(f"vLLM server {i}", fake.url, loop, "/health", timeout_seconds) for i, fake in enumerate(fakes)
    ]
    try:
        facts = [await DIALECT.facts(client) for client in clients]
        yield RequestSender(clients, facts, DIALECT, VOCAB_SIZE, max_requests, seconds_between_attempts=0.01)
    finally:
        for client in clients:
            await client.close()


def request(name="a", prompt=(3, 4, 5), sampling=SAMPLING, seed=7):
    return Request(name, prompt, sampling, seed)


def ask(*fakes, requests=None, **options):
    """Complete a batch, of one request by default, and return the completions."""
    requests = requests or [request()]

    async def run():
        async with sender(*fakes, **options) as requests_to:
            return await requests_to.complete_all(requests, {})

    return asyncio.run(run())


def test_a_completion_has_the_ids_logprobs_and_versions_of_the_answer(servers):
    fake = servers()
    (completion,) = ask(fake)
    assert (completion.ids, completion.reason) == ((6, 7, 8, 9), "length")
    assert completion.logprobs == (-0.5,) * 4 and completion.versions == (WeightSpan(1, 0, 4),)
    (stopped,) = ask(fake, requests=[request(prompt=(18,))])
    assert (stopped.ids, stopped.reason) == ((19, 20), "stop")


def test_a_request_has_ids_a_seed_and_no_end_of_sequence_of_the_server(servers):
    fake = servers()
    ask(fake, requests=[request("b", sampling=Sampling(4, 0.7, 5, 0.9, (20, 21)), seed=2**62 + 1)])
    body = fake.asked[0]
    assert body["token_ids"] == [3, 4, 5] and body["request_id"] == "b"
    parameters = body["sampling_params"]
    assert parameters["seed"] == 2**62 + 1 and parameters["ignore_eos"] and parameters["stop_token_ids"] == [20, 21]
    assert (parameters["temperature"], parameters["top_k"], parameters["top_p"]) == (0.7, 5, 0.9)


WRONG_ANSWERS = {
    "fewer logprobs": (changed(logprobs=lambda old: {"content": old["content"][:-1]}), "3 logprobs for 4 tokens"),
    "no logprobs": (changed(logprobs=None), "in an unexpected form"),
    "positive logprob": (logprob(0.5), "logprob of token 4 is 0.5, but a logprob cannot be positive"),
    "id beyond the vocabulary": (
        changed(
            token_ids=[6, 7, 8, 999],
            logprobs=lambda old: {"content": [*old["content"][:-1], {"token_id": 999, "logprob": -1.0}]},
        ),
        "token 4 is 999, which is not an id of the tokenizer's 50 tokens",
    ),
    "logprobs of other tokens": (changed(token_ids=[6, 7, 8, 10]), "a logprob is that of token 9"),
    "weights of another sender": (
        changed(weight_versions=[{"version": "default", "start": 0, "end": 4}]),
        "tokens 1 to 4 have weight version 'default', which the policy did not send",
    ),
    "no versions": (changed(weight_versions=None), "weight versions are given for 0 of its 4 tokens"),
    "a gap between versions": (
        changed(weight_versions=[{"version": "1", "start": 0, "end": 1}, {"version": "1", "start": 2, "end": 4}]),
        "not contiguous at token 3",
    ),
    "too early": (
        changed(
            token_ids=lambda old: old[:-1],
            logprobs=lambda old: {"content": old["content"][:-1]},
            weight_versions=[{"version": "1", "start": 0, "end": 3}],
        ),
        "ended by its length after 3 of 4 tokens; raise the server's max_model_len",
    ),
    "a stop without a stop token": (changed(finish_reason="stop"), "its last token 9 is none of [20]"),
    "another reason": (changed(finish_reason="repetition"), "ended for the reason 'repetition'"),
    "no choices": (lambda answer, handler, body: {"choices": []}, "in an unexpected form"),
    "no JSON": (is_not_json, "which is not JSON"),
    "a refusal": (status(400, "max_tokens is too large"), "status 400: max_tokens is too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_a_wrong_answer_names_the_server_and_the_request(servers, case):
    fake = servers()
    fake.wrong, message = WRONG_ANSWERS[case]
    with pytest.raises(EngineFailed, match=re.escape(message)) as failure:
        ask(fake)
    assert f"vLLM server 0 ({fake.url})" in str(failure.value) and "'a'" in str(failure.value)
    assert len(fake.asked) == 1, "a wrong answer is not asked for again"


@pytest.mark.parametrize("value", [None, -9999.0, math.nan])
def test_a_logprob_that_is_missing_or_nan_is_nan_and_its_server_is_named(servers, logged, value):
    fake = servers()
    fake.wrong = logprob(value)
    (completion,) = ask(fake)
    assert [math.isnan(each) for each in completion.logprobs] == [False, False, False, True]
    assert f"vLLM server 0 ({fake.url}) has no logprob for token 4 of request 'a'" in " ".join(logged)


@pytest.mark.parametrize("fault", [status(500), status(503), closes_in_mid_answer])
def test_an_answer_that_did_not_arrive_is_asked_for_again(servers, fault):
    fake = servers()
    fake.wrong, fake.wrong_times = fault, 2
    assert ask(fake)[0].ids == (6, 7, 8, 9) and len(fake.asked) == 3


def test_a_healthy_server_that_fails_again_and_again_ends_the_run(servers):
    fake = servers()
    fake.wrong = status(500)
    with pytest.raises(EngineFailed, match=r"status 500: EngineCore encountered an issue.*3 attempts at request 'a'"):
        ask(fake)


@pytest.mark.parametrize("fault", [status(500), closes_in_mid_answer])
def test_an_error_of_a_server_that_is_not_healthy_is_its_death(servers, fault):
    fake = servers()

    def dies(answer, handler, body):
        fake.healthy = False
        return fault(answer, handler, body)

    fake.wrong = dies
    with pytest.raises(ServerDied, match=re.escape(fake.url)):
        ask(fake)
    assert len(fake.asked) == 1


def test_a_server_that_answers_slowly_counts_as_dead_within_the_limit(servers):
    fake = servers()
    fake.seconds = 5.0
    with pytest.raises(ServerDied, match=r"did not answer POST /inference/v1/generate within 0.2 s"):
        ask(fake, timeout_seconds=0.2)


def test_a_server_that_cannot_be_reached_is_dead(servers):
    fake = servers()
    fake.close()
    with pytest.raises(ServerDied, match=re.escape(f"vLLM server 0 ({fake.url}) did not answer GET /version")):
        ask(fake)


def test_a_version_that_was_not_tried_is_refused_with_those_that_were(servers):
    fake = servers()
    fake.version = "0.33.1"
    with pytest.raises(ServerRefused, match=r"is vLLM 0.33.1, with which .* not tried; install one of 0.32.0"):
        ask(fake)
    fake.version = "0.32.0+cpu"
    assert ask(fake)[0].ids


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("model_config", "logprobs_mode", "raw_logits", "start it with --logprobs-mode processed_logprobs"),
        ("model_config", "max_model_len", 32, "takes at most 32 tokens, but the policy allows 64: start it"),
    ],
)
def test_a_setting_that_makes_answers_unusable_is_refused(servers, section, key, value, message):
    fake = servers()
    fake.settings[section][key] = value
    with pytest.raises(ServerRefused, match=re.escape(message)):
        ask(fake)


def test_requests_that_were_answered_before_a_death_are_not_repeated(servers):
    fake, done = servers(), {}

    async def run():
        async with sender(fake, max_requests=1) as requests_to:
            requests = [request(name) for name in "abcd"]
            fake.wrong = lambda answer, handler, body: answer if body["request_id"] in "ab" else dies(handler)
            with pytest.raises(ServerDied):
                await requests_to.complete_all(requests, done)
            fake.wrong, fake.healthy = None, True
            return await requests_to.complete_all(requests, done)

    def dies(handler):
        fake.healthy = False
        return status(500)(None, handler, None)

    completions = asyncio.run(run())
    assert [each.request_id for each in completions] == list("abcd")
    assert [each["request_id"] for each in fake.asked].count("a") == 1


def test_a_prompt_with_an_id_beyond_the_vocabulary_is_not_sent(servers):
    fake = servers()
    with pytest.raises(EngineFailed, match=r"request 'a' has the token id 50, but the tokenizer has 50 tokens"):
        ask(fake, requests=[request(prompt=(1, 50))])
    assert not fake.asked, "such a request ends the engine of a vLLM server"


# --- loads ---


def test_a_server_has_no_more_requests_in_flight_than_it_may(servers):
    fake = servers()
    fake.awaited, fake.seconds = 3, 0.02
    completions = ask(fake, requests=[request(f"{i}", prompt=(i,)) for i in range(9)], max_requests=3)
    assert [each.ids[0] for each in completions] == [i + 1 for i in range(9)]
    assert fake.most_in_flight == 3


def test_a_server_on_a_cpu_gets_no_more_tokens_than_one_of_its_steps_takes(servers, logged):
    """Its engine would end: a prompt with a seed must not be divided (docs/rollout_engines.md)."""
    fake = servers()
    fake.awaited, fake.seconds = 3, 0.02
    fake.settings["scheduler_config"]["max_num_batched_tokens"] = 64  # a request has 3 + 4 tokens
    requests = [request(f"{i}") for i in range(30)]
    assert len(ask(fake, requests=requests)) == 30
    assert fake.most_in_flight >= 3 and fake.most_tokens <= 64
    assert all("seed" in body["sampling_params"] for body in fake.asked)
    fake.settings["scheduler_config"]["max_num_batched_tokens"] = 32  # less than one sequence can have
    fake.asked.clear()
    ask(fake, requests=requests[:2])
    assert not any("seed" in body["sampling_params"] for body in fake.asked)
    assert [line for line in logged if "have no seeds" in line and "--max-num-batched-tokens 32" in line]


def test_the_samples_of_a_prompt_go_to_one_server_and_prompts_are_spread(servers):
    fakes = servers(2)
    for fake in fakes:
        fake.seconds = 0.05
    requests = [request(f"{prompt}-{sample}", prompt=(prompt,)) for prompt in range(4) for sample in range(4)]
    ask(*fakes, requests=requests)
    prompts = [{tuple(body["token_ids"]) for body in fake.asked} for fake in fakes]
    assert not prompts[0] & prompts[1] and [len(each) for each in prompts] == [2, 2]


def test_a_group_leaves_a_server_that_is_overloaded(servers):
    fakes = servers(2)
    for fake in fakes:
        fake.seconds = 0.1
    ask(*fakes, requests=[request(f"{i}") for i in range(60)])
    counts = sorted(len(fake.asked) for fake in fakes)
    assert sum(counts) == 60 and counts[0] >= 15, counts


def test_a_paused_request_goes_on_after_resume(servers):
    fake = servers()

    async def run():
        async with sender(fake) as requests_to:
            await requests_to.call_all(DIALECT.pause)
            kept = asyncio.ensure_future(requests_to.complete(request("kept")))
            await asyncio.sleep(0.1)
            assert not kept.done()
            await requests_to.call_all(DIALECT.resume)
            return await asyncio.wait_for(kept, 10)

    kept = asyncio.run(run())
    assert (kept.ids, kept.reason) == ((6, 7, 8, 9), "length")
    assert fake.called == ["/pause?mode=keep", "/resume"]
