"""The embedded engine: its logprobs equal the trainer's, and rollouts do not depend on the layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.stop_strings import StopStrings
from rl_megatron.training.metrics import NonFiniteLoss
from tests.parallel.layouts import EXPERTS, MODEL, VOCAB_SIZE, build_policy

STOP = 7
SEED = 4
LAYOUTS = {
    "one process": (1, {}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "interleaved pipeline 2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "context 2": (2, {"context": 2}),
    "data 2": (2, {}),
    "tensor 2 pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
}
# A tokenizer of one letter per token, and texts of two tokens that end a completion.
LETTERS = [chr(ord("A") + token) for token in range(VOCAB_SIZE)]
_SPELLING = Backend(models.BPE(dict(zip(LETTERS, range(VOCAB_SIZE), strict=True)), []))
_SPELLING.decoder = decoders.Fuse()
STOP_STRINGS = StopStrings(
    tuple(a + b for a in LETTERS[::3] for b in LETTERS[1::4]),
    _SPELLING.to_str(),
)
SAMPLINGS = {
    "temperature 1": Sampling(max_new_tokens=12, stop_ids=(STOP,)),
    "temperature 0.7": Sampling(max_new_tokens=12, temperature=0.7, stop_ids=(STOP,)),
    "top-k and top-p": Sampling(
        max_new_tokens=12, temperature=1.3, top_k=9, top_p=0.8, stop_ids=(STOP,), stop_strings=STOP_STRINGS
    ),
    "greedy": Sampling(max_new_tokens=12, temperature=0.0, stop_ids=(STOP,)),
}


def prompts(count: int = 11) -> list[list[int]]:
    """Return prompts of unequal length, one of them of a single token."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 9] + torch.randint(2, 9, (count - 2,), generator=generator).tolist()
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def rollouts_and_logprobs(
    parallel: dict,
    samplings: dict[str, Sampling],
    batch_size: int,
    model: ModelConfig = MODEL,
    peft: LoraConfig | None = None,
) -> dict:
    """Return, by the name of the sampling, the rollouts and the trainer's logprobs of them."""
    policy = build_policy(parallel, model=model, peft=peft)
    engine = EmbeddedEngine(policy, batch_size=batch_size)
    found = {}
    for name, sampling in samplings.items():
        rollouts = generate(engine, prompts(), sampling, seed=SEED)
        found[name] = (rollouts.get_dict(), policy.get_logprobs(rollouts)["logprobs"])
    return found


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, rollouts_and_logprobs, {}, SAMPLINGS, 256)[0]


LORA = LoraConfig(r=3, lora_alpha=5.0, init_lora_weights=False)
KINDS = {
    "experts": (EXPERTS, None),
    "window": (dataclasses.replace(MODEL, sliding_window=4), None),
    "LoRA": (EXPERTS, LORA),
    "DoRA": (MODEL, dataclasses.replace(LORA, use_dora=True)),
}


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("experts", {"expert": 2}),  # ranks finish at different steps, but need each other's experts until the last one
        ("experts", {"expert": 2, "tensor": 2, "sequence": True}),
        ("experts", {"expert_tensor": 2}),
        ("experts", {"expert_tensor": 2, "tensor": 2, "sequence": True}),
        ("window", {"context": 2}),
        ("LoRA", {"tensor": 2, "sequence": True}),
        ("DoRA", {"tensor": 2, "sequence": True}),
    ],
    ids=[
        "experts data 2", "experts tensor 2", "split experts data 2", "split experts tensor 2", "window context 2",
        "LoRA tensor 2", "DoRA tensor 2",
    ],
)  # fmt: skip
def test_every_kind_of_model_generates_what_the_trainer_and_one_process_compute(ranks, kind, parallel):
    few = {name: SAMPLINGS[name] for name in ("temperature 1", "greedy")}
    wanted = ranks.reference(rollouts_and_logprobs, {}, few, 256, *KINDS[kind])
    found = ranks.run(2, rollouts_and_logprobs, parallel, few, 4, *KINDS[kind])[0]
    for name, (rollouts, logprobs) in found.items():
        sampled = rollouts["token_mask"].bool()
        torch.testing.assert_close(rollouts["generation_logprobs"][sampled], logprobs[sampled], atol=1e-5, rtol=0)
        torch.testing.assert_close(rollouts["input_ids"], wanted[name][0]["input_ids"], atol=0, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trainer_computes_the_logprobs_of_the_rollouts(ranks, one_process, layout):
    world_size, parallel = LAYOUTS[layout]
    by_rank = ranks.run(world_size, rollouts_and_logprobs, parallel, SAMPLINGS, 4)
    for name in SAMPLINGS:
        rollouts, logprobs = by_rank[0][name]
        sampled = rollouts["token_mask"].bool()
        assert sampled.any(1).all(), "every prompt gets at least one token"
        torch.testing.assert_close(rollouts["generation_logprobs"][sampled], logprobs[sampled], atol=1e-5, rtol=0)
        assert (rollouts["generation_logprobs"][~sampled] == 0).all()
        for results in by_rank[1:]:  # every rank holds the same rollouts
            torch.testing.assert_close(results[name][0]["input_ids"], rollouts["input_ids"], atol=0, rtol=0)
            torch.testing.assert_close(results[name][1], logprobs, atol=0, rtol=0)
        expected = one_process[name][0]
        torch.testing.assert_close(rollouts["input_ids"], expected["input_ids"], atol=0, rtol=0)
        torch.testing.assert_close(rollouts["input_lengths"], expected["input_lengths"], atol=0, rtol=0)


def test_rollouts_are_well_formed(one_process):
    for name, sampling in SAMPLINGS.items():
        rollouts, _ = one_process[name]
        for sample, prompt in enumerate(prompts()):
            start, stop = rollouts["prompt_lengths"][sample].item(), rollouts["input_lengths"][sample].item()
            assert rollouts["input_ids"][sample, :start].tolist() == prompt
            completion = rollouts["input_ids"][sample, start:stop].tolist()
            assert STOP not in completion[:-1], "nothing follows a stop token"
            text = "".join(LETTERS[token] for token in completion)
            texts = () if sampling.stop_strings is None else sampling.stop_strings.texts
            assert not any(each in text[:-1] for each in texts), "nothing follows a stop string"
            ended = completion[-1] == STOP or any(map(text.endswith, texts))
            assert rollouts["stopped"][sample].item() == ended
            assert rollouts["stopped"][sample] or len(completion) == sampling.max_new_tokens
            assert max(completion) < VOCAB_SIZE, "ids of the vocabulary's padding are never sampled"
            assert rollouts["token_mask"][sample].sum() == stop - start
    temperatures = {name: one_process[name][0]["temperature"][0].item() for name in SAMPLINGS}
    expected = {"temperature 1": 1.0, "temperature 0.7": 0.7, "top-k and top-p": 1.3, "greedy": 1.0}
    assert temperatures == pytest.approx(expected)
    assert any(one_process["temperature 1"][0]["stopped"]), "no completion ended with the stop token"
    by_text = one_process["top-k and top-p"][0]
    last = by_text["input_ids"].gather(1, by_text["input_lengths"][:, None] - 1)[:, 0]
    assert (by_text["stopped"] & (last != STOP)).sum() > 2, "too few completions ended with a stop string"


def greedy_by_hand() -> tuple[torch.Tensor, torch.Tensor]:
    """Decode greedily, one prompt at a time, with whole forward passes and without a cache."""
    policy = build_policy({})
    model = policy.model.model_chunks[0]
    sampling = SAMPLINGS["greedy"]
    by_hand = []
    for prompt in prompts():
        tokens = list(prompt)
        while len(tokens) < len(prompt) + sampling.max_new_tokens and tokens[len(prompt) :][-1:] != [STOP]:
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), None, None)
            tokens.append(int(logits[0, -1, :VOCAB_SIZE].argmax()))
        by_hand.append(tokens)
    return by_hand


def test_greedy_equals_decoding_without_a_cache(ranks, one_process):
    rollouts, _ = one_process["greedy"]
    by_hand = ranks.run(1, greedy_by_hand)[0]
    for sample, tokens in enumerate(by_hand):
        assert rollouts["input_ids"][sample, : rollouts["input_lengths"][sample]].tolist() == tokens


def on_policy_ratio(parallel: dict) -> tuple[float, float]:
    """Return max|ratio − 1| of tokens sampled at temperature 0.7, before a step and after it."""
    from rl_megatron.losses import build_loss

    policy = build_policy(parallel)
    engine = EmbeddedEngine(policy)
    rollouts = generate(engine, prompts(), dataclasses.replace(SAMPLINGS["temperature 0.7"]), seed=1)
    rollouts["prev_logprobs"] = rollouts["generation_logprobs"]
    rollouts["advantages"] = torch.randn(rollouts["token_mask"].shape, generator=torch.Generator().manual_seed(0))
    loss_fn = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0})
    first = policy.train(rollouts, loss_fn, gbs=rollouts.size)
    second = policy.train(rollouts, loss_fn, eval_mode=True, gbs=rollouts.size)
    return tuple(max(abs(r["probs_ratio_max"] - 1), abs(r["probs_ratio_min"] - 1)) for r in (first, second))


@pytest.mark.parametrize("layout", ["one process", "tensor 2", "pipeline 2"])
def test_the_on_policy_ratio_is_one(ranks, layout):
    world_size, parallel = LAYOUTS[layout]
    before, after = ranks.run(world_size, on_policy_ratio, parallel)[0]
    assert before <= 1e-5
    assert after > 1e-3, "the step moved the policy, so the ratio could have differed"


def from_nan_weights(parallel: dict) -> str:
    policy = build_policy(parallel)
    for model_chunk in policy.model.model_chunks:
        for parameter in model_chunk.parameters():
            parameter.data.fill_(torch.nan)
    with pytest.raises(NonFiniteLoss) as error:
        generate(EmbeddedEngine(policy), prompts(), SAMPLINGS["greedy"], seed=0)
    return str(error.value)


@pytest.mark.parametrize("layout", ["one process", "tensor 2", "pipeline 2"])
def test_nan_logits_are_refused_on_every_rank(ranks, layout):
    world_size, parallel = LAYOUTS[layout]
    for message in ranks.run(world_size, from_nan_weights, parallel):
        assert "logits are NaN" in message and "token 1" in message


def from_nan_weights_of_one_rank(parallel: dict, model: ModelConfig) -> str:
    policy = build_policy(parallel, model=model)
    if policy.topology.data_rank == 1:
        for model_chunk in policy.model.model_chunks:
            for name, parameter in model_chunk.named_parameters():
                if "embedding" in name or "output_layer" in name:  # not experts, which other ranks use
                    parameter.data.fill_(torch.nan)
    with pytest.raises(NonFiniteLoss) as error:
        generate(EmbeddedEngine(policy, batch_size=4), prompts(), SAMPLINGS["greedy"], seed=0)
    return str(error.value)


@pytest.mark.parametrize(
    ("world_size", "parallel", "model"),
    [(2, {}, MODEL), (4, {"pipeline": 2}, MODEL), (2, {"expert": 2}, EXPERTS)],
    ids=["data 2", "data 2 pipeline 2", "experts data 2"],
)
def test_nan_logits_of_one_rank_are_refused_on_every_rank(ranks, world_size, parallel, model):
    for message in ranks.run(world_size, from_nan_weights_of_one_rank, parallel, model):
        assert "logits are NaN" in message and "token 1" in message


def too_long() -> str:
    engine = EmbeddedEngine(build_policy({}))
    with pytest.raises(ConfigError) as error:
        generate(engine, [[1] * 60], Sampling(max_new_tokens=MODEL.max_sequence_length), seed=0)
    return str(error.value)


def test_a_prompt_too_long_for_its_completion_is_refused(ranks):
    message = ranks.run(1, too_long)[0]
    assert "60 tokens" in message and "max_new_tokens" in message and "max_sequence_length=64" in message
