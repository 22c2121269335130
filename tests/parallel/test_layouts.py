"""SFT and GRPO steps in every layout have the loss and the gradients of one process."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.config.loading.load import load_config
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.order import ShuffledEpochs
from rl_megatron.data.run_tokenizer import build_tokenizer
from rl_megatron.data.training_data import build_dataset
from rl_megatron.losses import NLLLoss, build_loss
from tests.parallel.layouts import (
    DISTRIBUTED_OPTIMIZER,
    VOCAB_SIZE,
    build_policy,
    gradients,
    weights,
    worst_relative_error,
)

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4

LAYOUTS = {
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline 2": (2, {"pipeline": 2}),
    "interleaved pipeline 2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "context 2": (2, {"context": 2}),
    "data 2": (2, {}),
    "tensor 2 pipeline 2": (4, {"tensor": 2, "pipeline": 2}),
    "tensor 2 sequence context 2": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "pipeline 2 data 2": (4, {"pipeline": 2}),
}


def random_batch(num_sequences: int, length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> BatchedDataDict:
    """Return random sequences of unequal length with the keys of a GRPO rollout.

    One sequence has two tokens, and another is masked entirely.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, length + 1, (num_sequences,), generator=generator)
    lengths[0], lengths[1], lengths[2] = length, 2, 7
    prompt = torch.minimum(torch.full((num_sequences,), 3), lengths - 1)
    positions = torch.arange(length)
    token_mask = ((positions >= prompt[:, None]) & (positions < lengths[:, None])).float()
    token_mask[2] = 0.0
    old = -2.0 * torch.rand(num_sequences, length, generator=generator) - 1.0
    return BatchedDataDict(
        input_ids=torch.randint(0, vocab_size, (num_sequences, length), generator=generator),
        input_lengths=lengths,
        token_mask=token_mask,
        sample_mask=torch.ones(num_sequences),
        advantages=torch.randn(num_sequences, 1, generator=generator).expand(num_sequences, length) * token_mask,
        prev_logprobs=old,
        generation_logprobs=old + 0.05 * torch.randn(num_sequences, length, generator=generator),
        reference_policy_logprobs=old + 0.3 * torch.randn(num_sequences, length, generator=generator),
        temperature=torch.full((num_sequences,), 0.8),
    )


def take_steps(parallel: dict, optimizer: OptimizerConfig | None, mbs: int) -> list[tuple[dict, dict, dict]]:
    """Take three SFT and two GRPO steps; return (metrics, gradients, weights after it) of each, whole on rank 0."""
    policy = build_policy(parallel, optimizer=optimizer, micro_batch_size=mbs)
    grpo = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.05, "entropy_coeff": 0.01})
    batches = [(random_batch(10, 20, seed), NLLLoss()) for seed in range(3)]
    batches += [(random_batch(10, 21, seed), grpo) for seed in range(3, 5)]
    taken = []
    for batch, loss_fn in batches:
        report = policy.accumulate_gradients(batch, loss_fn)
        gradient = gradients(policy)
        report |= policy.train(batch, loss_fn, gbs=batch.size)
        taken.append((report, gradient, weights(policy)))
    return taken


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, take_steps, {}, None, 10)[0]


@pytest.mark.parametrize(
    ("layout", "mbs"),
    [("tensor 2 sequence context 2", 3), ("interleaved pipeline 2", 2), ("pipeline 2 data 2", 3)],
)
def test_step_after_step_losses_metrics_and_gradients_equal_one_process(ranks, one_process, layout, mbs):
    """Several steps follow each other; test_grid.py tests single steps with every kind of parallelism."""
    world_size, parallel = LAYOUTS[layout]
    taken = ranks.run(world_size, take_steps, parallel, None, mbs)[0]
    for step, ((report, gradient, _), (wanted, wanted_gradient, _)) in enumerate(zip(taken, one_process, strict=True)):
        assert report["loss"] == pytest.approx(wanted["loss"], rel=LOSS_TOLERANCE), step
        assert report["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=GRADIENT_TOLERANCE), step
        assert report.keys() == wanted.keys()
        for name in wanted.keys() - {"packing_efficiency"}:  # it depends on the microbatches
            assert report[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (step, name)
        error, name = worst_relative_error(gradient, wanted_gradient)
        assert error <= GRADIENT_TOLERANCE, (step, name, error)


@pytest.mark.parametrize("layout", ["data 2", "pipeline 2 data 2"])
def test_distributed_optimizer_moves_the_weights_of_one_process(ranks, one_process, layout):
    world_size, parallel = LAYOUTS[layout]
    taken = ranks.run(world_size, take_steps, parallel, DISTRIBUTED_OPTIMIZER, 2)[0]
    for (_, _, found), (_, _, wanted) in zip(taken, one_process, strict=True):
        error, name = worst_relative_error(found, wanted)
        assert error <= GRADIENT_TOLERANCE, (name, error)


def quickstart_steps(parallel: dict, rollouts: BatchedDataDict | None) -> list[tuple[dict, dict]]:
    """Take the quickstart's first three SFT steps, with its model and data, then two GRPO steps on `rollouts`."""
    config = load_config(["experiment=quickstart"])
    sft, grpo = config.stages["sft"], config.stages["grpo"]
    tokenizer = build_tokenizer(config.first)
    policy = build_policy(parallel, model=sft.model, optimizer=OptimizerConfig(lr=1e-3, distributed=False),
                          vocab_size=tokenizer.vocab_size, micro_batch_size=8)  # fmt: skip
    dataset = build_dataset(sft, tokenizer)
    order, size = ShuffledEpochs(len(dataset), sft.train.seed), sft.train.global_batch_size
    batches = [(dataset.batch(order.items(step * size, size)), NLLLoss()) for step in range(3)]
    keys = {key: value for key, value in grpo.loss.items() if key != "name"}
    batches += [(rollouts, build_loss("clipped_pg", keys | {"reference_policy_kl_penalty": 0.05}))] * 2
    taken = []
    for batch, loss_fn in batches:
        report = policy.accumulate_gradients(batch, loss_fn)
        taken.append((report, gradients(policy)))
        policy.train(batch, loss_fn, gbs=batch.size)
    return taken


@pytest.fixture(scope="module")
def quickstart_rollouts():
    return random_batch(32, 14, seed=9, vocab_size=200)


@pytest.fixture(scope="module")
def quickstart_one_process(ranks, quickstart_rollouts):
    return ranks.run(1, quickstart_steps, {}, quickstart_rollouts)[0]


@pytest.mark.parametrize("layout", ["tensor 2", "pipeline 2"])
def test_the_quickstart_takes_the_same_steps_in_every_layout(
    ranks, quickstart_one_process, quickstart_rollouts, layout
):
    world_size, parallel = LAYOUTS[layout]
    taken = ranks.run(world_size, quickstart_steps, parallel, quickstart_rollouts)[0]
    for step, ((report, gradient), (wanted_report, wanted_gradient)) in enumerate(
        zip(taken, quickstart_one_process, strict=True)
    ):
        assert report["loss"] == pytest.approx(wanted_report["loss"], rel=LOSS_TOLERANCE), step
        error, name = worst_relative_error(gradient, wanted_gradient)
        assert error <= GRADIENT_TOLERANCE, (step, name, error)
