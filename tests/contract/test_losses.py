"""What every registered loss promises, whatever its formula: normalisation, masks, calling forms."""

import math

import pytest
import torch

from rl_megatron.logprobs import next_token_stats
from rl_megatron.losses import LOSSES, LossInputType, Reduction, build_loss
from tests.contract.loss_cases import CASES, VOCAB

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def valid_counts(batch):
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return batch["sample_mask"].sum(), mask.sum()


def setup(case, seed=0):
    """(loss, batch, logits [B, S, V]) in fp64, with logprobs near the batch's own."""
    generator = torch.Generator().manual_seed(seed)
    batch = case.make_batch(generator)
    logits = torch.randn(*batch["input_ids"].shape, VOCAB, generator=generator, dtype=torch.float64) * 0.5
    return build_loss(case.name, case.cfg), batch, logits


def streams_of(loss, logits, batch):
    stats = next_token_stats(logits, batch["input_ids"], entropy=loss.needs_entropy)
    streams = {"next_token_logprobs": stats.logprobs.detach().clone().requires_grad_()}
    if loss.needs_entropy:
        streams["next_token_entropy"] = stats.entropy.detach().clone().requires_grad_()
    return streams


def evaluate(loss, batch, streams, counts=None):
    """(value, metrics, gradients of the streams)."""
    value, metrics = loss.evaluate(batch, *(counts or valid_counts(batch)), **streams)
    return value.detach(), metrics, torch.autograd.grad(value, list(streams.values()))


def rows(mapping, index):
    return {key: value.detach()[index].clone().requires_grad_(value.requires_grad) for key, value in mapping.items()}


def combine(reductions, parts):
    how = {Reduction.SUM: sum, Reduction.MIN: min, Reduction.MAX: max}
    return {name: how[reductions[name]](part[name].item() for part in parts) for name in parts[0]}


def assert_same_metrics(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(
            torch.as_tensor(got[name], dtype=torch.float64), torch.as_tensor(want[name], dtype=torch.float64),
            msg=lambda text, name=name: f"{name}: {text}", **tolerance,
        )  # fmt: skip


def test_every_loss_has_cases():
    from_logprobs = {name for name, cls in LOSSES.items() if cls.input_type is LossInputType.LOGPROB}
    assert from_logprobs <= {case.name for case in CASES}, "add rows to tests/contract/loss_cases.py"


@every_case
def test_it_moves_at_all(case):
    """The other tests compare; this one sees to it that there is something to compare."""
    loss, batch, logits = setup(case)
    value, _, gradients = evaluate(loss, batch, streams_of(loss, logits, batch))
    assert math.isfinite(value) and value != 0
    for gradient in gradients:
        assert gradient.abs().max() > 1e-4


@every_case
def test_metrics_are_declared_and_finite(case):
    loss, batch, logits = setup(case)
    _, metrics, _ = evaluate(loss, batch, streams_of(loss, logits, batch))
    assert metrics.keys() <= loss.metric_reductions.keys()
    for name, value in metrics.items():
        assert value.dim() == 0 and torch.isfinite(value) and not value.requires_grad, name


@every_case
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_masked_has_no_effect(case, poison):
    loss, batch, logits = setup(case)
    streams = streams_of(loss, logits, batch)
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    masked[:, 0] = True  # nobody predicts the first token
    poisoned = {}
    for key, value in batch.items():
        poisoned[key] = value
        if key not in ("token_mask", "sample_mask") and value.is_floating_point():
            hidden = masked if value.dim() == 2 else batch["sample_mask"] == 0
            poisoned[key] = value.masked_fill(hidden, poison)
    poisoned_streams = {
        key: value.detach().masked_fill(masked[:, 1:], poison).requires_grad_() for key, value in streams.items()
    }
    value, metrics, gradients = evaluate(loss, batch, streams)
    poisoned_value, poisoned_metrics, poisoned_gradients = evaluate(loss, poisoned, poisoned_streams)
    assert torch.equal(value, poisoned_value)
    assert_same_metrics(poisoned_metrics, metrics, rtol=0, atol=0)
    for gradient, poisoned_gradient in zip(gradients, poisoned_gradients, strict=True):
        assert torch.equal(gradient, poisoned_gradient) and (gradient[masked[:, 1:]] == 0).all()


@every_case
@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_a_batch_without_valid_tokens_is_a_finite_zero(case, key):
    loss, batch, logits = setup(case)
    batch[key] = torch.zeros_like(batch[key])
    value, metrics, gradients = evaluate(loss, batch, streams_of(loss, logits, batch))
    assert value == 0
    for gradient in gradients:
        assert (gradient == 0).all()
    for name, metric in metrics.items():
        reduction = loss.metric_reductions[name]
        if reduction is Reduction.SUM:
            assert torch.isfinite(metric), name
        else:
            assert metric == reduction.identity, name


@every_case
@pytest.mark.parametrize("parts", [[2, 4], [1, 1, 1, 1, 1, 1], [3, 0, 3]], ids=str)
def test_parts_add_up(case, parts):
    loss, batch, logits = setup(case)
    streams = streams_of(loss, logits, batch)
    value, metrics, gradients = evaluate(loss, batch, streams)
    total, all_metrics, all_gradients, start = 0.0, [], [], 0
    for size in parts:
        index = slice(start, start + size)
        start += size
        part = evaluate(loss, rows(batch, index), rows(streams, index), counts=valid_counts(batch))
        total += part[0]
        all_metrics.append(part[1])
        all_gradients.append(part[2])
    torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-14)
    assert_same_metrics(combine(loss.metric_reductions, all_metrics), metrics, rtol=1e-12, atol=1e-14)
    for whole, pieces in zip(gradients, zip(*all_gradients, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-14)


@every_case
def test_the_order_of_rows_does_not_matter(case):
    loss, batch, logits = setup(case)
    streams = streams_of(loss, logits, batch)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    value, metrics, gradients = evaluate(loss, batch, streams)
    shuffled_value, shuffled_metrics, shuffled_gradients = evaluate(loss, rows(batch, order), rows(streams, order))
    torch.testing.assert_close(shuffled_value, value, rtol=1e-12, atol=1e-14)
    assert_same_metrics(shuffled_metrics, metrics, rtol=1e-12, atol=1e-14)
    for gradient, shuffled in zip(gradients, shuffled_gradients, strict=True):
        torch.testing.assert_close(shuffled, gradient[order], rtol=1e-12, atol=1e-14)


@every_case
def test_padding_does_not_matter(case):
    """More padding on the right is what packing and dynamic batches change."""
    loss, batch, logits = setup(case)
    streams = streams_of(loss, logits, batch)
    pad = torch.nn.functional.pad
    wide = {key: pad(value, (0, 3)) if value.dim() == 2 else value for key, value in batch.items()}
    wide_streams = {key: pad(value.detach(), (0, 3)).requires_grad_() for key, value in streams.items()}
    value, metrics, gradients = evaluate(loss, batch, streams)
    wide_value, wide_metrics, wide_gradients = evaluate(loss, wide, wide_streams)
    torch.testing.assert_close(wide_value, value, rtol=1e-12, atol=1e-14)
    assert_same_metrics(wide_metrics, metrics, rtol=1e-12, atol=1e-14)
    for gradient, wide_gradient in zip(gradients, wide_gradients, strict=True):
        torch.testing.assert_close(wide_gradient, pad(gradient, (0, 3)), rtol=1e-12, atol=1e-14)


@every_case
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_the_logits_form_equals_the_logprobs_form(case, temperature):
    loss, batch, logits = setup(case)
    if temperature is not None:
        batch["temperature"] = torch.full((len(logits),), temperature, dtype=torch.float64)
    counts = valid_counts(batch)
    given = logits.clone().requires_grad_()
    value, metrics = loss(given, batch, *counts)
    (gradient,) = torch.autograd.grad(value, given)

    plain = logits.clone().requires_grad_()
    log_p = (plain / (temperature or 1.0)).log_softmax(-1)[:, :-1]
    streams = {"next_token_logprobs": log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]}
    if loss.needs_entropy:
        streams["next_token_entropy"] = -(log_p.exp() * log_p).sum(-1)
    expected_value, expected_metrics = loss(
        data=batch, global_valid_seqs=counts[0].item(), global_valid_toks=counts[1].item(), **streams
    )
    (expected_gradient,) = torch.autograd.grad(expected_value, plain)
    torch.testing.assert_close(value, expected_value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)
    assert all(isinstance(metric, float) for metric in metrics.values())
    assert_same_metrics(metrics, expected_metrics, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", [case for case in CASES if case.differentiable], ids=str)
def test_the_gradient_is_the_derivative_of_the_value(case):
    loss, batch, logits = setup(case)
    streams = streams_of(loss, logits, batch)
    counts = valid_counts(batch)
    names = list(streams)

    def value(*tensors):
        return loss.evaluate(batch, *counts, **dict(zip(names, tensors, strict=True)))[0]

    assert torch.autograd.gradcheck(value, tuple(streams.values()), eps=1e-7, atol=1e-6)


@every_case
@pytest.mark.parametrize("far", [30.0, 100.0, 1000.0])
def test_extreme_ratios_stay_finite(case, far):
    """In fp32, with every other policy `far` nats above or below the current one."""
    loss, batch, logits = setup(case)
    streams = {k: v.detach().float().requires_grad_() for k, v in streams_of(loss, logits, batch).items()}
    sign = torch.tensor([1.0, -1.0]).repeat(batch["input_ids"].shape[1] // 2)
    for index, key in enumerate(key for key in batch if key.endswith("_logprobs")):
        batch[key] = batch[key] + far * sign.roll(index)
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch.items()}
    value, metrics, gradients = evaluate(loss, batch, streams)
    assert torch.isfinite(value) and all(torch.isfinite(gradient).all() for gradient in gradients)
    for name, metric in metrics.items():
        assert torch.isfinite(metric), name


@every_case
def test_missing_keys_and_wrong_shapes_are_named(case):
    loss, batch, logits = setup(case)
    streams = streams_of(loss, logits, batch)
    for key in loss.required_keys:
        without = {name: value for name, value in batch.items() if name != key}
        with pytest.raises(KeyError, match=rf"{type(loss).__name__} needs data\['{key}'\]"):
            loss.evaluate(without, *valid_counts(batch), **streams)
        wrong = {**batch, key: torch.cat([batch[key], batch[key]])}
        with pytest.raises(ValueError, match=rf"(?=.*{type(loss).__name__})(?=.*\(12,)(?=.*\(6,)"):
            loss.evaluate(wrong, *valid_counts(batch), **streams)
