"""Logprobs on a GPU: the compiled Triton kernels and the torch backend against fp64; memory, streams, large offsets."""

import pytest
import torch

from rl_megatron.logprobs import vocab_parallel_logprobs
from tests.unit.logprobs.logprob_cases import OUTPUTS, expected, expected_gradient, gradient, random_case, rounding

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")


@pytest.fixture(params=["triton", "torch"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def case_on_gpu(*args, **options):
    logits, targets, ids, upstream = random_case(*args, **options)
    return logits.to(DEVICE), targets.to(DEVICE), ids.to(DEVICE), [g.to(DEVICE) for g in upstream]


def run(logits, targets, ids, upstream, **options):
    leaf = logits.clone().requires_grad_()
    stats = vocab_parallel_logprobs(leaf, targets, entropy=True, gather_ids=ids, **options)
    return [*(output.detach() for output in stats), gradient(stats, upstream, leaf)]


def check(results, logits, targets, ids, upstream, temperature=1.0, vocab_size=None):
    *outputs, got = results
    wanted = expected(logits, targets, ids, temperature, vocab_size)
    for name, output, want in zip(OUTPUTS, outputs, wanted, strict=True):
        assert ((output - want).abs() <= 2e-6 * want.abs().clamp(min=1)).all(), name
    want = expected_gradient(logits, targets, ids, upstream, temperature=temperature, vocab_size=vocab_size)
    relative, absolute = rounding(logits.dtype)
    # fp32 rounds logits / T, whose size grows with 1/T, and so does a gradient's slope in them.
    absolute += 4e-6 * (max(1.0, temperature**-2) if isinstance(temperature, float) else 1.0)
    assert ((got.double() - want).abs() <= relative * want.abs() + absolute).all()


@pytest.mark.parametrize("vocab", [1, 2, 127, 1000, 1152, 18992, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_matches_log_softmax_in_fp64(vocab, dtype, temperature, backend):
    case = case_on_gpu(37, vocab, dtype=dtype)
    check(run(*case, temperature=temperature, backend=backend), *case, temperature=temperature)


@pytest.mark.parametrize("num_ids", [1, 2, 300])
def test_many_ids_with_duplicates(num_ids, backend):
    case = case_on_gpu(20, 5000, num_ids=num_ids, dtype=torch.bfloat16)
    check(run(*case, backend=backend), *case)


@pytest.mark.parametrize("shift", [120.0, -120.0, 1e4, -1e4])
def test_a_shift_of_all_logits_changes_nothing(shift, backend):
    logits, targets, ids, upstream = case_on_gpu(20, 5000)
    shifted = logits + shift
    results = run(shifted, targets, ids, upstream, backend=backend)
    exact = shifted.double() - shift
    for output, want in zip(results, expected(exact, targets, ids), strict=False):
        torch.testing.assert_close(output.double(), want, rtol=2e-6, atol=2e-6)
    want = expected_gradient(exact, targets, ids, upstream)
    torch.testing.assert_close(results[-1].double(), want, rtol=1e-5, atol=4e-6)


def test_minus_infinity_padding_and_ignored_rows(backend):
    logits, targets, ids, upstream = case_on_gpu(12, 20_000, dtype=torch.bfloat16)
    targets, ids = targets.clamp(min=8000), ids.clamp(min=8000)
    padded = torch.nn.functional.pad(logits, (0, 480), value=torch.nan)
    padded[:6, :7000] = -torch.inf  # the kernels' first blocks
    padded[6] = -torch.inf
    padded[7], targets[7] = torch.nan, -100
    kept = [row for row in range(12) if row not in (6, 7)]
    results = run(padded, targets, ids, upstream, valid_vocab_size=20_000, backend=backend)
    assert (results[0][6] == -torch.inf) and results[1][6] == 0 and (results[0][7], results[1][7]) == (0, 0)
    assert (results[-1][[6, 7]] == 0).all() and (results[-1][:, 20_000:] == 0).all()
    assert (results[-1][:6, :7000] == 0).all()
    finite = padded[kept, :20_000].clamp(min=-1e5)  # small enough to have probability 0
    results = [result[kept][..., :20_000] if result.dim() == 2 else result[kept] for result in results]
    check(results, finite, targets[kept], ids[kept], [g[kept] for g in upstream])


def test_temperature_per_token(backend):
    case = case_on_gpu(64, 3000, dtype=torch.float16)
    temperature = torch.linspace(0.3, 2.0, 64, device=DEVICE)
    check(run(*case, temperature=temperature, backend=backend), *case, temperature=temperature)


def test_rows_that_are_not_aligned(backend):
    logits, targets, ids, upstream = case_on_gpu(16, 5001, dtype=torch.bfloat16)  # odd rows are not aligned
    wide = torch.full((16, 5120), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 3:5004] = logits
    case = (wide[:, 3:5004], targets, ids, upstream)
    check(run(*case, backend=backend), *case)


def test_the_bits_of_a_row_do_not_depend_on_other_rows(backend):
    logits, targets, ids, upstream = case_on_gpu(300, 32_000, dtype=torch.bfloat16)
    whole = run(logits, targets, ids, upstream, backend=backend)
    again = run(logits, targets, ids, upstream, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    if backend == "torch":  # torch chooses the order of its sums
        return
    for rows in (slice(100, 117), slice(299, 300)):
        part = run(logits[rows], targets[rows], ids[rows], [g[rows] for g in upstream], backend=backend)
        assert all(torch.equal(a[rows], b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("num_ids", [0, 1, 16])
def test_no_tensor_of_the_logits_size_is_allocated(num_ids):
    pytest.importorskip("triton")
    logits = torch.randn(4096, 32_000, dtype=torch.bfloat16, device=DEVICE, requires_grad=True) * 1
    targets = torch.randint(32_000, (4096,), device=DEVICE)
    ids = torch.randint(32_000, (4096, num_ids), device=DEVICE) if num_ids else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stats = vocab_parallel_logprobs(logits, targets, entropy=True, gather_ids=ids)
    total = stats.logprobs.sum() + stats.entropy.sum() + (0 if ids is None else stats.gathered.sum())
    (got,) = torch.autograd.grad(total, logits)
    assert got.data_ptr() == logits.data_ptr()
    assert torch.cuda.max_memory_allocated() - before <= 4096 * (400 + 64 * num_ids)


def test_offsets_of_more_than_31_bits(backend):
    vocab, rows = 131_072, 17_000
    if torch.cuda.mem_get_info()[0] < 4 * rows * vocab:
        pytest.skip("needs 9 GB of free memory")
    logits = torch.randn(rows, vocab, dtype=torch.bfloat16, device=DEVICE).mul_(3)
    assert logits.numel() > 2**31
    some = torch.tensor([0, 1, 16_383, 16_384, 16_999], device=DEVICE)
    kept = logits[some].clone()
    targets = torch.full((rows,), -100, device=DEVICE)
    targets[some] = torch.tensor([0, 5, 131_071, 77, 131_071], device=DEVICE)
    ids = torch.randint(vocab, (rows, 2), device=DEVICE)
    upstream = [torch.randn(shape, device=DEVICE) for shape in ((rows,), (rows,), (rows, 2))]
    buffer = logits.requires_grad_() * 1
    logits.requires_grad_(False)
    stats = vocab_parallel_logprobs(buffer, targets, entropy=True, gather_ids=ids, backend=backend)
    (got,) = torch.autograd.grad([*stats], buffer, upstream)
    results = [*(output[some].detach() for output in stats), got[some]]
    check(results, kept, targets[some], ids[some], [g[some] for g in upstream])
    assert (got[2:100] == 0).all() and (got[16_385:16_999] == 0).all()


def test_on_another_stream(backend):
    case = case_on_gpu(500, 32_000, dtype=torch.bfloat16)
    want = run(*case, backend=backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(*case, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_on_a_device_that_is_not_the_current_one(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = case_on_gpu(20, 3000)
    there = tuple([t.to("cuda:1") for t in part] if isinstance(part, list) else part.to("cuda:1") for part in case)
    for a, b in zip(run(*case, backend=backend), run(*there, backend=backend), strict=True):
        assert torch.equal(a, b.to(a.device))
