"""One process: the divergences from a teacher and their gradients against log_softmax in fp64."""

import pytest
import torch

from rl_megatron.logprobs import DeferredLogits, teacher_divergences, vocab_parallel_kl

ALL = ("forward", "reverse", "jensen_shannon")
BETA = 0.3


def random_case(sequences=3, length=7, vocab=50, dtype=torch.float32, seed=0):
    """(student [B, S, V], teacher [B, S, V], targets [B, S] of which some are ignored)."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (3.0 * torch.randn(2, sequences, length, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (sequences, length), generator=generator)
    targets[0, 2], targets[1, :4] = -100, -100
    return student, teacher, targets


def expected(student, teacher, targets, temperature=1.0, beta=BETA):
    """(divergences [B, S, 3], logprobs [B, S]) by definition."""
    log_q, log_p = ((x.double() / temperature).log_softmax(-1) for x in (student, teacher))
    q, p = log_q.exp(), log_p.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
    mixed = beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)
    counted = targets != -100
    logprobs = log_q.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    divergences = torch.stack([forward, reverse, mixed], dim=-1)
    return torch.where(counted[..., None], divergences, 0.0), torch.where(counted, logprobs, 0.0)


def weighted(divergences, logprobs):
    """A scalar whose gradient needs all results, each entry with another weight."""
    ramp = torch.linspace(0.5, 1.5, logprobs.numel(), dtype=divergences.dtype).view(logprobs.shape)
    return (divergences @ divergences.new_tensor([0.2, 0.5, 0.9]) * ramp - 0.4 * ramp * logprobs).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_match_the_definition(dtype, temperature):
    student, teacher, targets = random_case(dtype=dtype)
    leaf, reference = student.clone().requires_grad_(), student.double().requires_grad_()
    options = {"divergences": ALL, "beta": BETA, "temperature": temperature}
    got = teacher_divergences(leaf, teacher, targets, **options)
    want = expected(reference, teacher, targets, temperature)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance)
    (gradient,) = torch.autograd.grad(weighted(*got), leaf)
    (want_gradient,) = torch.autograd.grad(weighted(*want), reference)
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 0.0
    bound = 1e-12 if dtype is torch.float64 else 2e-5  # as for `vocab_parallel_kl`, with gradients of up to 20
    assert ((gradient.double() - want_gradient).abs() <= rounding * want_gradient.abs() + bound).all()
    assert want_gradient.abs().max() > 0.1


def test_padding_of_the_vocabulary_and_ignored_rows_count_for_nothing():
    student, teacher, targets = random_case()
    targets[targets >= 46] = 3
    leaf = student.clone()
    leaf[targets == -100] = torch.nan
    leaf[..., 46:] = torch.inf
    leaf.requires_grad_()
    got = teacher_divergences(leaf, teacher, targets, divergences=ALL, beta=BETA, valid_vocab_size=46)
    want = expected(student[..., :46], teacher[..., :46], targets)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-6, atol=2e-6)
    (gradient,) = torch.autograd.grad(weighted(*got), leaf)
    assert gradient[targets == -100].eq(0).all() and gradient[..., 46:].eq(0).all()
    assert gradient[targets != -100][:, :46].abs().max() > 0.1


@pytest.mark.parametrize("block_tokens", [1, 5, None])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_teacher_computed_by_blocks_equals_its_whole_logits(block_tokens, transposed):
    student, _, targets = random_case(dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, 3, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    whole, by_blocks = (hidden @ weight.T).transpose(0, 1), DeferredLogits(hidden, weight, 1, block_tokens)
    found = []
    for teacher in (whole, by_blocks):
        leaf = student.transpose(0, 1).contiguous() if transposed else student.clone()
        leaf.requires_grad_()
        seen = leaf.transpose(0, 1) if transposed else leaf
        result = teacher_divergences(seen, teacher, targets, divergences=ALL, beta=BETA)
        found.append((*result, torch.autograd.grad(weighted(*result), leaf)[0]))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_impossible_tokens():
    """As for `vocab_parallel_kl`; the Jensen-Shannon divergence stays finite."""
    student, teacher, targets = random_case(dtype=torch.float64)
    student[..., 1], teacher[..., 2] = -torch.inf, -torch.inf
    targets.masked_fill_(targets == 1, 0)
    student.requires_grad_()
    got = teacher_divergences(student, teacher, targets, divergences=ALL, beta=BETA)
    counted = targets != -100
    for column, direction in enumerate(ALL[:2]):
        want = vocab_parallel_kl(student.detach(), teacher, direction=direction)
        assert torch.equal(got.divergences[..., column][counted], want[counted]) and want[counted].isinf().all()
    js = got.divergences[..., 2]
    assert js.isfinite().all()
    q, p = student.detach().softmax(-1), teacher.softmax(-1)
    m = BETA * p + (1 - BETA) * q
    plain = torch.special.xlogy(p, p / m).nan_to_num(0).sum(-1) * BETA
    plain = plain + (1 - BETA) * torch.special.xlogy(q, q / m).nan_to_num(0).sum(-1)
    torch.testing.assert_close(js[counted], plain[counted])
    (gradient,) = torch.autograd.grad(js.sum(), student)
    assert gradient.isfinite().all()


def test_gradcheck():
    student, teacher, targets = random_case(sequences=2, length=3, vocab=5, dtype=torch.float64)
    targets = targets.clamp(max=3)
    assert torch.autograd.gradcheck(
        lambda x: teacher_divergences(
            x, teacher, targets, divergences=ALL, beta=BETA, temperature=1.3, valid_vocab_size=4
        ),
        student.requires_grad_(),
    )


def test_shapes_and_targets_that_do_not_fit_are_refused():
    student, teacher, targets = random_case()
    with pytest.raises(ValueError, match="laid out like the student's"):
        teacher_divergences(student, teacher[..., :-1], targets)
    with pytest.raises(ValueError, match="in the vocabulary"):
        teacher_divergences(student, teacher, targets.masked_fill(targets == targets.max(), 50))
