"""One process: logprobs, entropy and gathered logprobs of what a filter leaves, against masked log_softmax in fp64."""

import pytest
import torch

from rl_megatron.logprobs import IGNORE_INDEX, SamplingFilter, vocab_parallel_logprobs
from tests.unit.logprobs.test_sampling_filter import by_sorting

ROWS, VOCAB = 40, 60
OUTSIDE = ["minus_infinity", "keep", "ignore"]


def random_case(dtype=torch.float32, seed=0):
    """(logits, targets, gather_ids, temperature); some targets and ids are likely, some are not."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(ROWS, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[::2] = logits[::2].argmax(-1)
    ids = torch.randint(0, VOCAB, (ROWS, 3), generator=generator)
    ids[:, 1], ids[:, 2] = logits.argmax(-1), targets  # duplicates too
    return logits, targets, ids, 0.5 + torch.rand(ROWS, generator=generator)


def expected(logits, targets, ids, temperature, sampling_filter):
    """(logprobs, entropy, gathered, which targets are outside), differentiable in fp64 logits."""
    left = by_sorting(logits.detach(), sampling_filter, temperature)
    outside = ~left.gather(1, targets[:, None])[:, 0]
    if sampling_filter.outside == "keep":
        left = left.scatter(1, targets[:, None], True)
    logprobs = (logits / temperature.double()[:, None]).masked_fill(~left, -torch.inf).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~left, 0.0)).sum(-1)
    of_targets, gathered = logprobs.gather(1, targets[:, None])[:, 0], logprobs.gather(1, ids)
    if sampling_filter.outside == "ignore":
        of_targets, entropy = of_targets.masked_fill(outside, 0.0), entropy.masked_fill(outside, 0.0)
        gathered = gathered.masked_fill(outside[:, None], 0.0)
    return of_targets, entropy, gathered, outside


FILTERS = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 12, "top_p": 0.8}]


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_and_gradients_are_those_of_the_renormalised_rest(dtype, settings, outside):
    sampling_filter = SamplingFilter(**settings, outside=outside)
    logits, targets, ids, temperature = random_case(dtype)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = vocab_parallel_logprobs(
        leaf, targets, temperature=temperature, entropy=True, gather_ids=ids, sampling_filter=sampling_filter
    )
    *wanted, is_outside = expected(exact, targets, ids, temperature, sampling_filter)
    assert 5 < is_outside.sum() < ROWS - 5
    loss = exact_loss = 0.0
    for stream, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(stream.double(), want.detach(), rtol=3e-6, atol=3e-6)
        weight = torch.randn(stream.shape, generator=torch.Generator().manual_seed(7))
        finite = want > -torch.inf  # what is outside is −inf in both and asks for nothing
        loss = loss + (stream * weight)[finite].sum()
        exact_loss = exact_loss + (want * weight.double())[finite].sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    (want_gradient,) = torch.autograd.grad(exact_loss, exact)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert ((gradient.double() - want_gradient).abs() <= rounding * want_gradient.abs() + 1e-5).all()


@pytest.mark.change
@pytest.mark.parametrize("outside", OUTSIDE)
def test_gradcheck(outside):
    logits, targets, ids, temperature = (x[:8] for x in random_case(torch.float64))  # it tries every element
    sampling_filter = SamplingFilter(top_k=6, outside=outside)
    _, _, gathered, is_outside = expected(logits, targets, ids, temperature, sampling_filter)
    assert 1 < is_outside.sum() < 7
    inside = gathered > -torch.inf

    def of(x):
        found = vocab_parallel_logprobs(
            x, targets, temperature=temperature, entropy=True, gather_ids=ids, sampling_filter=sampling_filter
        )
        return found.logprobs.clamp(min=-1e3), found.entropy, found.gathered[inside]

    assert torch.autograd.gradcheck(of, logits.requires_grad_())


def test_a_target_that_is_left_out_has_no_gradient_and_a_kept_one_has():
    logits = torch.tensor([[5.0, 4.0, 0.0], [5.0, 4.0, 0.0]])
    targets = torch.tensor([2, 0])
    for outside, value in {"minus_infinity": -torch.inf, "ignore": 0.0}.items():
        leaf = logits.clone().requires_grad_()
        found = vocab_parallel_logprobs(leaf, targets, sampling_filter=SamplingFilter(top_k=2, outside=outside))
        found.logprobs.backward(torch.ones(2))
        assert found.logprobs[0] == value and (leaf.grad[0] == 0).all() and (leaf.grad[1, :2] != 0).all()
        assert leaf.grad[1, 2] == 0
    leaf = logits.clone().requires_grad_()
    found = vocab_parallel_logprobs(leaf, targets, sampling_filter=SamplingFilter(top_k=2, outside="keep"))
    found.logprobs.sum().backward()
    torch.testing.assert_close(found.logprobs[0], logits[0].log_softmax(-1)[2])  # three of three
    assert (leaf.grad[0] != 0).all() and leaf.grad[1, 2] == 0


def test_ids_that_are_left_out_have_no_gradient():
    logits, targets, ids, _ = random_case()
    found = []
    for keep in (lambda gathered: gathered, lambda gathered: gathered[gathered > -torch.inf]):
        leaf = logits.clone().requires_grad_()
        stats = vocab_parallel_logprobs(leaf, targets, gather_ids=ids, sampling_filter=SamplingFilter(top_k=5))
        keep(stats.gathered).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_logprobs_may_be_changed_in_place():
    logits, targets, _, _ = random_case()
    found = []
    for double in (lambda logprobs: 2 * logprobs, lambda logprobs: logprobs.mul_(2)):
        leaf = logits.clone().requires_grad_()
        sampling_filter = SamplingFilter(top_k=5, outside="keep")
        double(vocab_parallel_logprobs(leaf, targets, sampling_filter=sampling_filter).logprobs).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_a_filter_that_is_off_changes_no_bit():
    logits, targets, ids, temperature = random_case()
    results = []
    for sampling_filter in (None, SamplingFilter()):
        leaf = logits.clone().requires_grad_()
        found = vocab_parallel_logprobs(
            leaf, targets, temperature=temperature, entropy=True, gather_ids=ids, sampling_filter=sampling_filter
        )
        sum(stream.sum() for stream in found).backward()
        results.append((*found, leaf.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_infinities_and_ignored_rows_with_nan_make_no_nan(settings, outside):
    logits, targets, ids, _ = random_case()
    logits[0, 3:], targets[0] = -torch.inf, 1
    logits[1, 3:], targets[1] = -torch.inf, 9  # impossible
    logits[2], logits[3], targets[3] = -torch.inf, torch.nan, IGNORE_INDEX
    leaf = logits.clone().requires_grad_()
    found = vocab_parallel_logprobs(
        leaf, targets, entropy=True, gather_ids=ids, sampling_filter=SamplingFilter(**settings, outside=outside)
    )
    sum(stream.masked_fill(stream == -torch.inf, 0.0).sum() for stream in found).backward()
    assert not any(stream.isnan().any() for stream in (*found, leaf.grad))
    assert found.logprobs[2] == -torch.inf and found.entropy[2] == 0 and (leaf.grad[2] == 0).all()
    assert found.logprobs[3] == 0 and (found.gathered[3] == 0).all() and (leaf.grad[3] == 0).all()
    assert found.logprobs[1] == (0.0 if outside == "ignore" else -torch.inf)
    assert torch.isfinite(found.logprobs[0]) or outside == "minus_infinity"


def test_the_logits_buffer_becomes_the_gradient_once():
    logits, targets, _, _ = random_case()
    buffer = logits.requires_grad_() * 1
    address = buffer.data_ptr()
    found = vocab_parallel_logprobs(buffer, targets, sampling_filter=SamplingFilter(top_k=5, outside="keep"))
    (gradient,) = torch.autograd.grad(found.logprobs.sum(), buffer, retain_graph=True)
    assert gradient.data_ptr() == address
    with pytest.raises(RuntimeError, match="second backward"):
        found.logprobs.sum().backward()
