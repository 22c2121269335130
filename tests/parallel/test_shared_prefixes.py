"""Computing common beginnings once changes neither a loss nor a gradient, in any layout."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from tests.contract.loss_cases import VOCAB, token_logits
from tests.contract.packing import PACKABLE, Shape, random_batch
from tests.contract.test_shared_tokens import grow
from tests.parallel.layouts import EXPERTS, MODEL, VOCAB_SIZE, build_policy, gradients, worst_relative_error

SETS, SAMPLES, WIDTH = 6, 4, 40


def tree_batch() -> BatchedDataDict:
    """Return samples of a few prompts. Some samples also begin alike, and one is the beginning of another."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB_SIZE, (SETS * SAMPLES, WIDTH), generator=generator)
    lengths = torch.randint(14, WIDTH + 1, (len(ids),), generator=generator)
    mask = torch.zeros(ids.shape)
    for first in range(0, len(ids), SAMPLES):
        prompt = 4 + first % 9
        ids[first : first + SAMPLES, :prompt] = ids[first, :prompt]
        ids[first + 2, : prompt + 7] = ids[first + 1, : prompt + 7]
        ids[first + 3, : lengths[first]] = ids[first, : lengths[first]]
        lengths[first + 3] = max(lengths[first], lengths[first + 3])
        mask[first : first + SAMPLES, prompt:] = 1
    mask[3, 6:12] = 0  # a token may count in one of the sequences that share it
    mask *= torch.arange(WIDTH) < lengths[:, None]
    return BatchedDataDict(
        {
            "input_ids": ids.where(torch.arange(WIDTH) < lengths[:, None], 0),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": (torch.arange(len(ids)) != 5).float(),
            "advantages": torch.randn(ids.shape, generator=generator),
            "generation_logprobs": -3 + torch.rand(ids.shape, generator=generator),
            "prev_logprobs": -3 + torch.rand(ids.shape, generator=generator),
            PREFIX_SET: torch.arange(len(ids)) // SAMPLES,
        }
    )


def one_step(parallel: dict, batching: Batching, model=MODEL):
    policy = build_policy(parallel, model, batching=batching)
    batch = tree_batch()
    logprobs = policy.get_logprobs(batch)["logprobs"]
    loss = build_loss("clipped_pg", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.0})
    plan = policy.plan(batch, loss)
    metrics = policy.accumulate_gradients(batch, loss)
    trees = [microbatch.tree for microbatch in plan.microbatches]
    return metrics, gradients(policy), logprobs, trees


@pytest.fixture(scope="session")
def one_process(ranks):
    return ranks.reference(one_step, {}, Batching("packed", tokens=160))


def assert_same(found, wanted):
    metrics, found_gradients, logprobs, trees = found
    assert all(tree is not None for tree in trees), "no prefix was shared"
    torch.testing.assert_close(logprobs, wanted[2], rtol=0, atol=1e-5)
    assert metrics == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    error, name = worst_relative_error(found_gradients, wanted[1])
    assert error <= 1e-4, name


def random_tree_batch(seed: int) -> BatchedDataDict:
    """Return groups of 1 to 16 sequences, each of which has up to five segments."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences: list[list[int]] = []
    sets: list[int] = []
    for number in range(rng.randint(1, 3)):
        group: list[list[int]] = []
        for _ in range(rng.choice((1, 2, 3, 5, 8, 16))):
            begin: list[int] = []
            for _ in range(rng.randint(0, 4)):  # take more and more of sequences that begin with what there is
                alike = [each for each in group if each[: len(begin)] == begin and len(each) > len(begin)]
                if alike:
                    begin = (like := rng.choice(alike))[: rng.randint(len(begin) + 1, len(like))]
            length = min(WIDTH, len(begin) + rng.randint(1, 9))
            group.append((begin + [rng.randrange(1, VOCAB_SIZE) for _ in range(9)])[:length])
        sequences += group
        sets += [number] * len(group)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    there = torch.arange(ids.size(1)) < lengths[:, None]
    values = {
        name: torch.rand(ids.shape, generator=generator) - shift
        for name, shift in (("advantages", 0.5), ("prev_logprobs", 4.5), ("generation_logprobs", 4.5))
    }
    counted = (torch.rand(ids.shape, generator=generator) < 0.8) & there
    return BatchedDataDict(
        input_ids=ids, input_lengths=lengths, token_mask=counted.float(), sample_mask=torch.ones(len(ids)), **values,
        **{PREFIX_SET: torch.tensor(sets)},
    )  # fmt: skip


def compare_random_trees(seeds: range) -> tuple[float, float, float, int]:
    """Return the largest errors of logprobs, metrics and gradients, and how many batches have trees of three levels."""
    policy = build_policy({}, batching=Batching("packed", tokens=400))
    loss, worst, deep = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}), [0.0] * 3, 0
    for seed in seeds:
        batch, found = random_tree_batch(seed), []
        for shares in (False, True):
            policy.batching = replace(policy.batching, share_prefixes=shares)
            trees = [microbatch.tree for microbatch in policy.plan(batch, loss).microbatches]
            logprobs = policy.get_logprobs(batch)["logprobs"]
            found.append((logprobs, policy.accumulate_gradients(batch, loss), gradients(policy)))
        deep += any(tree is not None and tree.depth >= 3 for tree in trees)
        (wanted, wanted_metrics, wanted_gradients), (shared, metrics, shared_gradients) = found
        errors = (
            (shared - wanted).abs().max().item(),
            max(abs(metrics[name] - value) / max(abs(value), 1.0) for name, value in wanted_metrics.items()),
            worst_relative_error(shared_gradients, wanted_gradients)[0],
        )
        worst = list(map(max, worst, errors))
    return *worst, deep


def test_random_trees_change_no_value_and_no_gradient(ranks, is_nightly):
    num_batches = 500 if is_nightly else 30
    ((logprobs, metrics, gradient, deep),) = ranks.run(1, compare_random_trees, range(num_batches))
    assert logprobs <= 1e-5 and metrics <= 1e-5 and gradient <= 1e-4
    assert deep > num_batches / 4


FAMILIES = {
    "experts": replace(EXPERTS, router_aux_loss=0.5, router_aux_loss_scope="global"),
    "windows and sinks": replace(
        EXPERTS, qkv_bias=True, qk_norm=False, linear_bias=True, attention_sinks=True, activation="swiglu_oai",
        sliding_window=8, global_attention_every=2,
    ),
    "latent attention": ModelConfig(
        num_layers=4, hidden_size=36, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_lora_rank=11,
        q_lora_rank=13, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, num_experts=4,
        expert_ffn_hidden_size=20, shared_expert_ffn_hidden_size=20, first_dense_layers=1, router_score="sigmoid",
        router_bias=True, tie_embeddings=False, max_sequence_length=64, init_std=0.1,
    ),
    "delta rule": replace(
        MODEL, full_attention_every=2, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6,
        linear_value_head_dim=10, linear_conv_kernel_dim=3, attention_output_gate=True, qkv_bias=False,
        zero_centered_norm=True, tie_embeddings=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", [{}, {"context": 2}, {"tensor": 2, "sequence": True}], ids=str)
def test_a_family_shares_prefixes_exactly(ranks, parallel, family):
    model, batching = FAMILIES[family], Batching("packed", tokens=160)
    wanted = ranks.reference(one_step, {}, batching, model)
    recompute = "full" if "tensor" in parallel else "none"
    experts = {"expert": 2} if model.num_experts and "tensor" in parallel else {}
    found = ranks.run(
        4, one_step, parallel | experts, replace(batching, share_prefixes=True), replace(model, recompute=recompute)
    )
    assert_same(found[0], wanted)


LAYOUTS = [
    {},
    {"tensor": 2, "sequence": True},
    {"context": 2},
    {"context": 2, "tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2},
]


@pytest.mark.parametrize("kind", ["packed", "dynamic", "padded"])
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_shared_prefixes_change_no_value_and_no_gradient(ranks, one_process, parallel, kind):
    by_rank = ranks.run(4, one_step, parallel, Batching(kind, sequences=4, tokens=160, share_prefixes=True))
    assert_same(by_rank[0], one_process)


# Every loss of a policy's logits, with all its kinds of settings.
LOSSES = {str(case): case for case in PACKABLE if case.make_output is token_logits and not case.outputs_in_batch}


def one_step_of_each_loss(parallel: dict, shares: bool) -> dict:
    """Return each loss's metrics and gradients."""
    policy = build_policy(parallel, vocab_size=VOCAB, batching=Batching("packed", tokens=96, share_prefixes=shares))
    shape, found = Shape((16, 15, 14, 16, 12, 16), 16), {}
    for name, case in LOSSES.items():
        batch, _ = random_batch(case, shape, torch.Generator().manual_seed(0))
        grow(batch, shape.lengths, random.Random(0))
        batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
        lengths, sets = torch.tensor(shape.lengths), torch.zeros(len(shape.lengths), dtype=torch.long)
        batch = BatchedDataDict(batch | {"input_lengths": lengths, PREFIX_SET: sets})
        loss = build_loss(case.name, case.cfg)
        trees = [microbatch.tree for microbatch in policy.plan(batch, loss).microbatches]
        assert all((tree is not None) == shares for tree in trees), name
        found[name] = policy.accumulate_gradients(batch, loss), gradients(policy)
    return found


@pytest.mark.parametrize(
    "parallel", [{"context": 4}, {"pipeline": 4}, {"context": 2, "tensor": 2}, {"pipeline": 2, "tensor": 2}], ids=str
)
def test_every_loss_shares_prefixes_exactly(ranks, parallel):
    by_loss = ranks.reference(one_step_of_each_loss, {}, False)
    without_gradient = [name for name, (_, each) in by_loss.items() if not any(x.any() for x in each.values())]
    assert set(without_gradient) <= {"clipped_pg-gspo with icepop"}  # it drops all tokens of these sequences
    for name, (metrics, gradient) in ranks.run(4, one_step_of_each_loss, parallel, True)[0].items():
        wanted_metrics, wanted_gradient = by_loss[name]
        assert metrics == pytest.approx(wanted_metrics, rel=1e-4, abs=1e-5), name
        error, worst = worst_relative_error(gradient, wanted_gradient)
        assert error <= 1e-4, (name, worst)
