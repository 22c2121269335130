"""The fused head against hidden · weightᵀ and `vocab_parallel_logprobs`: outputs, both gradients, and its memory."""

import itertools

import pytest
import torch

from rl_megatron.logprobs import linear, linear_logprobs, vocab_parallel_logprobs
from rl_megatron.logprobs.kernels import tiles
from tests.live_memory import LiveMemory

OUTPUTS = ("logprobs", "entropy", "gathered")
ROWS, HIDDEN, VOCAB = 37, 16, 101


def random_case(dtype=torch.float32, rows=ROWS, vocab=VOCAB, ignored=5):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(vocab, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(vocab - 4, (rows,), generator=generator)
    targets[::ignored] = -100
    ids = torch.randint(vocab - 4, (rows, 3), generator=generator)
    ids[:, 0] = targets.clamp(min=0)
    upstream = [torch.randn(shape, generator=generator) for shape in ((rows,), (rows,), (rows, 3))]
    return hidden.requires_grad_(), weight.requires_grad_(), targets, ids, upstream


def results(stats, inputs, upstream, wanted=OUTPUTS):
    """The outputs, and the gradients of their sum, weighed."""
    outputs = [getattr(stats, name) for name in wanted]
    weights = [g.to(outputs[0]) for name, g in zip(OUTPUTS, upstream, strict=True) if name in wanted]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights)]


def assert_alike(found, wanted, tolerance=1e-5):
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("block_tokens", [None, 1, 7, ROWS])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
@pytest.mark.parametrize("valid", [None, VOCAB - 4])
def test_equals_the_product_and_its_logprobs(backend, block_tokens, temperature, valid):
    hidden, weight, targets, ids, upstream = random_case()
    if temperature == "per token":
        temperature = torch.linspace(0.3, 2.0, ROWS)
    options = {"entropy": True, "gather_ids": ids, "temperature": temperature, "valid_vocab_size": valid}
    fused = linear_logprobs(hidden, weight, targets, block_tokens=block_tokens, backend=backend, **options)
    plain = vocab_parallel_logprobs(hidden @ weight.T, targets, **options)
    assert_alike(results(fused, (hidden, weight), upstream), results(plain, (hidden, weight), upstream))


def test_each_backend_computes_the_token_blocks(backend):
    hidden, weight, targets, ids, upstream = random_case()
    options = {"entropy": True, "gather_ids": ids, "temperature": 0.6}
    fused = linear_logprobs(hidden, weight, targets, block_tokens=7, backend=backend, **options)
    plain = vocab_parallel_logprobs(hidden @ weight.T, targets, backend="torch", **options)
    assert_alike(results(fused, (hidden, weight), upstream), results(plain, (hidden, weight), upstream))


@pytest.mark.change
@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(OUTPUTS, n)], ids="+".join)
def test_gradcheck_of_every_combination_of_outputs(wanted):
    hidden, weight, targets, ids, _ = random_case(torch.float64, rows=7, vocab=11)

    def function(hidden, weight):
        stats = linear_logprobs(hidden, weight, targets, entropy=True, gather_ids=ids, temperature=0.7, block_tokens=3)
        return tuple(getattr(stats, name) for name in wanted)

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_where_the_plain_products_round_and_dw_is_summed_in_fp32(dtype):
    hidden, weight, targets, ids, upstream = random_case(dtype, rows=600, ignored=10**6)
    options = {"entropy": True, "gather_ids": ids}
    fused = results(linear_logprobs(hidden, weight, targets, block_tokens=16, **options), (hidden, weight), upstream)
    logits = (hidden @ weight.T).detach().requires_grad_()  # rounded to 16 bits, like the logits of every token block
    plain = vocab_parallel_logprobs(logits, targets, **options)
    dz = results(plain, (logits,), upstream)[-1].double()
    assert_alike(fused[:3], [plain.logprobs, plain.entropy, plain.gathered])
    half_ulp = torch.finfo(dtype).eps / 2
    for found, want in zip(fused[3:], (dz @ weight.double(), dz.T @ hidden.double()), strict=True):
        # Rounded once: 38 sums of token blocks in 16 bits would be several units off.
        assert found.dtype == dtype
        assert ((found.double() - want).abs() <= 1.01 * half_ulp * want.abs() + 1e-4 * want.abs().max()).all()


def test_chunk_tokens_are_block_tokens():
    hidden, weight, targets = torch.randn(9, 4), torch.randn(11, 4), torch.arange(9)
    blocks = linear_logprobs(hidden, weight, targets, block_tokens=2)
    assert torch.equal(linear_logprobs(hidden, weight, targets, chunk_tokens=2).logprobs, blocks.logprobs)
    with pytest.raises(ValueError, match="block_tokens=0 must be at least 1"):
        linear_logprobs(hidden, weight, targets, chunk_tokens=0)
    with pytest.raises(ValueError, match="block_tokens=3 and chunk_tokens=2 differ; give only one"):
        linear_logprobs(hidden, weight, targets, block_tokens=3, chunk_tokens=2)


@pytest.mark.parametrize("block_tokens", [4, None])
def test_ignored_rows_take_part_in_nothing_even_with_nan(block_tokens):
    hidden, weight, targets, ids, upstream = random_case()
    with torch.no_grad():
        hidden[::5] = torch.nan
    stats = linear_logprobs(hidden, weight, targets, entropy=True, gather_ids=ids, block_tokens=block_tokens)
    *outputs, hidden_grad, weight_grad = results(stats, (hidden, weight), upstream)
    assert all((output[::5] == 0).all() for output in outputs) and (hidden_grad[::5] == 0).all()
    rest = targets != -100
    kept = hidden[rest].detach().requires_grad_()
    alone = linear_logprobs(kept, weight, targets[rest], entropy=True, gather_ids=ids[rest], block_tokens=block_tokens)
    wanted = results(alone, (kept, weight), [g[rest] for g in upstream])
    assert_alike([*(output[rest] for output in outputs), hidden_grad[rest], weight_grad], wanted)


@pytest.mark.parametrize("rows", [0, 6])
def test_no_row_that_counts(rows):
    hidden = torch.randn(rows, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    stats = linear_logprobs(hidden, weight, torch.full((rows,), -100), entropy=True)
    assert (stats.logprobs == 0).all() and stats.entropy.shape == (rows,)
    gradients = torch.autograd.grad(stats.logprobs.sum(), (hidden, weight))
    assert all((gradient == 0).all() for gradient in gradients)


def test_leading_shapes():
    hidden, weight, targets, ids, upstream = random_case(rows=24)
    flat = results(linear_logprobs(hidden, weight, targets, entropy=True, gather_ids=ids), (hidden, weight), upstream)
    shaped = linear_logprobs(
        hidden.view(4, 6, HIDDEN), weight, targets.view(4, 6), entropy=True, gather_ids=ids.view(4, 6, 3)
    )
    assert shaped.gathered.shape == (4, 6, 3)
    found = results(shaped, (hidden, weight), [g.view(4, 6, *g.shape[1:]) for g in upstream])
    assert all(torch.equal(got.flatten(), want.flatten()) for got, want in zip(found, flat, strict=True))


def test_what_wants_no_gradient_gets_none():
    hidden, weight, targets, _, _ = random_case()
    plain = torch.autograd.grad(linear_logprobs(hidden, weight, targets).logprobs.sum(), (hidden, weight))
    (of_hidden,) = torch.autograd.grad(linear_logprobs(hidden, weight.detach(), targets).logprobs.sum(), hidden)
    (of_weight,) = torch.autograd.grad(linear_logprobs(hidden.detach(), weight, targets).logprobs.sum(), weight)
    assert torch.equal(of_hidden, plain[0]) and torch.equal(of_weight, plain[1])


def test_a_second_backward_gives_the_first_ones_gradient():
    hidden, weight, targets, _, _ = random_case()
    loss = linear_logprobs(hidden, weight, targets, block_tokens=8).logprobs.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("is_the_embedding_too", [False, True])
def test_dw_goes_to_main_grad_the_way_megatrons_ddp_wants_it(is_the_embedding_too):
    hidden, weight, targets, _, _ = random_case(torch.bfloat16)
    want = torch.autograd.grad(linear_logprobs(hidden, weight, targets, block_tokens=8).logprobs.sum(), weight)[0]
    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = is_the_embedding_too
    linear_logprobs(hidden, weight, targets, block_tokens=8).logprobs.sum().backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None and (not is_the_embedding_too or (weight.grad == 0).all())
    torch.testing.assert_close(weight.main_grad - 1, want.float(), rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("most_counted", [36, 30])
def test_a_known_number_of_counted_rows_changes_no_result(most_counted):
    hidden, weight, targets, ids, upstream = random_case()
    targets = targets.index_fill(0, torch.arange(6), -100)
    options = {"gather_ids": ids, "entropy": True, "block_tokens": 7}
    wanted = results(linear_logprobs(hidden, weight, targets, **options), (hidden, weight), upstream)
    found = linear_logprobs(hidden, weight, targets, most_counted=most_counted, **options)
    for one, other in zip(results(found, (hidden, weight), upstream), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_more_counted_rows_than_were_announced_are_refused():
    hidden, weight, targets, _, _ = random_case()
    with pytest.raises(ValueError, match="most_counted=3 is too small: .* rows count on the ranks"):
        linear_logprobs(hidden, weight, targets, most_counted=3)


class TestMemory:
    @staticmethod
    def peak(monkeypatch, rows, vocab, ignored=10**6):
        """Beyond dh and dW, which are as large as what they are the gradients of."""
        monkeypatch.setattr(linear, "BLOCK_ELEMENTS_CPU", 1 << 14)
        monkeypatch.setattr(linear, "WIDENED_ELEMENTS_CPU", 1 << 12)
        monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 1 << 13)
        hidden, weight, targets, _, _ = random_case(rows=rows, vocab=vocab, ignored=ignored)
        with LiveMemory(hidden, weight, targets) as memory:
            stats = linear_logprobs(hidden, weight, targets, entropy=True)
            torch.autograd.grad([stats.logprobs, stats.entropy], (hidden, weight), [torch.ones(rows)] * 2)
        return memory.peak - 4 * HIDDEN * (rows + vocab)

    @pytest.mark.change
    @pytest.mark.parametrize("ignored", [3, 10**6])
    def test_it_does_not_grow_with_the_vocabulary(self, monkeypatch, ignored):
        peaks = [self.peak(monkeypatch, 256, vocab, ignored) for vocab in (512, 1024, 2048, 4096)]
        assert max(peaks) <= 1.1 * min(peaks)

    @pytest.mark.change
    def test_with_every_token_it_grows_by_no_more_than_80_bytes(self, monkeypatch):
        few, many = (self.peak(monkeypatch, rows, 1024) for rows in (256, 2048))
        assert many - few <= 80 * (2048 - 256)


class TestBadArgumentsAreNamed:
    def test_shapes(self):
        hidden, weight, targets, _, _ = random_case()
        with pytest.raises(ValueError, match=r"hidden \(37, 16\).*weight \(101, 15\)"):
            linear_logprobs(hidden, weight[:, 1:], targets)
        with pytest.raises(ValueError, match=r"targets \(36,\), hidden \(37, 16\)"):
            linear_logprobs(hidden, weight, targets[1:])
        with pytest.raises(ValueError, match=r"gather_ids \(36, 3\)"):
            linear_logprobs(hidden, weight, targets, gather_ids=torch.zeros(36, 3, dtype=torch.long))

    def test_dtypes(self):
        hidden, weight, targets, _, _ = random_case()
        with pytest.raises(ValueError, match=r"torch.float32, weight .* torch.bfloat16"):
            linear_logprobs(hidden, weight.bfloat16(), targets)

    def test_a_target_outside_the_vocabulary(self):
        hidden, weight, targets, _, _ = random_case()
        targets[3] = VOCAB
        with pytest.raises(ValueError, match=rf"id {VOCAB} "):
            linear_logprobs(hidden, weight, targets)

    @pytest.mark.parametrize("block_tokens", [0, -1])
    def test_block_tokens(self, block_tokens):
        hidden, weight, targets, _, _ = random_case()
        with pytest.raises(ValueError, match=f"block_tokens={block_tokens}"):
            linear_logprobs(hidden, weight, targets, block_tokens=block_tokens)
