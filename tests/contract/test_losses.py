"""What every registered loss promises, whatever its formula and its input: normalisation, masks, calling forms."""

import math
import re

import pytest
import torch

from rl_megatron.logprobs import Sharding
from rl_megatron.losses import LOSSES, Reduction, build_loss
from tests.contract.loss_cases import CASES, VOCAB

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def valid_counts(batch):
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return batch["sample_mask"].sum(), mask.sum()


def setup(case, seed=0):
    """(loss, batch, output of the model) in fp64."""
    generator = torch.Generator().manual_seed(seed)
    batch = case.make_batch(generator)
    return build_loss(case.name, case.cfg), batch, case.make_output(generator, batch, VOCAB)


def leaf(tensor, like=None):
    return tensor.detach().clone().requires_grad_((tensor if like is None else like).requires_grad)


def streams_of(loss, output, batch):
    """What the loss reads off the output, each stream a leaf."""
    streams = loss.read_output(output.detach().requires_grad_(), batch, Sharding())
    return {name: leaf(stream) for name, stream in streams.items()}


def gradients_of(value, streams):
    leaves = {name: stream for name, stream in streams.items() if stream.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def evaluate(loss, batch, streams, counts=None):
    """(value, metrics, gradients of the streams by name)."""
    value, metrics = loss.evaluate(batch, *(counts or valid_counts(batch)), **streams)
    return value.detach(), metrics, gradients_of(value, streams)


def rows(mapping, index):
    return {key: leaf(value[index], like=value) for key, value in mapping.items()}


def pad_width(value, amount):
    """More positions on the right of [B, S, …]."""
    return torch.nn.functional.pad(value, (0, 0) * (value.dim() - 2) + (0, amount)) if value.dim() > 1 else value


def does_not_count(loss, batch):
    """(name, tensor) → bool, broadcastable to the tensor: which entries of a key or stream the masks leave out."""
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    masked[:, 0] = True  # nobody predicts the first token
    next_token = torch.cat([masked[:, 1:], torch.ones_like(masked[:, :1])], dim=1)

    def of(name, tensor):
        if tensor.dim() == 1:
            return batch["sample_mask"] == 0
        by_width = {masked.size(1): next_token if name in loss.next_token_keys else masked}
        by_width[masked.size(1) - 1] = masked[:, 1:]
        return by_width[tensor.size(1)].view(*tensor.shape[:2], *(1,) * (tensor.dim() - 2))

    return of


def poisoned(mapping, hidden, poison):
    """Every floating-point tensor but the masks, with `poison` wherever it does not count."""
    return {
        name: leaf(value.detach().masked_fill(hidden(name, value), poison), like=value)
        if value.is_floating_point() and name not in ("token_mask", "sample_mask")
        else value
        for name, value in mapping.items()
    }


def combine(reductions, parts):
    how = {Reduction.SUM: sum, Reduction.MIN: min, Reduction.MAX: max}
    return {name: how[reductions[name]](part[name].item() for part in parts) for name in parts[0]}


def assert_same(got, want, **tolerance):
    """Two mappings of the same names to (nearly) the same values."""
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(
            torch.as_tensor(got[name], dtype=torch.float64), torch.as_tensor(want[name], dtype=torch.float64),
            msg=lambda text, name=name: f"{name}: {text}", **tolerance,
        )  # fmt: skip


EXACTLY = {"rtol": 0, "atol": 0}
NEARLY = {"rtol": 1e-12, "atol": 1e-14}


def test_every_loss_has_cases():
    assert set(LOSSES) == {case.name for case in CASES}, "add rows to tests/contract/loss_cases.py"


@every_case
def test_it_moves_at_all(case):
    """The other tests compare; this one sees to it that there is something to compare."""
    loss, batch, output = setup(case)
    value, _, gradients = evaluate(loss, batch, streams_of(loss, output, batch))
    assert math.isfinite(value) and value != 0 and gradients
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4, name


@every_case
def test_what_it_declares_about_itself(case):
    loss, batch, output = setup(case)
    assert len(output) % loss.group_size == 0
    assert (batch["sample_mask"] == 0).any(), "the tests below need a masked row"
    streams = streams_of(loss, output, batch)
    assert set(loss.input_names or [loss.output_name]) <= streams.keys()
    _, metrics, _ = evaluate(loss, batch, streams)
    assert metrics.keys() <= loss.metric_reductions.keys()
    for name, value in metrics.items():
        assert value.dim() == 0 and torch.isfinite(value) and not value.requires_grad, name


@every_case
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_what_is_masked_has_no_effect(case, poison):
    loss, batch, output = setup(case)
    streams, hidden = streams_of(loss, output, batch), does_not_count(loss, batch)
    value, metrics, gradients = evaluate(loss, batch, streams)
    bad_value, bad_metrics, bad_gradients = evaluate(
        loss, poisoned(batch, hidden, poison), poisoned(streams, hidden, poison)
    )
    assert torch.equal(value, bad_value)
    assert_same(bad_metrics, metrics, **EXACTLY)
    assert_same(bad_gradients, gradients, **EXACTLY)
    for name, gradient in gradients.items():
        assert (gradient.masked_select(hidden(name, gradient)) == 0).all(), name


@every_case
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_output_that_nothing_reads_has_no_effect(case, poison):
    """Logits of positions whose next token is masked, scores of tokens that nobody judges, the vocabulary's padding."""
    loss, batch, _ = setup(case)
    output = case.make_output(torch.Generator().manual_seed(1), batch, VOCAB + 1).requires_grad_()
    hidden = does_not_count(loss, batch)
    plain = case.plain_streams(loss, output, batch)
    counted = sum(
        stream.square().masked_fill(hidden(name, stream), 0).sum()
        for name, stream in plain.items()
        if stream.requires_grad
    )
    reads = torch.autograd.grad(counted, output)[0] != 0
    if output.dim() == 3:  # a softmax reads the whole of a row, but for the padding
        reads = reads.any(-1, keepdim=True) & (torch.arange(VOCAB + 1) < VOCAB)
    assert not reads.all()

    def on(given):
        given = given.detach().requires_grad_()
        value, metrics = loss(given, batch, *valid_counts(batch), valid_vocab_size=VOCAB)
        return value, metrics, torch.autograd.grad(value, given)[0]

    value, metrics, gradient = on(output)
    bad_value, bad_metrics, bad_gradient = on(torch.where(reads, output, poison))
    assert torch.equal(bad_value, value) and torch.equal(bad_gradient, gradient)
    assert_same(bad_metrics, metrics, **EXACTLY)
    assert (gradient[~reads] == 0).all()


@every_case
@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_a_batch_without_valid_tokens_is_a_finite_zero(case, key):
    loss, batch, output = setup(case)
    batch[key] = torch.zeros_like(batch[key])
    value, metrics, gradients = evaluate(loss, batch, streams_of(loss, output, batch))
    assert value == 0
    for gradient in gradients.values():
        assert (gradient == 0).all()
    for name, metric in metrics.items():
        reduction = loss.metric_reductions[name]
        if reduction is Reduction.SUM:
            assert torch.isfinite(metric), name
        else:
            assert metric == reduction.identity, name


@every_case
@pytest.mark.parametrize("split", ["uneven", "one by one", "with an empty part"])
def test_parts_add_up(case, split):
    loss, batch, output = setup(case)
    streams, counts = streams_of(loss, output, batch), valid_counts(batch)
    value, metrics, gradients = evaluate(loss, batch, streams)
    units = len(output) // loss.group_size
    sizes = {"uneven": [1, units - 1], "one by one": [1] * units, "with an empty part": [2, 0, units - 2]}[split]
    parts, start = [], 0
    for size in sizes:
        index = slice(start, start + size * loss.group_size)
        parts.append(evaluate(loss, rows(batch, index), rows(streams, index), counts))
        start = index.stop
    torch.testing.assert_close(sum(part[0] for part in parts), value, **NEARLY)
    assert_same(combine(loss.metric_reductions, [part[1] for part in parts]), metrics, **NEARLY)
    assert_same({name: torch.cat([part[2][name] for part in parts]) for name in gradients}, gradients, **NEARLY)


@every_case
def test_the_order_of_rows_does_not_matter(case):
    """Units change places; within a unit, as a pair of chosen and rejected, the order has a meaning."""
    loss, batch, output = setup(case)
    streams = streams_of(loss, output, batch)
    units = torch.randperm(len(output) // loss.group_size, generator=torch.Generator().manual_seed(2))
    order = (units[:, None] * loss.group_size + torch.arange(loss.group_size)).flatten()
    assert (order != torch.arange(len(order))).any()
    value, metrics, gradients = evaluate(loss, batch, streams)
    other_value, other_metrics, other_gradients = evaluate(loss, rows(batch, order), rows(streams, order))
    torch.testing.assert_close(other_value, value, **NEARLY)
    assert_same(other_metrics, metrics, **NEARLY)
    assert_same(other_gradients, {name: gradient[order] for name, gradient in gradients.items()}, **NEARLY)


@every_case
def test_padding_does_not_matter(case):
    """More padding on the right is what packing and dynamic batches change."""
    loss, batch, output = setup(case)
    streams = streams_of(loss, output, batch)
    wide = {key: pad_width(value, 3) for key, value in batch.items()}
    wide_streams = {name: leaf(pad_width(stream, 3), like=stream) for name, stream in streams.items()}
    value, metrics, gradients = evaluate(loss, batch, streams)
    wide_value, wide_metrics, wide_gradients = evaluate(loss, wide, wide_streams)
    torch.testing.assert_close(wide_value, value, **NEARLY)
    assert_same(wide_metrics, metrics, **NEARLY)
    assert_same(wide_gradients, {name: pad_width(gradient, 3) for name, gradient in gradients.items()}, **NEARLY)


@pytest.mark.change
@every_case
@pytest.mark.parametrize("temperature", [None, 0.7])  # of logits; nothing to scores
def test_the_output_form_equals_the_direct_form(case, temperature):
    loss, batch, output = setup(case)
    if temperature is not None:
        batch["temperature"] = torch.full((len(output),), temperature, dtype=torch.float64)
    seqs, toks = valid_counts(batch)
    counts = {"global_valid_seqs": seqs.item(), "global_valid_toks": toks.item()}
    results = []
    for call in (
        lambda given: loss(given, batch, seqs, toks),
        lambda given: loss(data=batch, **counts, logits=given),
        lambda given: loss(data=batch, **counts, **{loss.output_name: given}),
        lambda given: loss(
            data=batch, **counts, **case.plain_streams(loss, given, batch) if loss.input_names else {"logits": given}
        ),
        lambda given: loss.evaluate(batch, seqs, toks, **case.plain_streams(loss, given, batch)),
    ):
        given = output.clone().requires_grad_()
        value, metrics = call(given)
        results.append((value, metrics, torch.autograd.grad(value, given)[0]))
    assert all(isinstance(metric, float) for metric in results[0][1].values())
    for value, metrics, gradient in results[1:]:
        torch.testing.assert_close(value, results[0][0], **NEARLY)
        torch.testing.assert_close(gradient, results[0][2], rtol=1e-10, atol=1e-14)
        assert_same(metrics, results[0][1], **NEARLY)


@every_case
def test_the_gradient_is_the_derivative_or_what_the_definition_says(case):
    loss, batch, output = setup(case)
    streams, counts = streams_of(loss, output, batch), valid_counts(batch)
    if case.gradient is not None:
        _, _, gradients = evaluate(loss, batch, streams)
        assert_same(gradients, case.gradient(batch, streams, counts), rtol=1e-10, atol=1e-14)
        return
    moving = [name for name, stream in streams.items() if stream.requires_grad]

    def value(*tensors):
        return loss.evaluate(batch, *counts, **(streams | dict(zip(moving, tensors, strict=True))))[0]

    assert torch.autograd.gradcheck(value, tuple(streams[name] for name in moving), eps=1e-7, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.gradient is not None], ids=str)
def test_a_closed_form_is_there_only_where_gradients_are_stopped(case):
    """Else finite differences would do, and say more."""
    loss, batch, output = setup(case)
    streams, counts = streams_of(loss, output, batch), valid_counts(batch)
    name, gradient = next(iter(evaluate(loss, batch, streams)[2].items()))
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    up, down = (
        loss.evaluate(batch, *counts, **(streams | {name: streams[name].detach() + step * direction}))[0]
        for step in (1e-6, -1e-6)
    )
    assert abs((up - down) / 2e-6 - (gradient * direction).sum()) > 1e-4


def in_fp32(mapping):
    return {
        name: leaf(value.float(), like=value) if value.is_floating_point() else value for name, value in mapping.items()
    }


@pytest.mark.change
@every_case
@pytest.mark.parametrize("far", [30.0, 100.0, 1000.0])
@pytest.mark.parametrize("what", ["the other policies", "the output"])
def test_extreme_ratios_stay_finite(case, what, far):
    """In fp32: every other policy `far` nats above or below the current one; or the output `far` times as large."""
    loss, batch, output = setup(case)
    if what == "the output":
        output = far * output
    streams = streams_of(loss, output, batch)
    if what == "the other policies":
        sign = torch.tensor([1.0, -1.0]).repeat(batch["input_ids"].shape[1] // 2)
        for index, key in enumerate(key for key in batch if key.endswith("_logprobs")):
            shift = far * sign.roll(index)
            batch[key] = batch[key] + shift.view(-1, *(1,) * (batch[key].dim() - 2))
    value, metrics, gradients = evaluate(loss, in_fp32(batch), in_fp32(streams))
    assert torch.isfinite(value) and all(torch.isfinite(gradient).all() for gradient in gradients.values())
    for name, metric in metrics.items():
        assert torch.isfinite(metric), name


@every_case
def test_a_nan_that_counts_is_named_with_its_position(case):
    loss, batch, output = setup(case)
    seqs, toks = valid_counts(batch)
    counts = {"global_valid_seqs": seqs, "global_valid_toks": toks}

    def expect(name, position):
        where = re.escape(f"{type(loss).__name__} is NaN: {name}[{', '.join(map(str, position))}]")
        return pytest.raises(ValueError, match=where)

    # A weight π_prev/π_generation that is NaN counts as 0, by definition: REINFORCE reads π_prev for nothing else.
    forgiven = ["generation_logprobs"] + ["prev_logprobs"] * case.cfg.get("disable_ppo_ratio", False)
    for key in loss.required_keys:
        value = batch[key]
        if key in ("token_mask", "sample_mask", *forgiven) or not value.is_floating_point():
            continue
        position = (0, 2 if key in loss.next_token_keys else 3, 1)[: value.dim()]
        with expect(f"data['{key}']", position):
            loss(data={**batch, key: with_nan(value, position)}, **counts, logits=output)
    streams = case.plain_streams(loss, output, batch)
    for name, stream in streams.items():
        position = (0, 2, min(1, stream.size(-1) - 1))[: stream.dim()]
        given = streams | {name: with_nan(stream, position)}
        if not loss.input_names:  # the output is the stream
            given = {loss.output_name: nan_output(case, loss, output, batch, position)}
        with expect(name, position):
            loss(data=batch, **counts, **given)


def with_nan(tensor, position):
    tensor = tensor.detach().clone()
    tensor[position] = math.nan
    return tensor


def nan_output(case, loss, output, batch, position):
    """The output, NaN where the stream reads its entry at `position`."""
    given = output.clone().requires_grad_()
    (stream,) = case.plain_streams(loss, given, batch).values()
    return output.masked_fill(torch.autograd.grad(stream[position], given)[0] != 0, math.nan)


@every_case
def test_missing_keys_wrong_shapes_and_dtypes_are_named(case):
    loss, batch, output = setup(case)
    streams, counts = streams_of(loss, output, batch), valid_counts(batch)
    name = type(loss).__name__
    for key in loss.required_keys:
        given = {"logits": output} if key in loss.output_keys else streams

        def on(changed, given=given):
            return loss(data=changed, global_valid_seqs=counts[0], global_valid_toks=counts[1], **given)

        without = {other: value for other, value in batch.items() if other != key}
        with pytest.raises(KeyError, match=rf"{name} needs data\['{key}'\]"):
            on(without)
        wrong = {**batch, key: torch.cat([batch[key], batch[key]])}
        with pytest.raises(ValueError, match=rf"(?=.*{name})(?=.*\(12,)(?=.*\(6,)"):
            on(wrong)
        with pytest.raises(TypeError, match=rf"{name}: (?=.*{key})(?=.*complex128)"):
            on({**batch, key: batch[key].to(torch.complex128)})
        with pytest.raises(TypeError, match=rf"{name}: (?=.*{key})(?=.*list)"):
            on({**batch, key: batch[key].tolist()})
