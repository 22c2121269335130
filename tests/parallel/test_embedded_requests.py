"""The embedded engine decodes requests with continuous batching, while others end or get new weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedEngine, EmbeddedReplica, ModelPass
from rl_megatron.generation.interfaces import Completion, Request, Sampling
from rl_megatron.generation.requests import PartialCompletion, derive_seed, make_requests
from tests.parallel.layouts import EXPERTS, MODEL, VOCAB_SIZE, build_policy
from tests.parallel.test_generation import SAMPLINGS, STOP_STRINGS, prompts
from tests.parallel.test_transformers_engine import patched

GREEDY = Sampling(30, temperature=0.0)
LENGTHS = [12, 3, 12, 1, 7, 12, 5, 12, 2, 9, 12]


def completed(parallel: dict, order: list[int], model: Any) -> list[Completion]:
    """Return the completions of requests with different samplings that are given in this order."""
    policy = build_policy(parallel, model=model)
    requests = [
        Request(
            f"r{index}", tuple(prompts()[index]), Sampling(LENGTHS[index], (1.0, 0.7, 0.0)[index % 3]),
            derive_seed(4, index),
        )
        for index in order
    ]  # fmt: skip
    found = EmbeddedEngine(policy, batch_size=3).complete(requests if policy.topology.rank == 0 else [])
    assert [completion.request_id for completion in found] == [request.request_id for request in requests][: len(found)]
    return sorted(found, key=lambda completion: int(completion.request_id[1:]))


@pytest.mark.parametrize(
    ("world_size", "parallel", "model"),
    [
        (1, {}, MODEL),
        (2, {}, MODEL),
        (2, {"tensor": 2}, MODEL),
        (2, {"pipeline": 2}, MODEL),
        (2, {"expert": 2}, EXPERTS),
    ],
    ids=["one process", "data 2", "tensor 2", "pipeline 2", "experts data 2"],
)
def test_requests_get_the_same_tokens_in_whatever_order_they_are_given(ranks, world_size, parallel, model):
    count = len(LENGTHS)
    wanted = ranks.reference(completed, {}, list(range(count)), model)
    found, *others = ranks.run(world_size, completed, parallel, list(range(count))[::-1], model)
    assert not any(others)
    for one, other in zip(wanted, found, strict=True):
        assert (one.request_id, one.ids, one.reason) == (other.request_id, other.ids, other.reason)
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)
    assert [len(completion.ids) for completion in found] == LENGTHS


HYBRID_EXPERTS = replace(
    EXPERTS, full_attention_every=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, linear_conv_kernel_dim=4,
)  # fmt: skip


def one_token_after_others(parallel: dict) -> dict[str, torch.Tensor]:
    """Return completions of prompts of one token, in slots that longer sequences had before."""
    engine = EmbeddedEngine(build_policy(parallel, model=HYBRID_EXPERTS), batch_size=2)
    long, short = [[7, 8, 9, 10, 11]] * 4, [[token] for token in range(1, 9)]
    return dict(generate(engine, [*long, *short], Sampling(6, temperature=0.0), seed=0))


def test_a_prompt_of_one_token_does_not_see_the_states_of_its_slot(ranks):
    """The gated delta rule has states. Ranks that share experts read a stand-in for a prompt without earlier tokens."""
    wanted = ranks.reference(one_token_after_others, {})
    found = ranks.run(2, one_token_after_others, {"expert": 2})[0]
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


def with_new_weights_in_the_middle() -> dict[str, Any]:
    """Decode with one version of the weights for a few steps, and on with another; return the completions."""
    policy, ended = build_policy({}), {}

    def decode(
        sequences: list[PartialCompletion], steps: int = 1000
    ) -> tuple[list[Completion], list[PartialCompletion]]:
        decoder, found = Decoder(EmbeddedReplica(policy), max_slots=8), []
        decoder.add(sequences)
        with decoder.active():
            for _ in range(steps):
                found += decoder.advance() or []
            more, others = decoder.evict()
        return sorted(found + more, key=lambda completion: completion.request_id), others

    requests = make_requests(prompts()[:2], GREEDY, seed=0)
    ended["whole"], _ = decode([PartialCompletion(request) for request in requests])
    _, begun = decode([PartialCompletion(request) for request in requests], steps=6)
    for model_chunk in policy.model.model_chunks:
        for parameter in model_chunk.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    policy.model.version += 1
    rest = [
        replace(each.request, prompt=tuple(each.all_ids), sampling=replace(GREEDY, max_new_tokens=each.tokens_left))
        for each in begun
    ]
    ended["two versions"], _ = decode(begun)
    ended["new weights alone"], _ = decode([PartialCompletion(request) for request in rest])
    return {"version": policy.weight_version} | ended


def test_a_weight_change_in_the_middle_gives_two_spans_and_the_new_weights_tokens(ranks):
    answers = ranks.run(1, with_new_weights_in_the_middle)[0]
    assert len(answers["two versions"]) == 2
    for found, whole, alone in zip(
        answers["two versions"], answers["whole"], answers["new weights alone"], strict=True
    ):
        first, second = found.versions
        assert (first.version, second.version) == (answers["version"] - 1, answers["version"])
        assert (first.start, second.start, second.end) == (0, first.end, len(whole.ids)) and first.end > 0
        assert found.ids[: first.end] == whole.ids[: first.end] and found.ids[first.end :] == alone.ids
        assert found.ids != whole.ids, "or the new weights changed nothing"
        torch.testing.assert_close(
            torch.tensor(found.logprobs[first.end :]), torch.tensor(alone.logprobs), atol=1e-5, rtol=0
        )


class Operators(TorchDispatchMode):
    """Records the operators and the shapes of their tensors."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(tuple(each.shape) for each in args if isinstance(each, torch.Tensor))
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def operators_of_steps(model: Any) -> list[list]:
    """Return the operators of decoding steps at different positions within one width of the cache."""
    decoder = Decoder(EmbeddedReplica(build_policy({}, model=model)), max_slots=8)
    decoder.add(
        [PartialCompletion(request) for request in make_requests([[1] * 34, [2] * 35, [3]], Sampling(20), seed=0)]
    )
    steps = []
    with decoder.active():
        while not decoder.running or decoder.waiting:
            decoder.advance()
        decoder.advance()  # the first pass makes the layers' caches
        for _ in range(15):
            with Operators() as operators:
                decoder.advance()
            steps.append(operators.seen)
    return steps


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, sliding_window=4)], ids=["plain", "window"])
def test_a_decoding_step_issues_the_same_operators_and_shapes_at_every_position(ranks, model):
    first, *others = ranks.run(1, operators_of_steps, model)[0]
    assert len(first) > 100, "or nothing was recorded"
    assert all(step == first for step in others)
    assert not [
        name for name, _ in first if "repeat_interleave" in name or "histogram" in name or "_local_scalar" in name
    ]


def shapes_of_passes(batch_size: int, texts: list[list[int]], lengths: list[int]) -> list[tuple[int, ...]]:
    """Return the shapes [sequences, tokens] of all passes through the model."""
    decoder, shapes = Decoder(EmbeddedReplica(build_policy({})), batch_size), []
    original = ModelPass.__call__

    def recorded(self: ModelPass, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return original(self, tokens, *args, **kwargs)

    requests = make_requests(texts, Sampling(1), seed=0)
    decoder.add(
        [
            PartialCompletion(replace(request, sampling=Sampling(length)))
            for request, length in zip(requests, lengths, strict=True)
        ]
    )
    with patched(ModelPass, "__call__", recorded), decoder.active():
        while decoder.advance() is not None:
            pass
    return shapes


def test_a_sequence_that_ends_leaves_the_batch_and_a_waiting_one_takes_its_slot(ranks):
    shapes = ranks.run(1, shapes_of_passes, 3, [[4]] * len(LENGTHS), LENGTHS)[0]  # a prompt of one token is not read
    assert {width for _, width in shapes} == {1}
    counts = [count for count, _ in shapes]
    assert sum(counts) == sum(LENGTHS) and max(counts) == 3
    assert len(counts) < sum(LENGTHS) / 3 + max(LENGTHS), "slots stayed empty while requests waited"


def test_equal_prompts_are_read_once(ranks):
    texts = [[5, 6, 7, 8]] * 6 + [list(range(40))] * 3 + [[9, 6, 7, 8]]
    with_prompts = [shape for shape in ranks.run(1, shapes_of_passes, 16, texts, [2] * 10)[0] if shape[1] > 1]
    assert with_prompts == [(3, 39)] and VOCAB_SIZE > 40


def switched_off_while_decoding() -> tuple[bool, bool]:
    policy = build_policy({})
    config = ModelPass(policy).models[0].config
    config.apply_rope_fusion = True  # as with Transformer Engine
    with EmbeddedReplica(policy).active():
        inside = config.apply_rope_fusion
    return inside, config.apply_rope_fusion


def test_fused_rope_is_off_while_each_sequence_has_a_position_of_its_own(ranks):
    """Transformer Engine's fused RoPE has the same positions for all sequences of a batch."""
    assert ranks.run(1, switched_off_while_decoding) == [(False, True)]


def looking_every(steps: int, calls: int, parallel: dict, model: Any) -> list[Completion]:
    """Return all completions if the decoder looks for ended sequences every so many steps.

    After so many calls of `advance`, the sequences that have not ended move to another decoder.
    """
    found: list[Completion] = []
    sampling, strings = SAMPLINGS["temperature 1"], (None, STOP_STRINGS)
    sequences = [
        PartialCompletion(replace(request, sampling=replace(sampling, stop_strings=strings[index % 2])))
        for index, request in enumerate(make_requests(prompts(), sampling, seed=4))
    ]
    policy = build_policy(parallel, model=model)
    for allowed in (calls, 10**6):
        decoder = Decoder(EmbeddedReplica(policy), max_slots=3, steps_per_check=steps)
        decoder.add(sequences)
        with decoder.active():
            while allowed and (ended := decoder.advance()) is not None:
                found, allowed = found + ended, allowed - 1
            ended, sequences = decoder.evict()
        found += ended
    assert not sequences
    return sorted(found, key=lambda each: each.request_id)


@pytest.mark.parametrize(
    ("size", "parallel", "model"), [(1, {}, MODEL), (2, {"expert": 2}, EXPERTS)], ids=["one process", "expert 2"]
)
@pytest.mark.parametrize("calls", [0, 3, 10])
def test_completions_do_not_depend_on_how_often_the_decoder_looks_for_ended_sequences(
    ranks, size, parallel, model, calls
):
    every_step = ranks.reference(looking_every, 1, 0, {}, model)
    assert len({each.reason for each in every_step}) == 2 and len(every_step) == len(prompts())
    for found in ranks.run(size, looking_every, 8, calls, parallel, model):
        assert [(each.request_id, each.ids, each.reason) for each in found] == [
            (each.request_id, each.ids, each.reason) for each in every_step
        ]
