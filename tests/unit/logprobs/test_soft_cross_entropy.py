"""One process: the soft cross-entropy and its gradient against log_softmax in fp64, and the columns of a few ids."""

import math

import pytest
import torch

from rl_megatron.logprobs import vocab_parallel_soft_cross_entropy, vocab_subset
from rl_megatron.logprobs.kernels import tiles


def random_case(rows, vocab, dtype=torch.float32, scale=3.0, seed=0):
    """(student, teacher, upstream gradient)."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(2, rows, vocab, generator=generator)).to(dtype)
    return student, teacher, torch.randn(rows, generator=generator)


def expected(student, teacher, upstream):
    """(cross-entropy, gradient), from the definition in fp64."""
    student = student.double().requires_grad_()
    value = -(teacher.double().softmax(-1) * student.log_softmax(-1)).sum(-1)
    return value.detach(), torch.autograd.grad(value, student, upstream.double())[0]


def run(student, teacher, upstream, **options):
    """(cross-entropy, gradient); the student's own memory is not the gradient's."""
    leaf = student.clone().requires_grad_()
    value = vocab_parallel_soft_cross_entropy(leaf, teacher, **options)
    (gradient,) = torch.autograd.grad(value, leaf, upstream)
    assert torch.equal(leaf.detach().nan_to_num(), student.nan_to_num())
    return value.detach(), gradient


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 18992])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_the_definition_in_fp64(vocab, dtype):
    student, teacher, upstream = random_case(37, vocab, dtype)
    value, gradient = run(student, teacher, upstream)
    want_value, want_gradient = expected(student, teacher, upstream)
    assert value.dtype == torch.float32 and gradient.dtype == dtype
    assert ((value - want_value).abs() <= 2e-6 * want_value.abs().clamp(min=1)).all()
    half_ulp = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    smallest = 2.0**-24 if dtype is torch.float16 else 0.0
    assert ((gradient.double() - want_gradient).abs() <= half_ulp * want_gradient.abs() + 4e-6 + smallest).all()


def test_gradcheck():
    student, teacher, _ = random_case(5, 7, torch.float64, scale=1.0)
    rows = torch.tensor([3, -1, 0, 0, 4])
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_soft_cross_entropy(x, teacher, teacher_rows=rows, valid_vocab_size=6),
        student.requires_grad_(),
    )


@pytest.mark.parametrize("shift", [30.0, -120.0, 1e4, -1e4])
def test_a_shift_of_all_logits_changes_nothing(shift):
    student, teacher, upstream = random_case(20, 500)
    student, teacher = student + shift, teacher - shift  # rounds: compare with the shifted logits taken back exactly
    value, gradient = run(student, teacher, upstream)
    want_value, want_gradient = expected(student.double() - shift, teacher.double() + shift, upstream)
    torch.testing.assert_close(value.double(), want_value, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("far", [200.0, 2e4, 1e30])
def test_extreme_logits(far):
    """Distributions all on one token: 0 where they agree, the distance in nats where they do not."""
    logits = torch.eye(3) * far
    value, gradient = run(logits, logits, torch.ones(3))
    assert (value == 0).all() and (gradient == 0).all()
    value, gradient = run(logits, logits.roll(1, 0), torch.ones(3))
    assert torch.equal(value, torch.full((3,), far))
    assert torch.equal(gradient, torch.eye(3) - torch.eye(3).roll(1, 0))


def test_a_teacher_like_its_student_gives_the_entropy_and_no_gradient():
    student, _, upstream = random_case(9, 40, torch.float64)
    value, gradient = run(student, student, upstream)
    torch.testing.assert_close(value, torch.distributions.Categorical(logits=student).entropy())
    assert (gradient == 0).all()


@pytest.mark.parametrize("of_teacher", [False, True])
def test_what_is_impossible_to_both_or_to_the_teacher_adds_nothing(of_teacher):
    student, teacher, upstream = random_case(6, 50)
    teacher[:, ::2] = -torch.inf
    if not of_teacher:
        student[:, ::2] = -torch.inf
    value, gradient = run(student, teacher, upstream)
    narrow = (slice(None), slice(1, None, 2))
    if of_teacher:
        exact = student.double().requires_grad_()
        want = -(teacher[narrow].double().softmax(-1) * exact.log_softmax(-1)[narrow]).sum(-1)
        want_gradient = torch.autograd.grad(want, exact, upstream.double())[0]
    else:
        want, of_narrow = expected(student[narrow], teacher[narrow], upstream)
        want_gradient = torch.zeros(6, 50, dtype=torch.float64)
        want_gradient[narrow] = of_narrow
    torch.testing.assert_close(value.double(), want.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=1e-5, atol=2e-6)


def test_what_only_the_student_finds_impossible_costs_infinity_and_still_pulls():
    student, teacher, upstream = random_case(3, 8)
    student[1, 5] = -torch.inf
    value, gradient = run(student, teacher, upstream)
    assert value[1] == torch.inf and torch.isfinite(value[[0, 2]]).all()
    want = (student.softmax(-1) - teacher.softmax(-1)) * upstream[:, None]
    torch.testing.assert_close(gradient, want, rtol=1e-5, atol=2e-6)


def test_rows_of_nothing_but_minus_infinity_are_defined():
    student, teacher, upstream = random_case(3, 8)
    student[0], teacher[1] = -torch.inf, -torch.inf
    value, gradient = run(student, teacher, upstream)
    assert value[0] == torch.inf and value[1] == 0 and torch.isfinite(value[2])
    assert (gradient[:2] == 0).all() and (gradient[2] != 0).any()


def test_padded_vocabulary_never_enters():
    student, teacher, upstream = random_case(11, 150)
    student[:, 130:], teacher[:, 130:] = 50.0, 60.0
    student[3, 140] = teacher[4, 141] = torch.nan
    value, gradient = run(student, teacher, upstream, valid_vocab_size=130)
    want_value, want_gradient = expected(student[:, :130], teacher[:, :130], upstream)
    torch.testing.assert_close(value.double(), want_value, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(gradient[:, :130].double(), want_gradient, rtol=1e-5, atol=2e-6)
    assert (gradient[:, 130:] == 0).all()


@pytest.mark.parametrize("vocab", [50, 1 << 17], ids=["one block", "rows in several blocks"])
def test_rows_without_a_teacher_have_no_effect_even_with_nan(vocab):
    student, teacher, upstream = random_case(8, vocab)
    rows = torch.tensor([-1, 6, -1, -1, -1, -1, 0, 6])
    student[2], student[3], student[4] = torch.nan, torch.inf, -torch.inf
    teacher[[1, 2, 3, 4, 5, 7]] = torch.nan  # nobody's row
    upstream[2] = torch.nan
    value, gradient = run(student, teacher, upstream, teacher_rows=rows)
    kept = rows >= 0
    assert (value[~kept] == 0).all() and (gradient[~kept] == 0).all()
    want = run(student[kept], teacher[rows[kept]], upstream[kept])
    assert torch.equal(value[kept], want[0]) and torch.equal(gradient[kept], want[1])


def test_rows_without_upstream_gradient_are_zeros_and_not_read():
    student, teacher, _ = random_case(6, 40)
    buffer = student.clone().requires_grad_() * 1
    value = vocab_parallel_soft_cross_entropy(buffer, teacher)
    with torch.no_grad():
        buffer.data[2] = torch.nan  # behind autograd's back: proves the row is not read again
    (gradient,) = torch.autograd.grad((value * torch.tensor([1.0, 1, 0, 1, 0, 1])).sum(), buffer)
    assert (gradient[[2, 4]] == 0).all() and torch.isfinite(gradient).all() and (gradient[[0, 1, 3, 5]] != 0).all()


def test_bits_do_not_depend_on_the_block_or_the_batch(monkeypatch):
    student, teacher, upstream = random_case(40, 1001, torch.bfloat16)
    whole = run(student, teacher, upstream)
    part = slice(10, 17)
    for got, want in zip(run(student[part], teacher[part], upstream[part]), whole, strict=True):
        assert torch.equal(got, want[part])
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 3 * 1001)
    for got, want in zip(run(student, teacher, upstream), whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("permuted", ["student", "teacher", "both"])
def test_permuted_layouts_meet_their_own_rows(permuted):
    student, teacher, upstream = random_case(12, 33)
    want = run(student, teacher, upstream)
    shaped = {"student": student.view(3, 4, 33), "teacher": teacher.view(3, 4, 33)}
    for name in shaped:
        if permuted in (name, "both"):  # [S=4, B=3, V] seen as [B, S, V]
            shaped[name] = shaped[name].transpose(0, 1).contiguous().transpose(0, 1)
    got = run(shaped["student"], shaped["teacher"], upstream.view(3, 4))
    assert torch.equal(got[0].flatten(), want[0]) and torch.equal(got[1].reshape(12, 33), want[1])
    rows = torch.tensor([[11, 2, -1, 4], [0, 0, 7, 8], [3, -1, 9, 5]])
    got = run(shaped["student"], shaped["teacher"], upstream.view(3, 4), teacher_rows=rows)
    want = run(student, teacher, upstream, teacher_rows=rows.flatten())
    assert torch.equal(got[0].flatten(), want[0]) and torch.equal(got[1].reshape(12, 33), want[1])


@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_rows_at_all(shape):
    leaf = torch.randn(*shape, 9, requires_grad=True)
    value = vocab_parallel_soft_cross_entropy(leaf, torch.randn(*shape, 9))
    value.sum().backward()
    assert value.shape == shape and leaf.grad.shape == leaf.shape


class TestTheStudentsBufferBecomesTheGradient:
    def test_in_place_gives_the_bits_of_out_of_place(self):
        student, teacher, upstream = random_case(5, 20)
        buffer = student.clone().requires_grad_() * 1
        kept, address = teacher.clone(), buffer.data_ptr()
        (gradient,) = torch.autograd.grad(vocab_parallel_soft_cross_entropy(buffer, teacher), buffer, upstream)
        assert gradient.data_ptr() == address and torch.equal(gradient, run(student, teacher, upstream)[1])
        assert torch.equal(teacher, kept)

    def test_second_backward_raises(self):
        student, teacher, _ = random_case(5, 20)
        loss = vocab_parallel_soft_cross_entropy(student.requires_grad_() * 1, teacher).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward"):
            loss.backward()

    @pytest.mark.parametrize("which", ["student", "teacher"])
    def test_logits_changed_before_backward_raise(self, which):
        student, teacher, _ = random_case(5, 20)
        buffer = student.requires_grad_() * 1
        loss = vocab_parallel_soft_cross_entropy(buffer, teacher).sum()
        with torch.no_grad():
            (buffer if which == "student" else teacher).mul_(2)
        with pytest.raises(RuntimeError, match="vocab_parallel_soft_cross_entropy were modified before its backward"):
            loss.backward()

    def test_two_calls_on_one_buffer_raise_rather_than_corrupt(self):
        student, teacher, _ = random_case(5, 20)
        buffer = student.requires_grad_() * 1
        loss = sum(vocab_parallel_soft_cross_entropy(buffer, teacher).sum() for _ in range(2))
        with pytest.raises(RuntimeError, match="backward of a second operator overwrote them .* a clone"):
            loss.backward()

    def test_a_leaf_keeps_its_values_and_autograds_own_error(self):
        student, teacher, _ = random_case(5, 20)
        loss = vocab_parallel_soft_cross_entropy(student.requires_grad_(), teacher).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()

    def test_the_teacher_takes_part_in_no_gradient(self):
        student, teacher, _ = random_case(5, 20)
        teacher.requires_grad_()
        vocab_parallel_soft_cross_entropy(student.requires_grad_(), teacher).sum().backward()
        assert teacher.grad is None and student.grad is not None


def test_nothing_of_the_logits_size_is_allocated(monkeypatch):
    """Beyond the two models' logits: scratch tiles, and a number or a few per row."""
    rows, vocab = 512, 1024
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 8 * vocab)
    student, teacher, upstream = random_case(rows, vocab)
    buffer = student.requires_grad_() * 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.autograd.grad(vocab_parallel_soft_cross_entropy(buffer, teacher), buffer, upstream)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 3 * 8 * vocab * 4 <= largest < rows * vocab * 4 / 8


def test_bad_arguments_are_named():
    student, teacher, _ = random_case(4, 10)
    with pytest.raises(ValueError, match=r"teacher_logits \(4, 9\).*student_logits \(4, 10\): 10 columns"):
        vocab_parallel_soft_cross_entropy(student, teacher[:, 1:])
    with pytest.raises(ValueError, match=r"teacher_logits \(3, 10\).*\(4, 10\)"):
        vocab_parallel_soft_cross_entropy(student, teacher[1:])
    with pytest.raises(ValueError, match=r"teacher_rows \(3,\).*\(4, 10\)"):
        vocab_parallel_soft_cross_entropy(student, teacher, teacher_rows=torch.zeros(3, dtype=torch.long))
    for bad in (-2, 4):
        with pytest.raises(ValueError, match=r"teacher_rows .* must be in \[-1, 4\)"):
            vocab_parallel_soft_cross_entropy(student, teacher, teacher_rows=torch.tensor([0, 1, bad, 2]))


class TestVocabSubset:
    logits = torch.arange(24.0).view(2, 3, 4)

    def test_the_columns_of_the_ids_and_zeros_after_them(self):
        got = vocab_subset(self.logits, torch.tensor([3, 0, 1]), 5)
        assert torch.equal(got[..., :3], self.logits[..., [3, 0, 1]]) and (got[..., 3:] == 0).all()

    def test_it_takes_part_in_no_gradient(self):
        assert not vocab_subset(self.logits.clone().requires_grad_(), torch.tensor([1]), 1).requires_grad

    def test_bad_ids_are_named(self):
        with pytest.raises(ValueError, match=r"3 ids do not fit 1 shard\(s\) of 2 columns"):
            vocab_subset(self.logits, torch.tensor([0, 1, 2]), 2)
        with pytest.raises(ValueError, match=r"ids 0 … 4 must be in the vocabulary \[0, 4\)"):
            vocab_subset(self.logits, torch.tensor([0, 4]), 2)
        with pytest.raises(ValueError, match=r"ids -1 … 2 must be in the vocabulary \[0, 3\)"):
            vocab_subset(self.logits, torch.tensor([2, -1]), 2, valid_vocab_size=3)


def test_a_nan_that_counts_stays_a_nan():
    student, teacher, _ = random_case(4, 10)
    student[0, 3], teacher[1, 3] = math.nan, math.nan
    value = vocab_parallel_soft_cross_entropy(student, teacher)
    assert value[:2].isnan().all() and torch.isfinite(value[2:]).all()
