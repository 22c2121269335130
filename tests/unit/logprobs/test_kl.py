"""One process: both KL divergences and their gradients against log_softmax in fp64."""

import pytest
import torch

from rl_megatron.logprobs import vocab_parallel_kl
from rl_megatron.logprobs.kernels import tiles

DIRECTIONS = ["forward", "reverse"]


def random_case(rows, vocab, dtype=torch.float32, scale=3.0, seed=0):
    """(student, teacher, upstream gradient)."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(2, rows, vocab, generator=generator)).to(dtype)
    return student, teacher, torch.randn(rows, generator=generator)


def expected(student, teacher, upstream, direction, temperature=1.0):
    """(KL, gradient), from the definition in fp64; what the weighing side finds impossible adds nothing."""
    student = student.double().requires_grad_()
    divisor = temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature
    log_q, log_p = (student / divisor).log_softmax(-1), (teacher.double() / divisor).log_softmax(-1)
    weighing, other = (log_p, log_q) if direction == "forward" else (log_q, log_p)
    possible = weighing > -torch.inf
    weighing, other = weighing.where(possible, torch.tensor(-1e9)), other.where(possible, torch.tensor(0.0))
    value = (weighing.exp() * (weighing - other)).sum(-1)
    return value.detach(), torch.autograd.grad(value, student, upstream.double())[0]


def run(student, teacher, upstream, direction, **options):
    """(KL, gradient); the student's own memory is not the gradient's."""
    leaf = student.clone().requires_grad_()
    value = vocab_parallel_kl(leaf, teacher, direction=direction, **options)
    (gradient,) = torch.autograd.grad(value, leaf, upstream)
    assert torch.equal(leaf.detach().nan_to_num(), student.nan_to_num())
    return value.detach(), gradient


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("vocab", [1, 2, 127, 18992])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_the_definition_in_fp64(vocab, dtype, direction):
    student, teacher, upstream = random_case(37, vocab, dtype)
    temperature = torch.linspace(0.6, 1.4, 37)
    value, gradient = run(student, teacher, upstream, direction, temperature=temperature)
    want_value, want_gradient = expected(student, teacher, upstream, direction, temperature)
    assert value.dtype == torch.float32 and gradient.dtype == dtype
    assert ((value - want_value).abs() <= 5e-6 * want_value.abs().clamp(min=1)).all()
    half_ulp = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    smallest = 2.0**-24 if dtype is torch.float16 else 0.0
    assert ((gradient.double() - want_gradient).abs() <= half_ulp * want_gradient.abs() + 2e-5 + smallest).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0, 1.3, 0.9])], ids=str)
def test_gradcheck(direction, temperature):
    student, teacher, _ = random_case(5, 7, torch.float64, scale=1.0)
    rows = torch.tensor([3, -1, 0, 0, 4])
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_kl(
            x, teacher, direction=direction, temperature=temperature, teacher_rows=rows, valid_vocab_size=6
        ),
        student.requires_grad_(),
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shift", [30.0, 1e4, -1e4])
def test_a_shift_of_all_logits_changes_nothing(shift, direction):
    student, teacher, upstream = random_case(20, 500)
    student, teacher = student + shift, teacher - shift  # rounds: compare with the shifted logits taken back exactly
    value, gradient = run(student, teacher, upstream, direction)
    want_value, want_gradient = expected(student.double() - shift, teacher.double() + shift, upstream, direction)
    torch.testing.assert_close(value.double(), want_value, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_models_that_agree_are_at_zero(direction):
    student, _, upstream = random_case(9, 4000)
    value, gradient = run(student, student - 7.0, upstream, direction)
    assert value.abs().max() <= 2e-6 and gradient.abs().max() <= 2e-6
    close = student + 1e-3 * torch.randn(9, 4000, generator=torch.Generator().manual_seed(3))
    value, _ = run(close, student, upstream, direction)
    want, _ = expected(close, student, upstream, direction)
    torch.testing.assert_close(value.double(), want, rtol=0, atol=3e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_distribution_on_one_token_is_as_far_as_its_logit(direction):
    logits = torch.eye(3) * 200.0
    value, gradient = run(logits, logits.roll(1, 0), torch.ones(3), direction)
    assert torch.equal(value, torch.full((3,), 200.0))
    pull = torch.eye(3) - torch.eye(3).roll(1, 0)  # reverse: the student has no doubt left, and its gradient is 0
    assert torch.equal(gradient, pull if direction == "forward" else torch.zeros(3, 3))


class TestImpossibleTokens:
    """Logits of −inf."""

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_impossible_to_both_or_to_the_weighing_side_adds_nothing(self, direction):
        student, teacher, upstream = random_case(6, 50)
        student[:3, ::2] = teacher[:3, ::2] = -torch.inf
        (teacher if direction == "forward" else student)[3:, ::2] = -torch.inf
        value, gradient = run(student, teacher, upstream, direction)
        want, want_gradient = expected(student, teacher, upstream, direction)
        torch.testing.assert_close(value.double(), want, rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(gradient.double(), want_gradient.nan_to_num(), rtol=1e-5, atol=5e-6)

    def test_impossible_to_the_student_alone_costs_infinity_forward_and_still_pulls(self):
        student, teacher, upstream = random_case(3, 8)
        student[1, 5] = -torch.inf
        value, gradient = run(student, teacher, upstream, "forward")
        assert value[1] == torch.inf and torch.isfinite(value[[0, 2]]).all()
        want = (student.softmax(-1) - teacher.softmax(-1)) * upstream[:, None]
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=2e-6)

    def test_impossible_to_the_teacher_alone_costs_infinity_in_reverse_without_a_gradient(self):
        student, teacher, upstream = random_case(3, 8)
        teacher[1, 5] = -torch.inf
        value, gradient = run(student, teacher, upstream, "reverse")
        assert value[1] == torch.inf and torch.isfinite(value[[0, 2]]).all()
        assert (gradient[1] == 0).all() and (gradient[[0, 2]] != 0).all()

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_rows_of_nothing_else(self, direction):
        student, teacher, upstream = random_case(4, 8)
        student[0] = teacher[1] = student[3] = teacher[3] = -torch.inf
        value, gradient = run(student, teacher, upstream, direction)
        assert value[0] == torch.inf and value[1] == 0 and value[3] == 0 and torch.isfinite(value[2])
        assert (gradient[[0, 1, 3]] == 0).all() and (gradient[2] != 0).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("vocab", [50, 1 << 17], ids=["one block", "rows in several blocks"])
def test_rows_without_a_teacher_and_padding_have_no_effect_even_with_nan(vocab, direction):
    student, teacher, upstream = random_case(8, vocab)
    rows = torch.tensor([-1, 6, -1, -1, -1, -1, 0, 6])
    student[2], student[3], student[4] = torch.nan, torch.inf, -torch.inf
    teacher[[1, 2, 3, 4, 5, 7]] = torch.nan  # nobody's row
    student[:, vocab - 5 :] = teacher[:, vocab - 5 :] = torch.nan
    value, gradient = run(student, teacher, upstream, direction, teacher_rows=rows, valid_vocab_size=vocab - 5)
    kept = rows >= 0
    assert (value[~kept] == 0).all() and (gradient[~kept] == 0).all() and (gradient[:, vocab - 5 :] == 0).all()
    want = expected(student[kept, : vocab - 5], teacher[rows[kept], : vocab - 5], upstream[kept], direction)
    torch.testing.assert_close(value[kept].double(), want[0], rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(gradient[kept, : vocab - 5].double(), want[1], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_nan_that_counts_stays_a_nan(direction):
    student, teacher, _ = random_case(4, 10)
    student[0, 3], teacher[1, 3] = torch.nan, torch.nan
    value = vocab_parallel_kl(student, teacher, direction=direction)
    assert value[:2].isnan().all() and torch.isfinite(value[2:]).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bits_do_not_depend_on_the_block_or_the_batch(monkeypatch, direction):
    student, teacher, upstream = random_case(40, 1001, torch.bfloat16)
    whole = run(student, teacher, upstream, direction, temperature=0.7)
    for part in (slice(10, 17), slice(5, 6)):
        found = run(student[part], teacher[part], upstream[part], direction, temperature=0.7)
        assert torch.equal(found[0], whole[0][part]) and torch.equal(found[1], whole[1][part])
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 3 * 1001)
    for got, want in zip(run(student, teacher, upstream, direction, temperature=0.7), whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_students_buffer_becomes_the_gradient_once(direction):
    student, teacher, upstream = random_case(5, 20)
    buffer = student.clone().requires_grad_() * 1
    address, value = buffer.data_ptr(), vocab_parallel_kl(buffer, teacher, direction=direction)
    (gradient,) = torch.autograd.grad(value, buffer, upstream, retain_graph=True)
    assert gradient.data_ptr() == address
    assert torch.equal(gradient, run(student, teacher, upstream, direction)[1])
    with pytest.raises(RuntimeError, match="second backward through vocab_parallel_kl"):
        value.sum().backward()


@pytest.mark.change
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_of_the_logits_size_is_allocated(monkeypatch, direction):
    rows, vocab = 512, 1024
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 8 * vocab)
    student, teacher, upstream = random_case(rows, vocab)
    buffer = student.requires_grad_() * 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        value = vocab_parallel_kl(buffer, teacher, direction=direction, temperature=0.9)
        torch.autograd.grad(value, buffer, upstream)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 3 * 8 * vocab * 4 <= largest < rows * vocab * 4 / 8


def test_another_direction_is_refused():
    with pytest.raises(ValueError, match="direction='backward' must be 'forward', .* or 'reverse'"):
        vocab_parallel_kl(torch.randn(2, 3), torch.randn(2, 3), direction="backward")
