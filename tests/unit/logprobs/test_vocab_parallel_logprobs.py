"""One process: every statistic and gradient against torch's log_softmax in fp64, and the traps of other kernels."""

import itertools
import math
import re

import pytest
import torch

from rl_megatron.logprobs import reference, vocab_parallel_logprobs

OUTPUTS = ("logprobs", "entropy", "gathered")


def expected(logits, targets, gather_ids, temperature=1.0, vocab_size=None):
    """Straight from the definitions in fp64; logits of −inf have probability 0 and add 0 to the entropy."""
    temperature = torch.as_tensor(temperature, dtype=torch.float64)
    x = logits.double()[..., :vocab_size] / (temperature[..., None] if temperature.dim() else temperature)
    log_p = x.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p.masked_fill(p == 0, 0.0), 0.0).sum(-1)
    return log_p.gather(-1, targets[..., None])[..., 0], entropy, log_p.gather(-1, gather_ids)


def random_case(rows, vocab, num_ids=5, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    gather_ids = torch.randint(vocab, (rows, num_ids), generator=generator)
    gather_ids[:, 0] = targets  # the target among the ids, and twice over where num_ids allows
    gather_ids[:, -1] = targets
    upstream = [torch.randn(shape, generator=generator) for shape in ((rows,), (rows,), (rows, num_ids))]
    return logits, targets, gather_ids, upstream


def gradient(stats, upstream, logits, wanted=OUTPUTS):
    total = sum((getattr(stats, name) * g).sum() for name, g in zip(OUTPUTS, upstream, strict=True) if name in wanted)
    return torch.autograd.grad(total, logits)[0]


def expected_gradient(logits, targets, gather_ids, upstream, **options):
    exact = logits.detach().double().requires_grad_()
    outputs = expected(exact, targets, gather_ids, **options)
    total = sum((out * g.double()).sum() for out, g in zip(outputs, upstream, strict=True))
    return torch.autograd.grad(total, exact)[0]


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 1152, 18992])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_matches_log_softmax_in_fp64(vocab, dtype, temperature):
    logits, targets, ids, upstream = random_case(37, vocab, dtype=dtype)
    leaf = logits.clone().requires_grad_()
    stats = vocab_parallel_logprobs(leaf, targets, temperature=temperature, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids, temperature), strict=True):
        got = getattr(stats, name)
        assert got.dtype == torch.float32
        assert ((got - want).abs() <= 2e-6 * want.abs().clamp(min=1)).all(), name
    got = gradient(stats, upstream, leaf)
    want = expected_gradient(logits, targets, ids, upstream, temperature=temperature)
    # Rounded once, so at most half a unit in the last place of the logits' dtype, and fp32's own error.
    half_ulp = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    smallest = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}[dtype]
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= half_ulp * want.abs() + 4e-6 + smallest).all()


def test_temperature_per_token():
    logits, targets, ids, upstream = random_case(64, 300, dtype=torch.bfloat16)
    temperature = torch.linspace(0.3, 2.0, 64)
    leaf = logits.clone().requires_grad_()
    stats = vocab_parallel_logprobs(leaf, targets, temperature=temperature, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids, temperature), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    want = expected_gradient(logits, targets, ids, upstream, temperature=temperature)
    torch.testing.assert_close(gradient(stats, upstream, leaf).double(), want, rtol=2.0**-8, atol=4e-6)


@pytest.mark.parametrize("shift", [30.0, -30.0, 120.0, -120.0, 1e4, -1e4])
def test_a_shift_of_all_logits_changes_nothing(shift):
    logits, targets, ids, upstream = random_case(20, 500)
    shifted = (logits + shift).requires_grad_()  # rounds: compare with the shifted logits taken back exactly
    exact = shifted.detach().double() - shift
    stats = vocab_parallel_logprobs(shifted, targets, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(exact, targets, ids), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    want = expected_gradient(exact, targets, ids, upstream)
    torch.testing.assert_close(gradient(stats, upstream, shifted).double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("blocked", [slice(0, 1), slice(0, 400), slice(700, 1000), slice(0, 1000, 2)], ids=str)
def test_infinitely_unlikely_columns(blocked):
    logits, _, ids, upstream = random_case(9, 1000)
    logits[:, blocked] = -torch.inf
    allowed = torch.arange(1000)[torch.isfinite(logits[0])]
    targets = allowed[torch.arange(9) * 7]
    ids = allowed[ids % len(allowed)]
    leaf = logits.clone().requires_grad_()
    stats = vocab_parallel_logprobs(leaf, targets, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    got = gradient(stats, upstream, leaf)
    assert (got[:, blocked] == 0).all()
    # log_softmax's own backward is NaN-free only on the finite columns: derive it there.
    allowed_position = {int(column): position for position, column in enumerate(allowed)}
    narrow = [torch.tensor([[allowed_position[int(i)] for i in row] for row in x]) for x in (targets[:, None], ids)]
    want = expected_gradient(logits[:, allowed], narrow[0][:, 0], narrow[1], upstream)
    torch.testing.assert_close(got[:, allowed].double(), want, rtol=1e-5, atol=2e-6)


def test_an_infinitely_unlikely_target_has_logprob_minus_infinity_and_a_finite_gradient():
    logits = torch.tensor([[0.5, -torch.inf, 1.0]], requires_grad=True)
    stats = vocab_parallel_logprobs(logits, torch.tensor([1]), entropy=True)
    assert stats.logprobs.item() == -math.inf
    (got,) = torch.autograd.grad(stats.logprobs.sum() + stats.entropy.sum(), logits)
    assert torch.isfinite(got).all()


def test_a_row_of_nothing_but_minus_infinity_is_defined():
    logits = torch.full((2, 8), -torch.inf)
    logits[1] = torch.arange(8.0)
    logits.requires_grad_()
    ids = torch.tensor([[0, 3], [0, 3]])
    stats = vocab_parallel_logprobs(logits, torch.tensor([3, 3]), entropy=True, gather_ids=ids)
    assert stats.logprobs[0] == -math.inf and (stats.gathered[0] == -math.inf).all() and stats.entropy[0] == 0
    got = gradient(stats, [torch.ones(2), torch.ones(2), torch.ones(2, 2)], logits)
    assert (got[0] == 0).all() and got[1].abs().sum() > 0


def test_padded_vocabulary_never_enters():
    logits, targets, ids, upstream = random_case(11, 130)
    logits = torch.cat([logits, torch.full((11, 22), 50.0)], dim=1)
    logits[3, 140] = torch.nan
    leaf = logits.clone().requires_grad_()
    stats = vocab_parallel_logprobs(leaf, targets, valid_vocab_size=130, entropy=True, gather_ids=ids)
    for name, want in zip(OUTPUTS, expected(logits, targets, ids, vocab_size=130), strict=True):
        torch.testing.assert_close(getattr(stats, name).double(), want, rtol=2e-6, atol=2e-6)
    got = gradient(stats, upstream, leaf)
    assert (got[:, 130:] == 0).all()
    want = expected_gradient(logits[:, :130], targets, ids, upstream)
    torch.testing.assert_close(got[:, :130].double(), want, rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match=r"id 130 .* \[0, 130\)"):
        vocab_parallel_logprobs(logits, torch.full((11,), 130), valid_vocab_size=130)


@pytest.mark.parametrize("vocab", [50, 1 << 17], ids=["one block", "rows in several blocks"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_ignored_rows_have_no_effect_even_with_nan(vocab, temperature):
    logits, targets, ids, upstream = random_case(8, vocab)
    targets[[0, 2, 3, 4, 5]] = -100
    logits[2], logits[3], logits[4] = torch.nan, torch.inf, -torch.inf
    kept = torch.tensor([1, 6, 7])
    logits.requires_grad_()
    stats = vocab_parallel_logprobs(logits, targets, entropy=True, gather_ids=ids, temperature=temperature)
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
    stats = vocab_parallel_logprobs(alone, targets[kept], entropy=True, gather_ids=ids[kept], temperature=temperature)
    assert torch.equal(got[kept], gradient(stats, [g[kept] for g in upstream], alone))


def test_ignore_index_of_the_callers_choice():
    logits, targets, _, _ = random_case(4, 10)
    targets[1] = 7
    targets[[0, 2, 3]] = 1
    stats = vocab_parallel_logprobs(logits, targets, ignore_index=7)
    assert stats.logprobs[1] == 0 and (stats.logprobs[[0, 2, 3]] < 0).all()


def test_rows_without_upstream_gradient_are_zeros_and_not_read():
    logits, targets, _, _ = random_case(6, 40)
    z = logits.clone().requires_grad_() * 1
    stats = vocab_parallel_logprobs(z, targets, entropy=True)
    with torch.no_grad():
        z.data[2] = torch.nan  # behind autograd's back: proves the row is not read again
    (got,) = torch.autograd.grad((stats.logprobs * torch.tensor([1.0, 1, 0, 1, 0, 1])).sum(), z)
    assert (got[[2, 4]] == 0).all() and torch.isfinite(got).all() and (got[[0, 1, 3, 5]] != 0).any(-1).all()


@pytest.mark.parametrize("wanted", [set(s) for n in (1, 2, 3) for s in itertools.combinations(OUTPUTS, n)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck_of_every_combination_of_outputs(wanted, temperature):
    logits, targets, ids, _ = random_case(4, 6, num_ids=4, scale=1.0)  # ids: the target twice, and duplicates
    targets[3] = -100
    ids[0] = ids[0, 1]

    def outputs(x):
        stats = vocab_parallel_logprobs(x, targets, entropy=True, gather_ids=ids, temperature=temperature)
        return tuple(getattr(stats, name) for name in OUTPUTS if name in wanted)

    assert torch.autograd.gradcheck(outputs, logits.double().requires_grad_())


def test_each_rows_gradient_sums_to_zero():
    logits, targets, ids, upstream = random_case(50, 3000)
    logits.requires_grad_()
    stats = vocab_parallel_logprobs(logits, targets, entropy=True, gather_ids=ids)
    assert gradient(stats, upstream, logits).double().sum(-1).abs().max() < 1e-5


@pytest.mark.parametrize("logprob", [-1e-3, -1e-6, -1e-8])
def test_confident_tokens_keep_absolute_precision(logprob):
    vocab, two_ulps_of_one = 50, 2.0**-22  # s ≈ 1 is a rounded sum: that is fp32's floor
    rest = math.log(-math.expm1(logprob) / (vocab - 1))  # spread 1 − p evenly
    logits = torch.full((1, vocab), rest - logprob)
    logits[0, 7] = 0.0
    logits.requires_grad_()
    stats = vocab_parallel_logprobs(logits, torch.tensor([7]))
    assert abs(stats.logprobs.item() - logprob) <= two_ulps_of_one
    (got,) = torch.autograd.grad(stats.logprobs.sum(), logits)
    want = expected_gradient(
        logits, torch.tensor([7]), torch.tensor([[0]]), [torch.ones(1), torch.zeros(1), torch.zeros(1, 1)]
    )
    assert (got - want).abs().max() <= two_ulps_of_one


def test_bits_do_not_depend_on_the_block_or_the_batch(monkeypatch):
    logits, targets, ids, upstream = random_case(40, 1001, dtype=torch.bfloat16)

    def run(rows):
        leaf = logits[rows].clone().requires_grad_()
        stats = vocab_parallel_logprobs(leaf, targets[rows], entropy=True, gather_ids=ids[rows])
        return [*stats, gradient(stats, [g[rows] for g in upstream], leaf)]

    whole = run(slice(None))
    for name, result in {"other rows": run(slice(10, 17)), "one row": run(slice(12, 13))}.items():
        start = 10 if name == "other rows" else 12
        for a, b in zip(whole, result, strict=True):
            assert torch.equal(a[start : start + len(b)], b), name
    monkeypatch.setattr(reference, "TILE_ELEMENTS_CPU", 3 * 1001)
    for a, b in zip(whole, run(slice(None)), strict=True):
        assert torch.equal(a, b)


def test_leading_shapes_and_permuted_layouts_share_the_logits_memory():
    logits, targets, ids, upstream = random_case(12, 33)
    want_stats = expected(logits, targets, ids)
    want = expected_gradient(logits, targets, ids, upstream)
    base = logits.clone().requires_grad_()
    sequence_first = (base * 1).view(3, 4, 33).transpose(0, 1).contiguous()  # [S=4, B=3, V]
    batch_first = sequence_first.transpose(0, 1)  # [B, S, V] without a copy
    stats = vocab_parallel_logprobs(batch_first, targets.view(3, 4), entropy=True, gather_ids=ids.view(3, 4, 5))
    for got, expect in zip(stats, want_stats, strict=True):
        torch.testing.assert_close(got.double(), expect.view(got.shape), rtol=2e-6, atol=2e-6)
    got = gradient(stats, [g.view(3, 4, *g.shape[1:]) for g in upstream], base)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)
    assert not torch.equal(sequence_first.transpose(0, 1).reshape(12, 33), logits)  # overwritten: no copy was made


def test_a_sliced_view_of_a_leaf_is_right_and_leaves_the_leaf_alone():
    logits, targets, ids, upstream = random_case(12, 33)
    leaf = logits.view(3, 4, 33).clone().requires_grad_()
    stats = vocab_parallel_logprobs(leaf[:, :-1], targets.view(3, 4)[:, :-1])
    (got,) = torch.autograd.grad(stats.logprobs.sum(), leaf)
    exact = logits.double().view(3, 4, 33).requires_grad_()
    log_p = exact[:, :-1].log_softmax(-1).gather(-1, targets.view(3, 4, 1)[:, :-1])
    torch.testing.assert_close(got.double(), torch.autograd.grad(log_p.sum(), exact)[0], rtol=1e-5, atol=2e-6)
    assert torch.equal(leaf, logits.view(3, 4, 33))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows_at_all(shape):
    leaf = torch.randn(*shape, 9, requires_grad=True)
    ids = torch.zeros(*shape, 2, dtype=torch.long)
    stats = vocab_parallel_logprobs(leaf, torch.zeros(shape, dtype=torch.long), entropy=True, gather_ids=ids)
    assert stats.logprobs.shape == shape and stats.gathered.shape == (*shape, 2)
    stats.logprobs.sum().backward()
    assert leaf.grad.shape == leaf.shape


def test_a_single_token():
    logits = torch.randn(9, requires_grad=True)
    stats = vocab_parallel_logprobs(logits, torch.tensor(3), entropy=True, gather_ids=torch.tensor([1, 2]))
    assert stats.logprobs.shape == stats.entropy.shape == () and stats.gathered.shape == (2,)
    torch.testing.assert_close(stats.logprobs, logits.log_softmax(-1)[3])
    torch.testing.assert_close(torch.autograd.grad(stats.logprobs, logits)[0].sum(), torch.zeros(()), atol=1e-6, rtol=0)


class TestTheBufferBecomesTheGradient:
    def make(self):
        logits, targets, ids, upstream = random_case(5, 20)
        leaf = logits.clone().requires_grad_()
        return leaf, leaf * 1, targets

    def test_in_place_gives_the_bits_of_out_of_place(self):
        leaf, z, targets = self.make()
        (from_leaf,) = torch.autograd.grad(vocab_parallel_logprobs(leaf, targets).logprobs.sum(), leaf)
        address = z.data_ptr()
        (in_place,) = torch.autograd.grad(vocab_parallel_logprobs(z, targets).logprobs.sum(), z)
        assert in_place.data_ptr() == address and torch.equal(in_place, from_leaf)

    def test_a_leaf_keeps_its_values(self):
        leaf, _, targets = self.make()
        before = leaf.detach().clone()
        vocab_parallel_logprobs(leaf, targets).logprobs.sum().backward()
        assert torch.equal(leaf, before)
        view = leaf.view(1, 5, 20)
        vocab_parallel_logprobs(view, targets[None]).logprobs.sum().backward()
        assert torch.equal(leaf, before)

    def test_no_grad_leaves_the_logits_intact(self):
        _, z, targets = self.make()
        before = z.detach().clone()
        with torch.no_grad():
            stats = vocab_parallel_logprobs(z, targets, entropy=True)
        assert torch.equal(z, before) and not stats.logprobs.requires_grad

    def test_second_backward_raises(self):
        _, z, targets = self.make()
        loss = vocab_parallel_logprobs(z, targets).logprobs.sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward"):
            loss.backward()

    def test_logits_changed_before_backward_raise(self):
        _, z, targets = self.make()
        loss = vocab_parallel_logprobs(z, targets).logprobs.sum()
        with torch.no_grad():
            z.mul_(2)
        with pytest.raises(RuntimeError, match="modified before its backward"):
            loss.backward()

    def test_two_calls_on_one_buffer_raise_rather_than_corrupt(self):
        _, z, targets = self.make()
        loss = vocab_parallel_logprobs(z, targets).logprobs.sum() + vocab_parallel_logprobs(z, targets).logprobs.sum()
        with pytest.raises(RuntimeError, match="second consumer"):
            loss.backward()

    def test_another_consumer_that_saved_the_logits_raises_rather_than_reads_gradients(self):
        _, z, targets = self.make()
        first = (z * z).sum()  # runs its backward after ours: autograd goes from the last node to the first
        loss = first + vocab_parallel_logprobs(z, targets).logprobs.sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_under_activation_checkpointing(self):
        leaf, _, targets = self.make()
        loss = torch.utils.checkpoint.checkpoint(
            lambda x: vocab_parallel_logprobs(x * 1, targets).logprobs.sum(), leaf, use_reentrant=False
        )
        (got,) = torch.autograd.grad(loss, leaf)
        (want,) = torch.autograd.grad(vocab_parallel_logprobs(leaf, targets).logprobs.sum(), leaf)
        assert torch.equal(got, want)


class TestBadArgumentsAreNamed:
    logits = torch.zeros(4, 10)
    targets = torch.zeros(4, dtype=torch.long)

    @pytest.mark.parametrize("bad", [10, -1, -99, 1 << 40])
    def test_target_outside_the_vocabulary(self, bad):
        targets = self.targets.clone()
        targets[2] = bad
        with pytest.raises(ValueError, match=rf"id {bad} .* \[0, 10\)"):
            vocab_parallel_logprobs(self.logits, targets)

    def test_gather_id_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match="id 11 "):
            vocab_parallel_logprobs(self.logits, self.targets, gather_ids=torch.full((4, 2), 11))

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"targets \(3,\), logits \(4, 10\)"):
            vocab_parallel_logprobs(self.logits, self.targets[:3])
        with pytest.raises(ValueError, match=r"gather_ids \(3, 2\), targets \(4,\)"):
            vocab_parallel_logprobs(self.logits, self.targets, gather_ids=torch.zeros(3, 2, dtype=torch.long))

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0, 1.0, 1.0])], ids=str)
    def test_temperature(self, bad):
        with pytest.raises(ValueError, match="temperature"):
            vocab_parallel_logprobs(self.logits, self.targets, temperature=bad)

    @pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 4, 1)], ids=str)
    def test_temperature_of_another_shape(self, shape):
        with pytest.raises(ValueError, match=re.escape(f"temperature {shape} must be a number or broadcast to")):
            vocab_parallel_logprobs(self.logits, self.targets, temperature=torch.ones(shape))

    def test_temperature_that_wants_a_gradient(self):
        with pytest.raises(ValueError, match="gradient"):
            vocab_parallel_logprobs(self.logits, self.targets, temperature=torch.ones(4, requires_grad=True))

    def test_vocab_range(self):
        with pytest.raises(ValueError, match="spans 11 ids"):
            vocab_parallel_logprobs(self.logits, self.targets, vocab_range=(0, 11))
        with pytest.raises(ValueError, match="below 5"):
            vocab_parallel_logprobs(self.logits, self.targets, vocab_range=(5, 15))

    def test_backend(self):
        with pytest.raises(ValueError, match="backend='cuda'.*torch"):
            vocab_parallel_logprobs(self.logits, self.targets, backend="cuda")
