"""The policy beyond gradients: the reference, empty batches, metrics, NaN, bf16, padding sequences."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from rl_megatron import log
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import LogprobLoss, LossInputType, LossType, NLLLoss, Reduction
from rl_megatron.runs.step_meter import StepMeter
from rl_megatron.timing import StepTimes
from rl_megatron.training.metrics import NonFiniteLoss, combine_steps
from tests.parallel.layouts import (
    DISTRIBUTED_OPTIMIZER,
    EXPERTS,
    MODEL,
    OPTIMIZER,
    VOCAB_SIZE,
    build_policy,
    gradients,
    weights,
    worst_relative_error,
)
from tests.parallel.test_layouts import random_batch

TENSOR, PIPELINE = (2, {"tensor": 2}), (2, {"pipeline": 2})
INTERLEAVED, DATA = (2, {"pipeline": 2, "virtual_pipeline": 2}), (2, {})


def empty_steps(parallel: dict) -> tuple[dict, float, float, int]:
    policy = build_policy(parallel)
    policy.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)
    before, steps = weights(policy), policy.scheduler.num_steps
    batch = random_batch(8, 16, 1)
    batch["token_mask"] = torch.zeros_like(batch["token_mask"])
    report = policy.train(batch, NLLLoss(), gbs=8)
    after = weights(policy)
    changed = max(((after[name] - before[name]).abs().max().item() for name in before), default=0.0)
    return report, changed, policy.scheduler.num_steps - steps


@pytest.mark.parametrize("layout", [(1, {}), TENSOR, PIPELINE, DATA], ids=str)
def test_a_batch_without_a_valid_token_changes_no_weight(ranks, layout):
    report, changed, scheduler_steps = ranks.run(layout[0], empty_steps, layout[1])[0]
    assert report["loss"] == 0.0 and report["num_updates"] == 0
    assert changed == 0.0 and scheduler_steps == 0


def rates_of_three_steps(style: dict, total_steps: int | None) -> list[tuple[float, bool]]:
    """Return the learning rate of each of three steps, and whether it changed a weight."""
    found = []
    policy = build_policy({}, optimizer=OptimizerConfig(lr=1e-2, **style), total_steps=total_steps)
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in weights(policy).items()}
        lr = policy.train(random_batch(4, 12, step), NLLLoss())["lr"]
        found.append((lr, any(not torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())))
    return found


@pytest.mark.fast
def test_every_step_trains_if_the_number_of_steps_is_not_given(ranks):
    assert ranks.run(1, rates_of_three_steps, {}, None)[0] == [(1e-2, True)] * 3
    of_linear = ranks.run(1, rates_of_three_steps, {"decay_style": "linear"}, 4)[0]
    assert [lr for lr, _ in of_linear] == pytest.approx([1e-2, 7.5e-3, 5e-3])


def warnings_of_a_decay_that_ends() -> list[int]:
    """Return how many warnings name a learning rate of 0 after each of four steps, of which the first has another."""
    log.once.messages.clear()
    policy = build_policy({}, optimizer=OptimizerConfig(lr=1e-2, decay_style="linear"), total_steps=1)
    found = []
    for step in range(4):
        policy.train(random_batch(4, 12, step), NLLLoss())
        found.append(sum("the learning rate is 0" in message for message in log.once.messages))
    return found


def test_a_learning_rate_of_0_is_warned_of_once(ranks):
    assert ranks.run(1, warnings_of_a_decay_that_ends)[0] == [0, 1, 1, 1]


class Weighted(NLLLoss):
    """The loss with a weight of each token from the batch, whose entry t corresponds to token t + 1."""

    next_token_keys = frozenset({"weights_of_next_tokens"})

    def evaluate(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs, *arguments, **options):
        weights = self.streams(data, next_token_logprobs)["weights_of_next_tokens"]
        return super().evaluate(data, global_valid_seqs, global_valid_toks, next_token_logprobs * weights, **options)


def losses_of_weighted_tokens() -> list[float]:
    """Return the loss of tokens with weights, padded to the batch's width and to that of a microbatch."""
    batch = random_batch(8, 16, 0)
    batch["weights_of_next_tokens"] = torch.rand(8, 16, generator=torch.Generator().manual_seed(1))
    return [
        build_policy({}, batching=batching).train(batch, Weighted(), gbs=8)["loss"]
        for batching in (Batching(sequences=8), Batching("dynamic", tokens=32))
    ]


def test_a_microbatch_gets_its_tokens_of_the_keys_that_a_loss_declares(ranks):
    padded, dynamic = ranks.run(1, losses_of_weighted_tokens)[0]
    assert dynamic == pytest.approx(padded, rel=1e-6)


def refusals_of_no_sequence(parallel: dict) -> list[str]:
    policy, empty, found = build_policy(parallel), random_batch(4, 16, 0).slice(0, 0), []
    kinds = {"padded": {"sequences": 2}, "dynamic": {"tokens": 32}, "packed": {"tokens": 32}}
    for policy.batching in (Batching(kind, **size) for kind, size in kinds.items()):
        for call in (lambda: policy.train(empty, NLLLoss(), gbs=2), lambda: policy.get_logprobs(empty)):
            with pytest.raises(ValueError) as refused:
                call()
            found.append(str(refused.value))
    return found


@pytest.mark.parametrize("layout", [(1, {}), DATA], ids=str)
def test_a_batch_without_a_sequence_is_refused_by_name(ranks, layout):
    for found in ranks.run(layout[0], refusals_of_no_sequence, layout[1]):
        assert len(found) == 6 and set(found) == {"the batch has no sequence: input_ids has the shape (0, 16)"}


def weights_of_seed(seed: int) -> dict[str, torch.Tensor]:
    return weights(build_policy({}, seed=seed))


@pytest.mark.fast
def test_the_seed_decides_the_first_weights(ranks):
    first, again, other = (ranks.run(1, weights_of_seed, seed)[0] for seed in (1, 1, 2))
    drawn = [name for name, weight in first.items() if weight.std() > 0]
    assert drawn and all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def slope_and_gradient(micro_batch_size: int) -> tuple[float, float]:
    """Return how fast the loss grows along its gradient, by two evaluations of it, and the gradient's length."""
    policy, batch = build_policy({}, micro_batch_size=micro_batch_size), random_batch(8, 16, 0)
    policy.accumulate_gradients(batch, NLLLoss())
    parameters = [parameter for chunk in policy.model.model_chunks for parameter in chunk.parameters()]
    length = sum(parameter.main_grad.double().square().sum().item() for parameter in parameters) ** 0.5
    directions, step = [parameter.main_grad / length for parameter in parameters], 0.01
    losses = []
    for move in (step, -2 * step):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=move)
        policy.model.mark_changed()
        losses.append(policy.train(batch, NLLLoss(), eval_mode=True)["loss"])
    return (losses[0] - losses[1]) / (2 * step), length


@pytest.mark.fast
@pytest.mark.parametrize("micro_batch_size", [2, 8])
def test_the_gradient_is_the_slope_of_the_loss(ranks, micro_batch_size):
    slope, length = ranks.run(1, slope_and_gradient, micro_batch_size)[0]
    assert slope == pytest.approx(length, rel=0.02)


def settings_of_the_optimizer() -> list[tuple[tuple[float, float], float, float]]:
    settings = OptimizerConfig(beta1=0.8, beta2=0.7, epsilon=1e-5, weight_decay=0.25)
    groups = build_policy({}, optimizer=settings).optimizer.param_groups
    return [(tuple(group["betas"]), group["eps"], group["weight_decay"]) for group in groups]


@pytest.mark.fast
def test_the_optimizer_has_the_settings_of_its_section(ranks):
    groups = ranks.run(1, settings_of_the_optimizer)[0]
    assert {group[:2] for group in groups} == {((0.8, 0.7), 1e-5)}
    assert max(group[2] for group in groups) == 0.25


def costs_of_a_step() -> tuple[dict[str, float], int]:
    """Return the metrics of a step's costs, and the number of its tokens."""
    policy, batch = build_policy({}), random_batch(6, 16, 0)
    meter = StepMeter(policy.topology, "fp32")
    with meter.timer.phase("train"):
        policy.train(batch, NLLLoss(), gbs=6)
        meter.count_step(policy, Batch.from_whole(batch), is_policy=True)
    return meter.metrics(), int(batch["input_lengths"].sum())


@pytest.mark.fast
def test_the_costs_of_a_step_are_those_of_its_tokens_and_samples(ranks):
    costs, tokens = ranks.run(1, costs_of_a_step)[0]
    assert costs["tokens_per_s_train"] * costs["time_train_s"] == pytest.approx(tokens)
    assert costs["tokens_per_s_per_rank"] * costs["time_step_s"] == pytest.approx(tokens)
    assert costs["samples_per_s"] * costs["time_step_s"] == pytest.approx(6)
    assert 0.01 < costs.get("peak_memory_train_gb", 1.0) < 100  # not every system tells it


def logprobs_and_their_definition() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of sequences at several temperatures, and those that follow from all logits."""
    policy, batch = build_policy({}), random_batch(6, 14, 2)
    batch["temperature"] = torch.linspace(0.5, 1.5, 6)
    logits, ids = policy.get_topk_logits(batch, VOCAB_SIZE).values()
    scaled = torch.zeros(*ids.shape).scatter(-1, ids, logits) / batch["temperature"][:, None, None]
    wanted = scaled[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    counted = torch.arange(1, 14) < batch["input_lengths"][:, None]
    return policy.get_logprobs(batch)["logprobs"][:, 1:][counted], wanted[counted]


@pytest.mark.fast
def test_logprobs_are_of_the_temperature_of_their_sequence(ranks):
    torch.testing.assert_close(*ranks.run(1, logprobs_and_their_definition)[0], rtol=1e-5, atol=1e-5)


def bubble_of_two_stages() -> float:
    """Return the reported share of pipeline bubbles, if rank 0 waits for 1 of 8 seconds, and rank 1 for 4."""
    topology = build_policy({"pipeline": 2}).topology
    meter, waits = StepMeter(topology, "fp32"), 1.0 if topology.rank == 0 else 4.0
    times = StepTimes({("train", "pipeline_wait"): waits, ("train", "forward"): 8.0 - waits})
    meter.timer.collect = lambda: times
    return meter.metrics()["pipeline_bubble"]


def test_the_share_of_pipeline_bubbles_is_the_mean_of_the_ranks(ranks):
    assert ranks.run(2, bubble_of_two_stages) == [pytest.approx((1 / 8 + 4 / 8) / 2)] * 2


class TakesLogits:
    """A loss function that asks for an input that the policy cannot provide."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGIT

    def __call__(self, data, global_valid_seqs, global_valid_toks, logits):
        raise AssertionError("never called")


def refusals_of_other_inputs(parallel: dict) -> list[str]:
    policy, messages = build_policy(parallel), []
    for call in (policy.train, policy.accumulate_gradients):
        with pytest.raises(TypeError) as error:
            call(random_batch(4, 12, 0), TakesLogits())
        messages.append(str(error.value))
    return messages


def test_a_loss_function_that_takes_logits_is_refused_on_every_rank(ranks):
    for messages in ranks.run(PIPELINE[0], refusals_of_other_inputs, PIPELINE[1]):
        assert all("TakesLogits has input_type=LossInputType.LOGIT" in message for message in messages)


class NaNOnMarkedSequence(LogprobLoss):
    """A loss that is NaN for marked sequences."""

    loss_type = LossType.TOKEN_LEVEL
    metric_reductions: dict[str, Reduction] = {}

    def evaluate(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs, next_token_entropy=None):
        loss = torch.where(data["marked"].isnan()[:, None], torch.nan, next_token_logprobs).sum() / global_valid_toks
        return loss, {}


class MetricsOfMarkedSequences(LogprobLoss):
    """A loss with a metric of each kind, which only microbatches with a marked sequence return."""

    loss_type = LossType.TOKEN_LEVEL
    metric_reductions = Reduction.table("loss", "marks", "never", minima=["least"], maxima=["greatest"])

    def evaluate(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs, next_token_entropy=None):
        marked = data["marked"][data["marked"] > 0]
        metrics = {"marks": marked.sum(), "least": marked.min(), "greatest": marked.max()} if marked.numel() else {}
        return -next_token_logprobs.sum() / global_valid_toks, metrics


class Undeclared(MetricsOfMarkedSequences):
    """The same loss without a declaration of its metrics."""

    metric_reductions: dict[str, Reduction] = {}


def metrics_of_marked_sequences(parallel: dict, marks: list[float]) -> dict[str, float]:
    policy = build_policy(parallel, micro_batch_size=1)
    batch = random_batch(4, 12, 0)
    batch["marked"] = torch.tensor(marks)
    report = policy.train(batch, MetricsOfMarkedSequences(), eval_mode=True, gbs=4)
    declared = MetricsOfMarkedSequences.metric_reductions
    return {name: report[name] for name in report if name in declared and name != "loss"}


@pytest.mark.parametrize("layout", [(1, {}), DATA, PIPELINE, (4, {"pipeline": 2})], ids=str)
def test_a_metric_of_some_sequences_is_reduced_over_these_sequences(ranks, layout):
    for marks, expected in {
        (0.0, 0.0, 0.0, 5.0): {"marks": 5.0, "least": 5.0, "greatest": 5.0},  # on the last rank only
        (2.0, 0.0, 0.0, 5.0): {"marks": 7.0, "least": 2.0, "greatest": 5.0},
        (0.0, 0.0, 0.0, 0.0): {},
    }.items():
        for found in ranks.run(layout[0], metrics_of_marked_sequences, layout[1], list(marks)):
            assert found == expected


def test_a_metric_of_some_steps_is_combined_over_these_steps():
    marked = {"loss": 1.0, "marks": 5.0, "least": 2.0, "greatest": 5.0}
    reports = [{"loss": 3.0}, marked, marked | {"least": 1.0, "greatest": 4.0, "marks": 7.0}]
    expected = {"loss": 5 / 3, "marks": 6.0, "least": 1.0, "greatest": 5.0}
    assert combine_steps(reports, MetricsOfMarkedSequences()) == pytest.approx(expected)


def undeclared_metrics(parallel: dict) -> tuple[str, float]:
    policy = build_policy(parallel, micro_batch_size=1)
    before = weights(policy)
    batch = random_batch(4, 12, 0)
    batch["marked"] = torch.tensor([0.0, 0.0, 0.0, 5.0])
    with pytest.raises(ValueError) as error:
        policy.train(batch, Undeclared(), gbs=4)
    after = weights(policy)
    return str(error.value), max(((after[name] - before[name]).abs().max().item() for name in before), default=0.0)


@pytest.mark.parametrize("layout", [(1, {}), DATA, PIPELINE], ids=str)
def test_an_undeclared_metric_is_refused_on_every_rank(ranks, layout):
    for message, changed in ranks.run(layout[0], undeclared_metrics, layout[1]):
        assert "Undeclared returned metrics ['greatest', 'least', 'marks'] whose reduction" in message
        assert changed == 0.0


class TenfoldCall(NLLLoss):
    """A loss that overrides `__call__`, as users of other libraries do."""

    def __call__(self, *args, **inputs):
        loss, metrics = super().__call__(*args, **inputs)
        return 10 * loss, metrics


def own_call(parallel: dict) -> tuple[float, float]:
    policy = build_policy(parallel)
    batch = random_batch(4, 12, 0)
    return tuple(policy.train(batch, loss_fn, eval_mode=True, gbs=4)["loss"] for loss_fn in (NLLLoss(), TenfoldCall()))


@pytest.mark.parametrize("layout", [(1, {}), TENSOR, (2, {"context": 2})], ids=str)
def test_a_loss_with_its_own_call_is_called(ranks, layout):
    for plain, tenfold in ranks.run(layout[0], own_call, layout[1]):
        assert tenfold == pytest.approx(10 * plain, rel=1e-6)


class NaNWithOwnCall(NaNOnMarkedSequence):
    """The same loss called through `__call__`, which has its own error for a NaN in a single process."""

    def __call__(self, *args, **inputs):
        return super().__call__(*args, **inputs)


def nan_steps(parallel: dict, loss: type[NaNOnMarkedSequence]) -> tuple[str, float]:
    policy = build_policy(parallel, micro_batch_size=1)
    before = weights(policy)
    batch = random_batch(4, 12, 0)
    batch["marked"] = torch.tensor([0.0, 0.0, 0.0, torch.nan])
    with pytest.raises(NonFiniteLoss) as error:
        policy.train(batch, loss(), gbs=4)
    after = weights(policy)
    return str(error.value), max(((after[name] - before[name]).abs().max().item() for name in before), default=0.0)


@pytest.mark.parametrize(
    "layout, place",
    [((1, {}), "microbatch 3 of data-parallel rank 0"), (PIPELINE, "microbatch 3 of data-parallel rank 0"),
     (DATA, "microbatch 1 of data-parallel rank 1")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("loss", [NaNOnMarkedSequence, NaNWithOwnCall])
def test_a_nan_loss_is_located_and_changes_no_weight_on_any_rank(ranks, layout, place, loss):
    for message, changed in ranks.run(layout[0], nan_steps, layout[1], loss):
        assert place in message and "loss=nan" in message
        assert changed == 0.0


class NaNGradient(NaNOnMarkedSequence):
    """A finite loss whose gradient is not finite: √u at u = 0."""

    def evaluate(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs, next_token_entropy=None):
        return (0.0 * next_token_logprobs).sum().square().sqrt(), {}


def nan_gradient_step(parallel: dict) -> tuple[str, float]:
    policy = build_policy(parallel)
    before = weights(policy)
    with pytest.raises(NonFiniteLoss) as error:
        policy.train(random_batch(4, 12, 0), NaNGradient(), gbs=4)
    after = weights(policy)
    return str(error.value), max(((after[name] - before[name]).abs().max().item() for name in before), default=0.0)


@pytest.mark.parametrize("layout", [(1, {}), PIPELINE, DATA], ids=str)
def test_a_nan_gradient_changes_no_weight_on_any_rank(ranks, layout):
    for message, changed in ranks.run(layout[0], nan_gradient_step, layout[1]):
        assert "gradient norm is nan" in message
        assert changed == 0.0


def five_sequences(parallel: dict) -> tuple[float, torch.Tensor]:
    policy = build_policy(parallel, micro_batch_size=2)
    batch = random_batch(5, 13, 3)
    return policy.train(batch, NLLLoss(), eval_mode=True, gbs=5)["loss"], policy.get_logprobs(batch)["logprobs"]


@pytest.mark.parametrize("layout", [DATA, (4, {}), INTERLEAVED], ids=str)
def test_sequences_that_do_not_divide_are_padded_with_zero_loss_weight(ranks, layout):
    loss, logprobs = ranks.reference(five_sequences, {})
    found_loss, found = ranks.run(layout[0], five_sequences, layout[1])[0]
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert found.shape == logprobs.shape == (5, 13)
    torch.testing.assert_close(found, logprobs, atol=1e-5, rtol=0)
    assert (found[:, 0] == 0).all()


class CopiesInPlace(BatchedDataDict):
    """A batch whose `to` works in place, as NeMo RL's does; its copies show a move on a CPU too."""

    def to(self, device):
        for key, value in self.data.items():
            self.data[key] = value.to(device, copy=True)
        return self


def changes_of_the_callers_batch() -> list[str]:
    """Return "call: key" for every key of the batch that a call of the policy changes."""
    policy, batch = build_policy({}), CopiesInPlace(random_batch(4, 12, 0))
    policy.freeze_reference()
    calls = {
        "train": lambda: policy.train(batch, NLLLoss(), gbs=2),
        "evaluation": lambda: policy.train(batch, NLLLoss(), eval_mode=True, gbs=4),
        "accumulate_gradients": lambda: policy.accumulate_gradients(batch, NLLLoss()),
        "get_logprobs": lambda: policy.get_logprobs(batch),
        "get_topk_logits": lambda: policy.get_topk_logits(batch, k=2),
        "get_reference_policy_logprobs": lambda: policy.get_reference_policy_logprobs(batch),
    }
    changed = []
    for name, call in calls.items():
        before = {key: (value, value.clone()) for key, value in batch.items()}
        call()
        if batch.keys() != before.keys():
            changed.append(f"{name}: keys")
        for key, (tensor, values) in before.items():
            if batch[key] is not tensor or not torch.equal(tensor, values):
                changed.append(f"{name}: {key}")
    return changed


def test_a_callers_batch_is_never_moved_or_changed(ranks):
    assert ranks.run(1, changes_of_the_callers_batch)[0] == []


def kept_alive_after_shutdown(model: ModelConfig) -> tuple[int, int]:
    """Return how many parameters are alive after one of two policies was shut down, and after both were."""
    policies = [build_policy({}, model=model) for _ in range(2)]
    parameters = []
    for policy in policies:
        policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
        parameters += [weakref.ref(parameter) for parameter in policy.model.model_chunks[0].parameters()]
    policies.pop().shutdown()
    gc.collect()
    shut_down = sum(parameter() is not None for parameter in parameters)
    assert policies[0].shutdown() and not policies[0].shutdown()
    policies.clear()
    gc.collect()
    return shut_down, sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
def test_shutdown_frees_the_weights(ranks, model):
    one_of_two, none = ranks.run(1, kept_alive_after_shutdown, model)[0]
    assert one_of_two > 0 and none == 0


def reference_and_policy(parallel: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the policy's logprobs when it was frozen, and those of the reference and the policy after a step."""
    policy = build_policy(parallel)
    batch = random_batch(6, 14, 2)
    policy.freeze_reference()
    start = policy.get_logprobs(batch)["logprobs"]
    policy.train(batch, NLLLoss(), gbs=6)
    return (
        start,
        policy.get_reference_policy_logprobs(batch)["reference_logprobs"],
        policy.get_logprobs(batch)["logprobs"],
    )


@pytest.mark.parametrize("layout", [(1, {}), TENSOR, INTERLEAVED], ids=str)
def test_training_does_not_change_the_reference(ranks, layout):
    start, reference, moved = ranks.run(layout[0], reference_and_policy, layout[1])[0]
    torch.testing.assert_close(reference, start, atol=0, rtol=0)
    assert (moved - start).abs().max() > 1e-3


def bf16_steps(parallel: dict) -> tuple[list[float], torch.dtype, torch.dtype]:
    policy = build_policy(parallel, precision="bf16", optimizer=DISTRIBUTED_OPTIMIZER)
    batch = random_batch(8, 16, 0)
    losses = [policy.train(batch, NLLLoss(), gbs=8)["loss"] for _ in range(8)]
    parameter = next(policy.model.model_chunks[0].parameters())
    return losses, parameter.dtype, parameter.main_grad.dtype


@pytest.mark.parametrize("layout", [(1, {}), TENSOR, PIPELINE, DATA], ids=str)
def test_bf16_learns_with_fp32_gradients(ranks, layout):
    losses, weight_dtype, gradient_dtype = ranks.run(layout[0], bf16_steps, layout[1])[0]
    exact = ranks.reference(fp32_losses)
    assert (weight_dtype, gradient_dtype) == (torch.bfloat16, torch.float32)
    assert losses[-1] < losses[0] - 0.5
    assert losses == pytest.approx(exact, rel=0.03)


def load_bf16_weights(directory: str, distributed: bool) -> tuple[float, float]:
    """Load a checkpoint into another bf16 policy and train one small step.

    Returns:
        The largest change of a loaded weight in the step, and the largest difference between the loaded weights and
        those that the policy had before.
    """
    optimizer = dataclasses.replace(OPTIMIZER, distributed=distributed, lr=1e-4)
    saver = build_policy({}, precision="bf16", optimizer=optimizer)
    path = saver.save_checkpoint(directory, 1)
    loader = build_policy({}, precision="bf16", optimizer=optimizer, seed=99)
    before = weights(loader)
    loader.load_checkpoint(path, weights_only=True)
    loaded = weights(loader)
    loader.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    after = weights(loader)
    return tuple(max((w[name] - loaded[name]).abs().max().item() for name in loaded) for w in (after, before))


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_a_bf16_checkpoint_reaches_the_fp32_weights_that_the_optimizer_updates(ranks, tmp_path, distributed):
    """Otherwise the first step would restore the weights from before the load."""
    moved, apart = ranks.run(1, load_bf16_weights, str(tmp_path), distributed)[0]
    assert apart > 0.1 and 0 < moved < 0.01


def fp32_losses() -> list[float]:
    policy = build_policy({}, optimizer=DISTRIBUTED_OPTIMIZER)
    batch = random_batch(8, 16, 0)
    return [policy.train(batch, NLLLoss(), gbs=8)["loss"] for _ in range(8)]


def bf16_gradients(parallel: dict) -> dict[str, torch.Tensor]:
    policy = build_policy(parallel, precision="bf16")
    policy.prepare_for_training()
    policy.accumulate_gradients(random_batch(8, 16, 0), NLLLoss(), mbs=2)
    return gradients(policy)


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE, DATA, (2, {"context": 2})], ids=str)
def test_bf16_gradients_are_those_of_one_process_up_to_bf16(ranks, layout):
    wanted = ranks.reference(bf16_gradients, {})
    found = ranks.run(layout[0], bf16_gradients, layout[1])[0]
    for name, gradient in wanted.items():
        cosine = torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.999, (name, cosine.item())


def recompute_gradients(recompute: str, parallel: dict) -> dict[str, torch.Tensor]:
    policy = build_policy(parallel, model=dataclasses.replace(MODEL, recompute=recompute))
    policy.prepare_for_training()
    policy.accumulate_gradients(random_batch(6, 14, 2), NLLLoss())
    return gradients(policy)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_changes_no_gradient(ranks, recompute):
    wanted = ranks.run(2, recompute_gradients, "none", {"tensor": 2})[0]
    found = ranks.run(2, recompute_gradients, recompute, {"tensor": 2})[0]
    error, name = worst_relative_error(found, wanted)
    assert error <= 1e-6, (name, error)
