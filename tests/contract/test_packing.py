"""For random batches, every loss on the pack is the loss on padded rows; and it is the sum over its sequences."""

import math
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.logprobs import Sharding
from rl_megatron.losses import (
    LOSSES,
    LossFunction,
    LossInputType,
    LossType,
    NLLLoss,
    SequencePackingLossWrapper,
    build_loss,
)
from tests import shape_checks
from tests.contract.loss_cases import VOCAB
from tests.contract.packing import PACKABLE, Shape, random_batch
from tests.contract.test_losses import combine, valid_counts

every_packable_case = pytest.mark.parametrize("case", PACKABLE, ids=str)
CASES_OF = {name: [case for case in PACKABLE if case.name == name] for name in LOSSES}
NUM_BATCHES = {True: 1000, False: 40}  # nightly, and otherwise
# Largest difference of the loss and its metrics, and of the gradient, relative to their size where that exceeds 1.
TOLERANCES = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 1e-5)}

SHAPES = st.builds(
    Shape.around,
    lengths=st.integers(2, 6).flatmap(lambda rows: st.lists(st.integers(0, 10), min_size=rows, max_size=rows)),
    wider=st.integers(0, 2),
    multiple=st.sampled_from([1, 2, 3, 4, 8]),
    slack=st.integers(0, 3),
)


def drawn(case, shape, seed, dtype):
    """(loss, shape in whole units of it, batch, output, counts)."""
    loss = build_loss(case.name, case.cfg)
    shape = shape.in_units_of(loss.group_size)
    batch, output = random_batch(case, shape, torch.Generator().manual_seed(seed))
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return loss, shape, batch, output.to(dtype), valid_counts(batch)


def padded_rows(loss, batch, output, counts):
    """(value, metrics, gradient [B, S, …])."""
    output = output.clone().requires_grad_()
    value, metrics = loss(output, batch, *counts)
    return value.item(), metrics, torch.autograd.grad(value, output)[0]


def packed_row(case, loss, shape, batch, output, counts):
    """The same from the pack, whose gaps are NaN; the gradient unpacked, and found to be 0 in the gaps."""
    packed = shape.pack(output, math.nan).requires_grad_()
    batch = batch | {key: shape.pack(batch[key], math.nan) for key in case.outputs_in_batch}
    value, metrics = SequencePackingLossWrapper(loss, *shape.cu_seqlens)(packed, batch, *counts)
    (gradient,) = torch.autograd.grad(value, packed)
    unpacked = shape.unpack(gradient)
    assert gradient.count_nonzero() == unpacked.count_nonzero()
    return value.item(), metrics, unpacked


def one_at_a_time(loss, shape, batch, output, counts):
    """The definition: each sequence (or pair) alone, cut to its length, and the parts combined."""
    output, parts = output.clone().requires_grad_(), []
    for first in range(0, len(shape.lengths), loss.group_size):
        rows = slice(first, first + loss.group_size)
        length = max(1, *shape.lengths[rows])
        data = {key: x[rows] if x.dim() == 1 else x[rows, :length] for key, x in batch.items()}
        streams = loss.read_output(output[rows, :length], data, Sharding())
        parts.append(loss.evaluate(data, *counts, **streams))
    value = sum(part[0] for part in parts)
    metrics = combine(loss.metric_reductions, [part[1] for part in parts])
    return value.item(), metrics, torch.autograd.grad(value, output)[0]


def assert_close(got, want, dtype, where):
    def difference(a, b):
        return 0.0 if a == b else abs(a - b) / max(1.0, abs(b))

    of_value, of_gradient = TOLERANCES[dtype]
    assert got[1].keys() == want[1].keys()
    for name, a, b in [("value", got[0], want[0]), *((name, got[1][name], want[1][name]) for name in want[1])]:
        assert difference(a, b) <= of_value, (*where, dtype, name, a, b)
    scale = max(1.0, want[2].abs().max().item())
    assert (got[2] - want[2]).abs().max().item() / scale <= of_gradient, (*where, dtype)


@pytest.mark.change
def test_packed_equals_unpacked(is_nightly):
    """Each batch is drawn for every loss, in one of its configurations, and tried in fp64 and in fp32."""
    num_batches, batches, tried = NUM_BATCHES[is_nightly], set(), set()

    def compare(case, shape, seed):
        for dtype in TOLERANCES:
            loss, whole, batch, output, counts = drawn(case, shape, seed, dtype)
            packed = packed_row(case, loss, whole, batch, output, counts)
            assert_close(packed, padded_rows(loss, batch, output, counts), dtype, (str(case), shape, seed))
        tried.add(str(case))

    @settings(max_examples=num_batches + 20, deadline=None, derandomize=True, database=None)
    @given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
    def holds(shape, seed):
        seed = zlib.crc32(repr((shape, seed)).encode())  # hypothesis likes small numbers, over and over
        for cases in CASES_OF.values():
            compare(cases[seed % len(cases)], shape, seed)
        batches.add(seed)

    with shape_checks.paused():  # thousands of calls, whose shapes the other tests of losses compare
        holds()
        for case in PACKABLE:
            if str(case) not in tried:  # a loss may have nearly as many configurations as there are batches
                compare(case, Shape((1, 8, 0, 3, 9, 4), 11, 4, 3), seed=0)
    assert len(batches) >= num_batches and len(tried) == len(PACKABLE)


@pytest.mark.change
@every_packable_case
def test_the_pack_is_the_sum_over_its_sequences(case):
    shapes = [
        Shape((7, 2, 10, 5), 10),
        Shape((1, 8, 0, 3, 9, 4), 11, 4, 3),
        Shape((0, 6), 6, 3),
        Shape((1, 1), 2, 2, 1),
    ]
    moved = False
    for seed, shape in enumerate(shapes):
        loss, shape, batch, output, counts = drawn(case, shape, seed, torch.float64)
        packed = packed_row(case, loss, shape, batch, output, counts)
        assert_close(packed, one_at_a_time(loss, shape, batch, output, counts), torch.float64, (str(case), seed))
        moved |= packed[0] != 0 and packed[2].abs().max().item() > 1e-4
    assert moved, "nothing to compare"


@every_packable_case
def test_it_is_a_loss_function_like_the_one_it_wraps(case):
    loss = build_loss(case.name, case.cfg)
    wrapper = SequencePackingLossWrapper(loss, torch.tensor([0, 2]))
    assert isinstance(wrapper, LossFunction)
    for name in ("loss_type", "input_type", "metric_reductions", "group_size"):
        assert getattr(wrapper, name) == getattr(loss, name)


class TestCalling:
    shape = Shape((5, 3), 6, 4)

    def make(self):
        generator = torch.Generator().manual_seed(0)
        nll = next(case for case in PACKABLE if case.name == "nll")
        batch, output = random_batch(nll, self.shape, generator, VOCAB + 1)
        return batch, self.shape.pack(output, math.nan), valid_counts(batch)

    def test_seed_forms_agree(self):
        batch, packed, counts = self.make()
        wrapper = SequencePackingLossWrapper(NLLLoss(), *self.shape.cu_seqlens)
        named = dict(zip(("global_valid_seqs", "global_valid_toks"), counts, strict=True))
        value, metrics = wrapper(packed, batch, *counts, None, None, None, valid_vocab_size=VOCAB)
        again = wrapper(next_token_logits=packed, data=batch, **named, valid_vocab_size=VOCAB)
        assert value == again[0] and metrics == again[1] and value != wrapper(packed, batch, *counts)[0]

    def test_keywords_reach_the_loss(self):
        batch, packed, counts = self.make()
        value, _ = SequencePackingLossWrapper(NLLLoss(), *self.shape.cu_seqlens)(packed, batch, *counts, dpo_loss=True)
        assert value.shape == (2,)

    def test_without_padding_the_boundaries_are_the_starts(self):
        batch, _, counts = self.make()
        shape = Shape((5, 3), 6)
        output = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(1))
        wrapper = SequencePackingLossWrapper(NLLLoss(), shape.cu_seqlens[0])
        torch.testing.assert_close(
            wrapper(shape.pack(output, 0.0), batch, *counts)[0], NLLLoss()(output, batch, *counts)[0]
        )

    def test_temperature_per_row_and_per_token(self):
        batch, packed, counts = self.make()
        output = self.shape.unpack(packed)
        for temperature in (0.5, torch.tensor([0.5, 2.0]), torch.rand(2, 6) + 0.5):
            hot = batch | {"temperature": temperature}
            wrapper = SequencePackingLossWrapper(NLLLoss(), *self.shape.cu_seqlens)
            assert wrapper(packed, hot, *counts)[0] == NLLLoss()(output, hot, *counts)[0]

    def test_what_does_not_fit_is_named(self):
        batch, packed, counts = self.make()
        cu, padded = self.shape.cu_seqlens
        with pytest.raises(ValueError, match=r"cu_seqlens \(4,\).*\[B\+1\] for input_ids \(2, 6\)"):
            SequencePackingLossWrapper(NLLLoss(), torch.tensor([0, 1, 2, 3]))(packed, batch, *counts)
        with pytest.raises(ValueError, match=r"packed logits must have one row, but got \(2, 6, 14\)"):
            SequencePackingLossWrapper(NLLLoss(), cu, padded)(packed.view(2, 6, 14), batch, *counts)
        with pytest.raises(ValueError, match=r"ends at 12, but packed logits \(1, 11, 14\)"):
            SequencePackingLossWrapper(NLLLoss(), cu, padded)(packed[:, :11], batch, *counts)
        with pytest.raises(ValueError, match=r"cu_seqlens \[0, 5, 8\].*in cu_seqlens_padded \[0, 4, 8\]"):
            SequencePackingLossWrapper(NLLLoss(), cu, torch.tensor([0, 4, 8]))(packed, batch, *counts)
        batch["token_mask"][1, 4] = batch["sample_mask"][1] = 1
        with pytest.raises(ValueError, match=r"token_mask counts token \[1, 4\], but cu_seqlens_q .* \[5, 3\] tokens"):
            SequencePackingLossWrapper(NLLLoss(), cu, padded)(packed, batch, *counts)

    def test_a_loss_function_of_another_make(self):
        """It follows the protocol and no more."""

        class Own:
            loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

            def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs):
                return -next_token_logprobs.sum() / global_valid_toks, {}

        batch, packed, counts = self.make()
        batch["temperature"] = torch.full((len(batch["input_ids"]),), 0.5)
        wrapper = SequencePackingLossWrapper(Own(), *self.shape.cu_seqlens)
        want, _ = SequencePackingLossWrapper(NLLLoss(), *self.shape.cu_seqlens)(packed, batch, *counts)
        torch.testing.assert_close(wrapper(packed, batch, *counts)[0], want, rtol=1e-14, atol=0)
        assert isinstance(wrapper, LossFunction) and wrapper.group_size == 1 and wrapper.metric_reductions == {}
        Own.input_type = LossInputType.LOGIT
        with pytest.raises(TypeError, match="does not know what Own reads from a packed output; derive it from"):
            SequencePackingLossWrapper(Own(), *self.shape.cu_seqlens)
