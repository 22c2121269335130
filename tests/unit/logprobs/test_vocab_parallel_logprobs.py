"""One process: every statistic and gradient against torch's log_softmax in fp64, and the traps of other kernels."""

import itertools
import math

import pytest
import torch

from rl_megatron.logprobs import vocab_parallel_logprobs
from rl_megatron.logprobs.kernels import tiles
from tests.unit.logprobs.logprob_cases import OUTPUTS, expected, expected_gradient, gradient, random_case, rounding


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 1152, 18992])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_matches_log_softmax_in_fp64(vocab, dtype, temperature, backend, logprobs_of):
    rows = {"torch": 37, "triton": 5}[backend]  # Triton's interpreter takes its time
    logits, targets, ids, upstream = random_case(rows, vocab, dtype=dtype)
    leaf = logits.clone().requires_grad_()
    stats = logprobs_of(leaf, targets, temperature=temperature, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids, temperature), strict=True):
        got = getattr(stats, name)
        assert got.dtype == torch.float32
        assert ((got - want).abs() <= 2e-6 * want.abs().clamp(min=1)).all(), name
    got = gradient(stats, upstream, leaf)
    want = expected_gradient(logits, targets, ids, upstream, temperature=temperature)
    relative, absolute = rounding(dtype, backend)
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= relative * want.abs() + 4e-6 + absolute).all()  # 4e-6: fp32's own error


def test_temperature_per_token(backend, logprobs_of):
    logits, targets, ids, upstream = random_case(64, 300, dtype=torch.bfloat16)
    temperature = torch.linspace(0.3, 2.0, 64)
    leaf = logits.clone().requires_grad_()
    stats = logprobs_of(leaf, targets, temperature=temperature, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids, temperature), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    want = expected_gradient(logits, targets, ids, upstream, temperature=temperature)
    relative, _ = rounding(torch.bfloat16, backend)
    torch.testing.assert_close(gradient(stats, upstream, leaf).double(), want, rtol=relative, atol=4e-6)


@pytest.mark.parametrize("shift", [30.0, -30.0, 120.0, -120.0, 1e4, -1e4])
def test_a_shift_of_all_logits_changes_nothing(shift, logprobs_of):
    logits, targets, ids, upstream = random_case(20, 500)
    shifted = (logits + shift).requires_grad_()  # rounds: compare with the shifted logits taken back exactly
    exact = shifted.detach().double() - shift
    stats = logprobs_of(shifted, targets, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(exact, targets, ids), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    want = expected_gradient(exact, targets, ids, upstream)
    torch.testing.assert_close(gradient(stats, upstream, shifted).double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("blocked", [slice(0, 1), slice(0, 400), slice(700, 1000), slice(0, 1000, 2)], ids=str)
def test_infinitely_unlikely_columns(blocked, logprobs_of):
    logits, _, ids, upstream = random_case(9, 1000)
    logits[:, blocked] = -torch.inf
    allowed = torch.arange(1000)[torch.isfinite(logits[0])]
    targets = allowed[torch.arange(9) * 7]
    ids = allowed[ids % len(allowed)]
    leaf = logits.clone().requires_grad_()
    stats = logprobs_of(leaf, targets, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    got = gradient(stats, upstream, leaf)
    assert (got[:, blocked] == 0).all()
    # log_softmax's own backward is NaN-free only on the finite columns: derive it there.
    allowed_position = {int(column): position for position, column in enumerate(allowed)}
    narrow = [torch.tensor([[allowed_position[int(i)] for i in row] for row in x]) for x in (targets[:, None], ids)]
    want = expected_gradient(logits[:, allowed], narrow[0][:, 0], narrow[1], upstream)
    torch.testing.assert_close(got[:, allowed].double(), want, rtol=1e-5, atol=2e-6)


def test_an_infinitely_unlikely_target_has_logprob_minus_infinity_and_a_finite_gradient(logprobs_of):
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    stats = logprobs_of(logits, torch.tensor([1]), entropy=True)
    assert stats.logprobs.item() == -math.inf
    (got,) = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), logits)
    assert torch.isfinite(got).all()


def test_a_row_of_nothing_but_minus_infinity_is_defined(logprobs_of):
    logits = torch.full((2, 8), -torch.inf)
    logits[1] = torch.arange(8.0)
    logits.requires_grad_()
    ids = torch.tensor([[0, 3], [0, 3]])
    stats = logprobs_of(logits, torch.tensor([3, 3]), entropy=True, gather_ids=ids)
    assert stats.logprobs[0] == -math.inf and (stats.gathered[0] == -math.inf).all() and stats.entropy[0] == 0
    got = gradient(stats, [torch.ones(2), torch.ones(2), torch.ones(2, 2)], logits)
    assert (got[0] == 0).all() and got[1].abs().sum() > 0


def test_padded_vocabulary_never_enters(logprobs_of):
    logits, targets, ids, upstream = random_case(11, 130)
    logits = torch.cat([logits, torch.full((11, 22), 50.0)], dim=1)
    logits[3, 140] = torch.nan
    leaf = logits.clone().requires_grad_()
    stats = logprobs_of(leaf, targets, valid_vocab_size=130, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids, vocab_size=130), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    got = gradient(stats, upstream, leaf)
    assert (got[:, 130:] == 0).all()
    want = expected_gradient(logits[:, :130], targets, ids, upstream)
    torch.testing.assert_close(got[:, :130].double(), want, rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match=r"id 130 .* \[0, 130\)"):
        logprobs_of(logits, torch.full((11,), 130), valid_vocab_size=130)


@pytest.mark.parametrize("vocab", [50, 1 << 17], ids=["one block", "rows in several blocks"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_ignored_rows_have_no_effect_even_with_nan(vocab, temperature, logprobs_of):
    logits, targets, ids, upstream = random_case(8, vocab)
    targets[[0, 2, 3, 4, 5]] = -100
    logits[2], logits[3], logits[4] = torch.nan, torch.inf, -torch.inf
    kept = torch.tensor([1, 6, 7])
    logits.requires_grad_()
    stats = logprobs_of(logits, targets, entropy=True, gather_ids=ids, temperature=temperature)
    ignored = targets == -100
    for name in OUTPUTS:
        assert (getattr(stats, name)[ignored] == 0).all()
    upstream = [g.clone() for g in upstream]
    for g in upstream:
        g[2] = torch.nan  # whatever arrives for an ignored row stays out as well
    outputs = [getattr(stats, name) for name in OUTPUTS]
    (got,) = torch.autograd.grad(outputs, logits, upstream)
    assert (got[ignored] == 0).all()
    alone = logits.detach()[kept].requires_grad_()
    stats = logprobs_of(alone, targets[kept], entropy=True, gather_ids=ids[kept], temperature=temperature)
    assert torch.equal(got[kept], gradient(stats, [g[kept] for g in upstream], alone))


def test_ignore_index_of_the_callers_choice(logprobs_of):
    logits, targets, _, _ = random_case(4, 10)
    targets[1] = 7
    targets[[0, 2, 3]] = 1
    stats = logprobs_of(logits, targets, ignore_index=7)
    assert stats.logprobs[1] == 0 and (stats.logprobs[[0, 2, 3]] < 0).all()


def test_rows_without_upstream_gradient_are_zeros_and_not_read(logprobs_of):
    logits, targets, _, _ = random_case(6, 40)
    z = logits.clone().requires_grad_() * 1
    stats = logprobs_of(z, targets, entropy=True)
    with torch.no_grad():
        z.data[2] = torch.nan  # behind autograd's back: proves the row is not read again
    (got,) = torch.autograd.grad((stats.logprobs * torch.tensor([1.0, 1, 0, 1, 0, 1])).sum(), z)
    assert (got[[2, 4]] == 0).all() and torch.isfinite(got).all() and (got[[0, 1, 3, 5]] != 0).any(-1).all()


@pytest.mark.change
@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(OUTPUTS, n)], ids="+".join)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck_of_every_combination_of_outputs(wanted, temperature):
    logits, targets, ids, _ = random_case(4, 6, num_ids=4, scale=1.0)  # ids: the target twice, and duplicates
    targets[3] = -100
    ids[0] = ids[0, 1]

    def outputs(x):
        stats = vocab_parallel_logprobs(x, targets, entropy=True, gather_ids=ids, temperature=temperature)
        return tuple(getattr(stats, name) for name in OUTPUTS if name in wanted)

    assert torch.autograd.gradcheck(outputs, logits.double().requires_grad_())


def test_each_rows_gradient_sums_to_zero(logprobs_of):
    logits, targets, ids, upstream = random_case(50, 3000)
    logits.requires_grad_()
    stats = logprobs_of(logits, targets, entropy=True, gather_ids=ids)
    assert gradient(stats, upstream, logits).double().sum(-1).abs().max() < 1e-5


@pytest.mark.parametrize("logprob", [-1e-3, -1e-6, -1e-8])
def test_confident_tokens_keep_absolute_precision(logprob, logprobs_of):
    vocab, two_ulps_of_one = 50, 2.0**-22  # s ≈ 1 is a rounded sum: that is fp32's floor
    rest = math.log(-math.expm1(logprob) / (vocab - 1))  # spread 1 − p evenly
    logits = torch.full((1, vocab), rest - logprob)
    logits[0, 7] = 0.0
    logits.requires_grad_()
    stats = logprobs_of(logits, torch.tensor([7]))
    assert abs(stats.logprobs.item() - logprob) <= two_ulps_of_one
    (got,) = torch.autograd.grad(stats.logprobs.sum(), logits)
    want = expected_gradient(
        logits, torch.tensor([7]), torch.tensor([[0]]), [torch.ones(1), torch.zeros(1), torch.zeros(1, 1)]
    )
    assert (got - want).abs().max() <= two_ulps_of_one


def test_bits_do_not_depend_on_the_block_or_the_batch(monkeypatch, logprobs_of):
    logits, targets, ids, upstream = random_case(40, 1001, dtype=torch.bfloat16)

    def run(rows):
        leaf = logits[rows].clone().requires_grad_()
        stats = logprobs_of(leaf, targets[rows], entropy=True, gather_ids=ids[rows])
        return [*stats, gradient(stats, [g[rows] for g in upstream], leaf)]

    whole = run(slice(None))
    for name, result in {"other rows": run(slice(10, 17)), "one row": run(slice(12, 13))}.items():
        start = 10 if name == "other rows" else 12
        for a, b in zip(whole, result, strict=True):
            assert torch.equal(a[start : start + len(b)], b), name
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 3 * 1001)
    for a, b in zip(whole, run(slice(None)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("vocab", [101, 40_001])
def test_nor_on_torchs_threads(threads, vocab):
    logits, targets, ids, upstream = random_case(11, vocab, dtype=torch.bfloat16)

    def run(rows):
        leaf = logits[rows].clone().requires_grad_()
        stats = vocab_parallel_logprobs(leaf, targets[rows], entropy=True, gather_ids=ids[rows])
        return [*stats, gradient(stats, [g[rows] for g in upstream], leaf)]

    alone, before = run(slice(None)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (slice(None), slice(2, 9), slice(3, 4)):
            for got, want in zip(run(rows), alone, strict=True):
                assert torch.equal(got, want[rows])
    finally:
        torch.set_num_threads(before)
