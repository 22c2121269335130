"""The kernels by themselves: each backend's functions hold what `reference.py` promises."""

import pytest
import torch

from rl_megatron.logprobs.kernels.backends import choose_kernels
from tests.unit.logprobs.logprob_cases import random_case


@pytest.fixture
def kernels(backend):
    return choose_kernels(backend, torch.device("cpu"))


@pytest.fixture
def small_blocks(backend, monkeypatch):
    """Rows of a few dozen columns take several steps."""
    if backend == "triton":
        from rl_megatron.logprobs.kernels import triton as triton_kernels

        monkeypatch.setattr(triton_kernels, "choose_block", lambda num_columns: (16, 1))


def expected_stats(logits, columns, num_columns, temperature=None, threshold=None):
    """(m, s, t, x_y) in fp64."""
    z = logits.double()[:, :num_columns]
    divisor = torch.ones(len(z)) if temperature is None else temperature
    target_x = torch.where(columns < 0, 0.0, z.gather(1, columns.clamp(min=0)[:, None])[:, 0] / divisor)
    if threshold is not None:
        z = z.masked_fill(z < threshold[:, None], -torch.inf)
    x = z / divisor.double()[:, None]
    m = x.amax(dim=1)
    shifted = x - m.masked_fill(m == -torch.inf, 0.0)[:, None]
    weights = shifted.exp()
    return torch.stack([m, weights.sum(1), (weights * shifted.clamp(min=-1e9)).sum(1), target_x], dim=1)


def expected_gradients(z, temperature, row_max, log_sum, base, entropy_grad, columns, column_grads, threshold=None):
    z = z.double() if threshold is None else z.double().masked_fill(z < threshold[:, None], -torch.inf)
    log_p = z / temperature.double()[:, None] - row_max.double()[:, None] - log_sum.double()[:, None]
    inner = log_p.exp() * (base[:, None] - entropy_grad[:, None] * log_p.clamp(min=-1e9))
    for row, (row_columns, grads) in enumerate(zip(columns.tolist(), column_grads.double(), strict=True)):
        for column, grad in zip(row_columns, grads, strict=True):
            if column >= 0:
                inner[row, column] += grad
    return inner / temperature.double()[:, None]


def check_stats(kernels, logits, columns, num_columns, temperature=None, threshold=None):
    active = torch.ones(len(logits), dtype=torch.bool)
    got = kernels.row_stats(logits, columns, num_columns, temperature, True, active, threshold)
    want = expected_stats(logits, columns, num_columns, temperature, threshold)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
    bare = kernels.row_stats(logits, columns, num_columns, temperature, False, active, threshold)
    assert torch.equal(bare[:, [0, 3]], got[:, [0, 3]]) and (bare[:, 2] == 0).all()
    torch.testing.assert_close(bare[:, 1], got[:, 1], rtol=1e-6, atol=0)
    return got


def test_the_running_maximum(kernels, small_blocks):
    rise = torch.arange(75.0).expand(4, -1) / 3
    logits = torch.stack([rise[0], -rise[1], rise[2], rise[3]])
    logits[2, :37] = -torch.inf  # two blocks and a part of the third
    logits[3, 16:] = -torch.inf  # all but the first block
    check_stats(kernels, logits, torch.tensor([74, 0, 40, 3]), 75)
    check_stats(kernels, logits, torch.tensor([7, -1, 40, 3]), 50, temperature=torch.tensor([0.5, 1, 2, 3]))


@pytest.mark.parametrize("temperature", [None, torch.tensor([0.5, 1.0, 1.7, 0.9, 1.1])], ids=["1", "per row"])
def test_a_threshold_applies_to_the_raw_logits(kernels, small_blocks, temperature):
    logits, columns, _, _ = random_case(5, 60)
    threshold = logits.sort(dim=1, descending=True).values[:, 9].clone()  # ten columns stay, the tenth itself included
    threshold[3], threshold[4] = -torch.inf, 1e9  # all stay, none stays
    stats = check_stats(kernels, logits, columns, 50, temperature, threshold)
    assert stats[4, 0] == -torch.inf and (stats[4, 1:3] == 0).all()

    row_max, log_sum = stats[:4, 0], stats[:4, 1].log()
    rows = {"base": torch.tensor([1.0, -2.0, 0.5, 3.0]), "entropy_grad": torch.tensor([0.3, -1.0, 0.0, 2.0])}
    temperatures = None if temperature is None else temperature[:4]
    targets, grads = columns[:4, None], torch.ones(4, 1)
    got = torch.full((4, 60), torch.nan)
    kernels.write_row_gradients(
        got, logits[:4], 50, temperatures, row_max, log_sum, rows["base"], rows["entropy_grad"], targets, grads,
        torch.ones(4, dtype=torch.bool), threshold[:4],
    )  # fmt: skip
    want = expected_gradients(
        logits[:4, :50], torch.ones(4) if temperatures is None else temperatures, row_max, log_sum, **rows,
        columns=targets, column_grads=grads, threshold=threshold[:4],
    )  # fmt: skip
    torch.testing.assert_close(got[:, :50].double(), want, rtol=1e-5, atol=2e-6)
    assert (got[:, 50:] == 0).all()


@pytest.mark.parametrize("num_targets", [0, 1, 2, 300])
@pytest.mark.parametrize("in_place", [False, True])
def test_any_number_of_target_columns(kernels, small_blocks, num_targets, in_place):
    logits, _, _, _ = random_case(3, 40, seed=num_targets)
    generator = torch.Generator().manual_seed(num_targets)
    columns = torch.randint(-1, 40, (3, num_targets), generator=generator)
    grads = torch.randn(3, num_targets, generator=generator)
    base, entropy_grad = torch.randn(2, 3, generator=generator)
    temperature = torch.tensor([0.5, 1.0, 1.7])
    row_max, log_sum = torch.tensor([[9.0, 8.0, 10.0], [0.1, 2.0, 0.7]])
    want = expected_gradients(logits, temperature, row_max, log_sum, base, entropy_grad, columns, grads)
    out = logits if in_place else torch.empty_like(logits)
    kernels.write_row_gradients(
        out, logits, 40, temperature, row_max, log_sum, base, entropy_grad, columns,
        grads.masked_fill(columns < 0, torch.nan), torch.ones(3, dtype=torch.bool),
    )  # fmt: skip
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=4e-6)


def test_a_shard_of_nothing_but_padding(kernels):
    logits = torch.full((3, 8), torch.nan)
    stats = kernels.row_stats(logits, torch.full((3,), -1), 0, None, True, torch.ones(3, dtype=torch.bool))
    assert stats.tolist() == [[-torch.inf, 0, 0, 0]] * 3
    row = torch.zeros(3)
    kernels.write_row_gradients(
        logits, logits, 0, None, row, row, row, row, torch.full((3, 1), -1), torch.ones(3, 1), row == 0
    )
    assert (logits == 0).all()


def test_columns_are_gathered_as_the_statistics_see_them(kernels):
    logits, columns, ids, _ = random_case(6, 30, dtype=torch.bfloat16)
    temperature = torch.linspace(0.3, 1.9, 6)
    ids[:, 1] = -1
    got = kernels.gather_columns(logits, ids, temperature)
    stats = kernels.row_stats(logits, columns, 30, temperature, False, torch.ones(6, dtype=torch.bool))
    assert torch.equal(got[:, 0], stats[:, 3]) and (got[:, 1] == 0).all()
    want = logits.double().gather(1, ids.clamp(min=0)) / temperature.double()[:, None]
    torch.testing.assert_close(got.double(), want.masked_fill(ids < 0, 0.0), rtol=2e-7, atol=0)
    best = kernels.row_stats(logits, logits.argmax(1), 30, temperature, False, torch.ones(6, dtype=torch.bool))
    assert torch.equal(best[:, 0], best[:, 3]), "the likeliest column's x is the maximum to the bit"


def test_offsets_past_31_bits(kernels):
    stride = (1 << 31) // 2 + 64
    memory = torch.empty(2 * stride + 50, dtype=torch.bfloat16)  # 4 GB that only three pages are ever touched of
    logits = memory.as_strided((3, 50), (stride, 1))
    values, columns, _, _ = random_case(3, 50, dtype=torch.bfloat16)
    logits.copy_(values)
    stats = check_stats(kernels, logits, columns, 50)
    row, active = torch.ones(3), torch.ones(3, dtype=torch.bool)
    out = torch.empty_like(values)
    arguments = (None, stats[:, 0], stats[:, 1].log(), row, row, columns[:, None], row[:, None], active)
    kernels.write_row_gradients(out, values, 50, *arguments)
    kernels.write_row_gradients(logits, logits, 50, *arguments)
    assert torch.equal(logits, out)


@pytest.mark.parametrize("kind", ["fp64", "columns apart"])
def test_what_triton_leaves_to_torch(kind):
    pytest.importorskip("triton")
    triton, torchs = (choose_kernels(name, torch.device("cuda")) for name in ("triton", "torch"))
    logits, columns, ids, _ = random_case(4, 40)
    logits = logits.double() if kind == "fp64" else logits[:, ::2]
    columns, ids, active = columns % logits.shape[1], ids % logits.shape[1], torch.ones(4, dtype=torch.bool)
    row = torch.ones(4, dtype=logits.dtype)
    results = []
    for kernels in (triton, torchs):
        out = torch.empty_like(logits)
        kernels.write_row_gradients(out, logits, logits.shape[1], row, row, row, row, row, ids, ids * 0.5, active)
        stats = kernels.row_stats(logits, columns, logits.shape[1], row, True, active)
        results.append((out, stats, kernels.gather_columns(logits, ids, row)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][1].dtype == logits.dtype


def test_ids_of_other_ranks_have_no_column(kernels):
    ids = torch.tensor([-100, 0, 6, 7, 8, 11, 12, 400])
    assert kernels.local_columns(ids, 7, 5).tolist() == [-1, -1, -1, 0, 1, 4, -1, -1]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.change)])
def test_the_statistics_of_ranks_become_those_of_all_columns(kernels, num_ranks):
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(300, 30), torch.randint(30, (300,))
    logits[0], logits[1, :10], targets[2] = -torch.inf, -torch.inf, 4
    logits[2, 4], logits[2, 5] = 90.0, 78.0  # the logprob is near 0
    ignored = torch.arange(300) % 7 == 3
    width, active = 30 // num_ranks, torch.ones(300, dtype=torch.bool)
    parts = torch.stack([
        kernels.row_stats(
            logits[:, start : start + width].contiguous(), kernels.local_columns(targets, start, width), width, None,
            True, active,
        )
        for start in range(0, 30, width)
    ])  # fmt: skip
    logprobs, entropy, row_max, log_sum, counts = kernels.merge_rows(parts, ignored, True)
    exact = logits.double().log_softmax(dim=1)
    wanted = exact.gather(1, targets[:, None])[:, 0]
    of_rows = -(exact.exp() * exact.masked_fill(exact == -torch.inf, 0.0)).sum(dim=1)
    wanted[0], of_rows[0] = -torch.inf, 0.0
    torch.testing.assert_close(logprobs.double(), wanted.masked_fill(ignored, 0.0), rtol=2e-6, atol=1.2e-7)
    torch.testing.assert_close(entropy.double(), of_rows.masked_fill(ignored, 0.0), rtol=2e-6, atol=1e-6)
    assert row_max[0] == 0 and torch.equal(row_max[1:], logits[1:].amax(dim=1))
    assert torch.equal(counts, ~ignored & (torch.arange(300) > 0)) and log_sum[0] == 0
    alone = kernels.merge_rows(parts, ignored, False)
    assert alone[1] is None and torch.equal(alone[0], logprobs) and torch.equal(alone[4], counts)


def test_rows_have_a_slope_if_they_have_a_gradient(kernels):
    grad, of_entropy, entropy = torch.tensor([[2.0, 0.0, 0.0, 3.0], [0.5, 0.25, 0.0, 1.0], [4.0, 8.0, 2.0, 1.0]])
    active = torch.tensor([True, True, True, False])
    base, touched = kernels.target_slopes(grad, of_entropy, entropy, active)
    assert base.tolist() == [-4.0, -2.0, 0.0, -4.0] and touched.tolist() == [True, True, False, False]
    base, touched = kernels.target_slopes(grad, None, None, active)
    assert base.tolist() == [-2.0, 0.0, 0.0, -3.0] and touched.tolist() == [True, False, False, False]
