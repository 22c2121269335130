"""Preference pairs and score heads: steps in every layout equal those of one process; heads and checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.losses import DPOLossFn, MSEValueLoss, NLLLoss, PreferenceLoss
from tests.parallel.layouts import (
    DISTRIBUTED_OPTIMIZER,
    MODEL,
    build_policy,
    gradients,
    weights,
    worst_relative_error,
)
from tests.parallel.test_layouts import GRADIENT_TOLERANCE, LAYOUTS, LOSS_TOLERANCE, random_batch

UNTIED = dataclasses.replace(MODEL, tie_embeddings=False)


def value_batch(num_sequences: int, length: int, seed: int) -> BatchedDataDict:
    batch = random_batch(num_sequences, length, seed)
    generator = torch.Generator().manual_seed(seed)
    batch["values"] = torch.randn(num_sequences, length, generator=generator)
    batch["returns"] = batch["values"] + torch.randn(num_sequences, length, generator=generator)
    return batch


def take_steps(parallel: dict, mbs: int) -> list[tuple[dict, dict, dict]]:
    """Take steps of a reward model, a critic and DPO on 10 sequences; return (metrics, gradients, weights) of each.

    Halves of 10 sequences would cut one of the 5 pairs in two.
    """
    scorer = build_policy(parallel, head="score", micro_batch_size=mbs)
    policy = build_policy(parallel, micro_batch_size=mbs)
    pairwise = PreferenceLoss()
    dpo = DPOLossFn({"sft_loss_weight": 0.1, "reference_policy_kl_penalty": 0.3})
    value = MSEValueLoss({"cliprange": 0.5})
    work = [(scorer, random_batch(10, 20, 0), pairwise), (scorer, random_batch(10, 21, 1), pairwise)]
    work += [(scorer, value_batch(10, 20, 2), value), (policy, random_batch(10, 20, 3), dpo)]
    work += [(policy, random_batch(10, 17, 4), dpo)]
    taken = []
    for model, batch, loss_fn in work:
        report = model.accumulate_gradients(batch, loss_fn)
        gradient = gradients(model)
        report |= model.train(batch, loss_fn, gbs=batch.size)
        taken.append((report, gradient, weights(model)))
    return taken


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, take_steps, {}, 10)[0]


@pytest.mark.parametrize(
    ("layout", "mbs"),
    [
        ("tensor 2 sequence context 2", 2),
        ("interleaved pipeline 2", 2),
        ("pipeline 2 data 2", 2),
        ("tensor 2 pipeline 2", 8),
        ("data 2", 8),  # more sequences than a rank has
    ],
)
def test_loss_and_every_gradient_equal_one_process(ranks, one_process, layout, mbs):
    world_size, parallel = LAYOUTS[layout]
    taken = ranks.run(world_size, take_steps, parallel, mbs)[0]
    for step, ((report, gradient, _), (wanted, wanted_gradient, _)) in enumerate(zip(taken, one_process, strict=True)):
        assert report.keys() == wanted.keys()
        assert report["loss"] == pytest.approx(wanted["loss"], rel=LOSS_TOLERANCE), step
        for name in wanted.keys() - {"packing_efficiency"}:  # it depends on the microbatches
            # Some metrics are means of numbers of size 1 that cancel, so the absolute error is relative to 1.
            assert report[name] == pytest.approx(wanted[name], rel=GRADIENT_TOLERANCE, abs=1e-5), (step, name)
        error, name = worst_relative_error(gradient, wanted_gradient)
        assert error <= GRADIENT_TOLERANCE, (step, name, error)


def test_every_step_of_one_process_has_a_gradient(one_process):
    for report, gradient, _ in one_process:
        assert report["grad_norm"] > 1e-3
        assert all(tensor.abs().max() > 0 for tensor in gradient.values())
    assert "output_layer.weight" in one_process[0][1] and "output_layer.weight" not in one_process[3][1]


def scores_of(parallel: dict) -> tuple[torch.Tensor, torch.Tensor]:
    model = build_policy(parallel, head="score", micro_batch_size=2)
    batch = random_batch(5, 19, 0)
    return model.get_values(batch)["values"], model.score(batch)["scores"]


@pytest.mark.parametrize("layout", ["tensor 2 sequence", "interleaved pipeline 2", "context 2", "pipeline 2 data 2"])
def test_values_and_rewards_equal_one_process(ranks, layout):
    wanted = ranks.reference(scores_of, {})
    world_size, parallel = LAYOUTS[layout]
    for found in ranks.run(world_size, scores_of, parallel):
        for values, wanted_values in zip(found, wanted, strict=True):
            torch.testing.assert_close(values, wanted_values, rtol=1e-5, atol=1e-6)


def scores_without_lengths() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of sequences, and of the same sequences without their lengths."""
    model, batch = build_policy({}, head="score", micro_batch_size=2), random_batch(5, 19, 0)
    lengths = batch["input_lengths"]
    batch["token_mask"] = (torch.arange(19) < lengths[:, None]).float()
    assert lengths.min() < 19
    wanted = model.score(batch)["scores"]
    del batch["input_lengths"]
    return model.score(batch)["scores"], wanted


def test_a_score_without_lengths_is_read_at_the_last_token_that_counts(ranks):
    torch.testing.assert_close(*ranks.run(1, scores_without_lengths)[0], rtol=1e-5, atol=1e-6)


def check_positions() -> None:
    """Change one token, and check which values and rewards change."""
    model = build_policy({}, head="score", micro_batch_size=4)
    batch = random_batch(4, 12, 0)
    values, rewards = model.get_values(batch)["values"], model.score(batch)["scores"]
    changed = BatchedDataDict(dict(batch))
    changed["input_ids"] = batch["input_ids"].clone()
    changed["input_ids"][:, 5] = (batch["input_ids"][:, 5] + 1) % 50
    changed_values = model.get_values(changed)["values"]
    assert (values[:, 0] == 0).all()
    assert torch.equal(values[:, :6], changed_values[:, :6]), "a value depends on its own token"
    is_longer = batch["input_lengths"] > 6
    assert is_longer.any() and (values[:, 6] != changed_values[:, 6])[is_longer].all()
    unmasked = model.get_values(BatchedDataDict(input_ids=batch["input_ids"]))["values"]
    for sequence, length in enumerate(batch["input_lengths"].tolist()):
        assert torch.equal(values[sequence, :length], unmasked[sequence, :length])
        if length < 12:
            assert rewards[sequence] == unmasked[sequence, length], "the reward is not the score after the last token"
            assert (values[sequence, length:] == 0).all(), "a value after the sequence's end"


def test_a_value_is_read_before_its_token_and_a_reward_after_the_last(ranks):
    ranks.run(1, check_positions)


def rewards_in_training_and_after() -> tuple[dict, list[float], list[float]]:
    """Return the metrics of a training step, and the scores of the chosen and the rejected sequences before it."""
    model = build_policy({}, head="score", micro_batch_size=4)
    batch = random_batch(8, 12, 0)
    positions, lengths = torch.arange(12), batch["input_lengths"][:, None]
    ends = lengths - torch.tensor([1, 0] * 4)[:, None]  # of some, the last token is not one of the answer
    batch["token_mask"] = ((positions >= 1) & (positions < ends)).float()
    batch["sample_mask"] = torch.ones(8)
    scores = model.score(batch)["scores"]
    return model.train(batch, PreferenceLoss(), gbs=8), scores[0::2].tolist(), scores[1::2].tolist()


@pytest.mark.fast
def test_a_reward_model_is_trained_at_the_token_at_which_it_is_read(ranks):
    report, chosen, rejected = ranks.run(1, rewards_in_training_and_after)[0]
    assert report["rewards_chosen_mean"] == pytest.approx(sum(chosen) / 4, rel=1e-5)
    assert report["rewards_rejected_mean"] == pytest.approx(sum(rejected) / 4, rel=1e-5)
    assert report["accuracy"] == sum(one > other for one, other in zip(chosen, rejected, strict=True)) / 4
    assert len({*chosen, *rejected}) == 8


def calls_of_the_other_head() -> None:
    """Make each call on a model with the wrong head and check the error."""
    batch = random_batch(4, 12, 0)
    language, scorer = build_policy({}), build_policy({}, head="score")
    engine = EmbeddedEngine(scorer)
    calls = {
        "get_values": lambda: language.get_values(batch),
        "score": lambda: language.score(batch),
        "get_logprobs": lambda: scorer.get_logprobs(batch),
        "freeze_reference": scorer.freeze_reference,
        "get_reference_policy_logprobs": lambda: scorer.get_reference_policy_logprobs(batch),
        "generate": lambda: generate(engine, [[5, 6]], Sampling(max_new_tokens=2), seed=0),
    }
    for name, call in calls.items():
        needed, found = ("score", "lm") if name in ("get_values", "score") else ("lm", "score")
        words = f"^{name} needs a model with head='{needed}'; this model has head='{found}'$"
        with pytest.raises(RuntimeError, match=words):
            call()


def test_a_call_for_the_other_head_is_refused(ranks):
    ranks.run(1, calls_of_the_other_head)


def start_critic(directory: str, model, parallel: dict) -> None:
    """Load a language model's checkpoint into a critic with another layout, then save and load the critic.

    Also check that a checkpoint of the other kind of model is refused.
    """
    language = build_policy({}, model=model, optimizer=DISTRIBUTED_OPTIMIZER)
    language.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)
    path = language.save_checkpoint(directory, 1)
    trunk = weights(language)

    critic = build_policy(parallel, model=model, optimizer=DISTRIBUTED_OPTIMIZER, head="score", seed=9)
    head = weights(critic).get("output_layer.weight")
    critic.load_checkpoint(path, weights_only=True)
    loaded = weights(critic)
    for name, tensor in loaded.items():  # empty except on rank 0
        assert torch.equal(tensor, head if name == "output_layer.weight" else trunk[name]), name
    batch = value_batch(8, 16, 1)
    critic.train(batch, MSEValueLoss(), gbs=8)
    own = critic.save_checkpoint(Path(directory) / "critic", 1)
    wanted = critic.get_values(batch)["values"]
    again = build_policy({}, model=model, optimizer=DISTRIBUTED_OPTIMIZER, head="score", seed=5)
    again.load_checkpoint(own)
    torch.testing.assert_close(again.get_values(batch)["values"], wanted, rtol=1e-5, atol=1e-6)

    with pytest.raises(ConfigError, match=r"holds a reward model or critic.*a language model is needed"):
        language.load_checkpoint(own, weights_only=True)
    with pytest.raises(ConfigError, match=r"holds a language model.*a reward model or critic .* is needed"):
        again.load_checkpoint(path)  # only `weights_only` may make a new head


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("parallel", [{"tensor": 2, "sequence": True}, {"pipeline": 2}], ids=["tensor", "pipeline"])
def test_a_critic_starts_from_a_language_model(ranks, tmp_path, model, parallel):
    ranks.run(2, start_critic, str(tmp_path), model, parallel)


def check_refusals() -> None:
    """Check that batches and microbatches that would separate a pair are refused."""
    model = build_policy({}, head="score")
    for name, arguments in {"the batch": (5, {}), "gbs": (6, {"gbs": 3}), "mbs": (6, {"mbs": 3})}.items():
        with pytest.raises(ValueError, match=f"PreferenceLoss needs groups of 2 sequences, but {name} has"):
            model.train(random_batch(arguments[0], 12, 0), PreferenceLoss(), **arguments[1])


def test_pairs_are_not_separated(ranks):
    ranks.run(1, check_refusals)
