"""What every rollout engine promises, for all engines in the registry: batches, single requests, versions.

The policy has two ranks, tensor-parallel, fp32 and a tied embedding. SGLang is a stand-in (tests/stand_ins/sglang).
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.engines import ENGINES, build_engine
from rl_megatron.generation.interfaces import EngineFailed, Request, Sampling
from rl_megatron.generation.requests import derive_seed
from rl_megatron.generation.stop_strings import StopStrings
from tests.contract.engine_cases import CASES
from tests.parallel.layouts import build_policy

pytestmark = pytest.mark.change

VOCAB_SIZE, LONGEST, NEW = 128, 64, 12
# vLLM needs heads of 32 dimensions on a CPU.
MODEL = ModelConfig(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=2, num_query_groups=2, qkv_bias=True,
    max_sequence_length=LONGEST, vocab_size=VOCAB_SIZE, init_std=0.1,
)  # fmt: skip
GREEDY = Sampling(NEW, temperature=0.0)
SAMPLED = Sampling(NEW, temperature=0.7)
FILTERED = Sampling(NEW, temperature=1.3, top_k=9, top_p=0.8)


def prompts() -> list[list[int]]:
    """Return prompts of unequal length, two of which are equal."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 9, 4, 4, 7, 2, 6, 3]
    found = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    found[3] = found[2]
    return found


def change_weights(policy) -> None:
    """Change every weight by a little, differently on every row."""
    with torch.no_grad():
        for model_chunk in policy.model.model_chunks:
            for parameter in model_chunk.parameters():
                parameter.mul_(1.03)
    policy.model.version += 1


def difference(policy, batch) -> float:
    """Return the largest |trainer's − engine's logprob|."""
    trainers = policy.get_logprobs(batch)["logprobs"]
    return ((trainers - batch["generation_logprobs"]).abs() * batch["token_mask"]).max().item()


def texts_of(sequences: list[list[int]]) -> StopStrings:
    """Return texts of two tokens that are in the middle of some of the sequences."""
    tokenizer = train_bpe(["text"], 260)
    middles = [tokenizer.decode(ids[start : start + 2]) for ids in sequences[::2] for start in (3, 5)]
    return StopStrings(tuple(text for text in middles if "\ufffd" not in text), tokenizer.definition)


def batches(policy, engine, filters: bool) -> dict:
    """Return what `generate` gives."""
    found: dict = {"version": policy.weight_version}
    reference = EmbeddedEngine(policy)
    found["greedy"], found["reference"] = (
        generate(each, prompts(), GREEDY, seed=3).get_dict() for each in (engine, reference)
    )
    samplings = {"greedy": GREEDY, "sampled": SAMPLED} | ({"filtered": FILTERED} if filters else {})
    drawn = {name: generate(engine, prompts(), sampling, seed=3) for name, sampling in samplings.items()}
    found["drawn"] = {name: batch.get_dict() for name, batch in drawn.items()}
    found["differences"] = {name: difference(policy, batch) for name, batch in drawn.items()}
    found["again"] = generate(engine, prompts(), SAMPLED, seed=3).get_dict()
    found["another seed"] = generate(engine, prompts(), SAMPLED, seed=4).get_dict()
    found["reversed"] = generate(engine, prompts()[::-1], GREEDY, seed=3).get_dict()
    stop = int(found["greedy"]["input_ids"][1, 9 + 4])  # the fifth token of the second completion
    found["stop"] = stop
    found["stopping"] = generate(engine, prompts(), dataclasses.replace(GREEDY, stop_ids=(stop,)), seed=3).get_dict()
    at_texts = dataclasses.replace(SAMPLED, stop_strings=texts_of(completions(found["again"])))
    found["stopping at texts"] = generate(engine, prompts(), at_texts, seed=3).get_dict()
    for name, wrong in (("too long", [1] * (LONGEST - NEW + 1)), ("empty", [])):
        with pytest.raises(ConfigError) as refused:
            generate(engine, [[1], wrong], GREEDY, seed=0)
        found[name] = str(refused.value)
    return found


def with_new_weights(policy, engine) -> dict:
    """Change the weights, and return what the engine does before and after its update."""
    found: dict = {"stale": "not refused"}
    change_weights(policy)
    try:
        found["before"] = generate(engine, prompts(), GREEDY, seed=3).get_dict()
        found["stale"] = difference(policy, generate(engine, prompts(), GREEDY, seed=3))
    except EngineFailed as error:
        found["stale"] = str(error)
    engine.sync()
    batch = generate(engine, prompts(), GREEDY, seed=3)
    return found | {"after": batch.get_dict(), "difference": difference(policy, batch), "served": engine.served}


def requests(engine) -> dict:
    """Return what single requests give. Rank 0 calls it, while the other ranks do something else."""
    seeds = [derive_seed(3, index) for index in range(len(prompts()))]
    long = Sampling(LONGEST - 2, temperature=0.0)

    async def one_by_one():
        return [
            await engine.submit(Request(f"one-{index}", tuple(prompt), SAMPLED, seed))
            for index, (prompt, seed) in enumerate(zip(prompts(), seeds, strict=True))
        ]

    async def cancelled():
        cancelled = asyncio.ensure_future(engine.submit(Request("long-1", (7, 8), long, 1)))
        other = asyncio.ensure_future(engine.submit(Request("long-10", (7, 8), long, 1)))
        await asyncio.sleep(0)
        cancelled.cancel()
        return {"other": await other, "cancelled": cancelled.cancelled()}

    return {
        "one by one": asyncio.run(one_by_one()),
        **asyncio.run(cancelled()),
        "after": asyncio.run(engine.submit(Request("after", (7, 8), GREEDY, 1))),
    }


def use_engine(name: str, directory: Path) -> dict:
    """Start an engine once, and use it in all ways that the tests below check."""
    policy = build_policy({"tensor": 2}, MODEL, vocab_size=VOCAB_SIZE)
    case = CASES[name]
    overrides = ["data=arithmetic", *case.overrides(directory), f"output_dir={directory}"]
    stage = dataclasses.replace(load_config(overrides).first, model=MODEL)
    engine = build_engine(policy, stage, directory)
    try:
        engine.sync()
        found = {"batches": batches(policy, engine, case.filters), "new weights": with_new_weights(policy, engine)}
        if hasattr(engine, "submit") and policy.topology.rank == 0:
            found["requests"] = requests(engine)
        found["batch"] = generate(engine, prompts(), SAMPLED, seed=3).get_dict()
        return found
    finally:
        engine.close()


@pytest.fixture(scope="module", params=sorted(CASES))
def found(request, ranks, tmp_path_factory):
    reason = CASES[request.param].missing()
    if reason is not None:
        pytest.skip(reason)
    return ranks.run(2, use_engine, request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def given(found):
    return found[0]["batches"]


@pytest.fixture
def asked(found):
    if "requests" not in found[0]:
        pytest.skip("this engine takes no single requests")
    return found[0]["requests"]


def test_every_engine_of_the_package_has_a_case():
    assert set(CASES) == {name for name in ENGINES if ENGINES[name].build.__module__.startswith("rl_megatron.")}


def completions(batch) -> list[list[int]]:
    spans = zip(batch["input_ids"].tolist(), batch["prompt_lengths"], batch["input_lengths"], strict=True)
    return [ids[start:end] for ids, start, end in spans]


def test_equal_weights_give_the_embedded_engines_tokens_and_logprobs_if_greedy(given):
    assert torch.equal(given["greedy"]["input_ids"], given["reference"]["input_ids"])
    gap = given["greedy"]["generation_logprobs"] - given["reference"]["generation_logprobs"]
    assert gap.abs().max() < 1e-5


def test_logprobs_are_the_trainers(given):
    assert {"greedy", "sampled"} <= set(given["differences"])
    assert max(given["differences"].values()) < 1e-5, given["differences"]


def test_every_rank_gets_the_same(found):
    first, second = (each["batches"]["drawn"]["sampled"] for each in found)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_prompts_keep_their_order(given):
    for batch in (given["greedy"], given["drawn"]["sampled"]):
        for ids, length, prompt in zip(batch["input_ids"], batch["prompt_lengths"], prompts(), strict=True):
            assert ids[:length].tolist() == prompt
    assert completions(given["reversed"]) == completions(given["greedy"])[::-1]


def test_completions_have_all_tokens_that_were_asked_for_unless_they_stop(given):
    for batch in given["drawn"].values():
        assert (batch["input_lengths"] - batch["prompt_lengths"] == NEW).all() and not batch["stopped"].any()
        assert batch["token_mask"].sum() == NEW * len(prompts())


def test_a_stop_token_ends_a_completion_and_is_a_part_of_it(given):
    batch, whole = given["stopping"], completions(given["greedy"])
    assert batch["stopped"][1]
    for ids, stopped, before in zip(completions(batch), batch["stopped"], whole, strict=True):
        end = before.index(given["stop"]) + 1 if stopped else NEW
        assert ids == before[:end] and (given["stop"] in before) == bool(stopped)


def test_a_text_ends_a_completion_at_the_first_token_after_which_it_is_there(given):
    whole, batch = completions(given["again"]), given["stopping at texts"]
    texts = texts_of(whole)
    ends = [next((n for n in range(1, NEW + 1) if texts.appear_in(ids[:n])), NEW) for ids in whole]
    assert min(ends) < NEW, "or the test shows nothing"
    assert completions(batch) == [ids[:end] for ids, end in zip(whole, ends, strict=True)]
    assert batch["stopped"].tolist() == [texts.appear_in(ids) for ids in whole]
    length = batch["input_ids"].size(1)
    logprobs, sampled = given["again"]["generation_logprobs"][:, :length], batch["token_mask"].bool()
    assert ((batch["generation_logprobs"] - logprobs).abs()[sampled] < 1e-5).all()


def test_every_token_has_the_version_of_the_policys_weights(given, found):
    for batch, version in (
        (given["drawn"]["sampled"], given["version"]),
        (found[0]["new weights"]["after"], given["version"] + 1),
    ):
        sampled = batch["token_mask"].bool()
        assert (batch["token_weight_versions"][sampled] == version).all()
        assert (batch["token_weight_versions"][~sampled] == -1).all() and (batch["weight_version"] == version).all()


def test_the_seed_decides_the_samples(given):
    assert torch.equal(given["again"]["input_ids"], given["drawn"]["sampled"]["input_ids"])
    assert completions(given["another seed"]) != completions(given["again"])
    same = completions(given["again"])
    assert same[2] != same[3]  # samples of one prompt differ


def test_a_prompt_that_is_empty_or_too_long_is_refused(found):
    for each in found:
        assert "exceed" in each["batches"]["too long"] and "empty" in each["batches"]["empty"]


def test_changed_weights_are_used_after_an_update_and_never_before(found):
    for each in found:
        changed, stale = each["new weights"], each["new weights"]["stale"]
        assert changed["difference"] < 1e-5
        assert "call sync()" in stale if isinstance(stale, str) else stale < 1e-5
        gap = changed["after"]["generation_logprobs"].sum() - each["batches"]["greedy"]["generation_logprobs"].sum()
        assert abs(gap) > 1e-3
        assert changed["served"].version in (None, each["batches"]["version"] + 1)


def test_requests_one_by_one_give_the_batch(asked, found):
    version = found[0]["batches"]["version"] + 1
    for completion, ids in zip(asked["one by one"], completions(found[0]["batch"]), strict=True):
        assert list(completion.ids) == ids and len(completion.logprobs) == len(ids)
        (span,) = completion.versions
        assert (span.version, span.start, span.end, completion.reason) == (version, 0, NEW, "length")


def test_a_cancelled_request_leaves_others_and_the_engine_as_they_are(asked):
    assert asked["other"].reason == "length" and len(asked["other"].ids) == LONGEST - 2
    assert asked["cancelled"] and asked["after"].ids == asked["other"].ids[:NEW]
