"""Portable attention equals its formula, sequence by sequence: padded, packed, windows, grouped queries, RoPE."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from rl_megatron.model.layers import attention as layers
from rl_megatron.model.layers.attention import PortableAttention, PortablePacking, PortableRotaryEmbedding
from rl_megatron.model.layers.attention_kernels import attend_last, attend_within_pack
from rl_megatron.model.layers.packed import LastBiases, PackedSequences
from rl_megatron.topology.device import start_device

HEADS, GROUPS, DIM = 4, 2, 8
PADDED_LENGTHS = [5, 1, 40, 3, 6, 2, 17]
WINDOWS = [None, 1, 4, 100]


def attention(window: int | None) -> PortableAttention:
    window_size = None if window is None else (window - 1, 0)
    config = SimpleNamespace(window_size=window_size, window_attn_skip_freq=None, softmax_type="vanilla")
    return PortableAttention(config, 1, AttnMaskType.causal, "self")


def formula(query, key, value, window):
    """Return the attention of one sequence in plain torch: [S, N, D], [S, G, D], [S, G, D] → [S, N·D]."""
    length, heads, dim = query.shape
    key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) / dim**0.5
    q, k = torch.arange(length)[:, None], torch.arange(length)[None, :]
    looks = (k <= q) if window is None else (k <= q) & (q - k < window)
    weights = scores.masked_fill(~looks, -torch.inf).softmax(-1)
    return torch.einsum("nqk,knd->qnd", weights, value).flatten(1)


def random_qkv(*leading: int):
    generator = torch.Generator().manual_seed(0)
    shapes = ((*leading, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def assert_same_values_and_gradients(found, wanted, inputs):
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), inputs, retain_graph=True),
        torch.autograd.grad((wanted * weight).sum(), inputs, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_attention_of_a_padded_batch_equals_its_formula(window):
    query, key, value = inputs = random_qkv(11, 3)
    wanted = torch.stack([formula(query[:, b], key[:, b], value[:, b], window) for b in range(3)], dim=1)
    assert_same_values_and_gradients(attention(window)(query, key, value), wanted, inputs)


@pytest.mark.parametrize("padded_lengths", [PADDED_LENGTHS, [7], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_tokens_of_a_pack_attend_within_their_sequence(window, padded_lengths):
    query, key, value = inputs = random_qkv(sum(padded_lengths), 1)
    parts = zip(*(x[:, 0].split(padded_lengths) for x in inputs), strict=True)
    wanted = torch.cat([formula(*part, window) for part in parts])[:, None]
    packing = PortablePacking(sequences=PackedSequences.from_padded_lengths(padded_lengths, None))
    found = attention(window)(query, key, value, packed_seq_params=packing)
    assert_same_values_and_gradients(found, wanted, inputs)


def test_sequences_of_similar_length_share_a_bucket():
    sequences = PackedSequences.from_padded_lengths(PADDED_LENGTHS, None)
    assert [bucket.key_shape for bucket in sequences.buckets] == [(2, 6), (1, 1), (1, 40), (2, 3), (1, 17)]
    assert sorted(sequences.slots.tolist()) == sorted(set(sequences.slots.tolist())), "no two tokens share a slot"
    assert sequences.longest == 40


def frequencies() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the angles of the packed tokens, and of each sequence by itself."""
    start_device("cpu")
    rope = PortableRotaryEmbedding(DIM, rotary_percent=1.0)
    packing = PortablePacking(sequences=PackedSequences.from_padded_lengths(PADDED_LENGTHS, None))
    packed = rope(rope.get_rotary_seq_len(None, None, None, None, packing), packed_seq=False, cp_group=None)
    return packed, torch.cat([rope.get_emb(length) for length in PADDED_LENGTHS])


def test_a_packed_token_is_rotated_by_its_position_in_its_own_sequence(ranks):
    sequences = PackedSequences.from_padded_lengths(PADDED_LENGTHS, None)
    assert sequences.positions.tolist() == [position for length in PADDED_LENGTHS for position in range(length)]
    packed, each = ranks.run(1, frequencies)[0]
    torch.testing.assert_close(packed, each, rtol=0, atol=0)


def test_other_masks_and_other_packings_are_refused():
    with pytest.raises(ValueError, match="causal"):
        PortableAttention(SimpleNamespace(window_size=None), 1, AttnMaskType.padding, "self")
    query, key, value = random_qkv(4, 1)
    with pytest.raises(TypeError, match="PortablePacking, got SimpleNamespace"):
        attention(None)(query, key, value, packed_seq_params=SimpleNamespace())


def masks_of_layers(run) -> list[object]:
    """Return the masks that torch's attention gets while `run` is called."""
    masks = []

    def recorded(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask=attn_mask, **options)

    with mock.patch.object(layers, "scaled_dot_product_attention", recorded):
        run()
    return masks


@pytest.mark.parametrize("packed", [False, True])
def test_layers_share_one_bias_that_torch_uses_without_a_copy(packed):
    query, key, value = random_qkv(40, 1)
    packing = PortablePacking(sequences=PackedSequences.from_padded_lengths([17, 17, 6], None)) if packed else None
    of_window, of_all = attention(4), attention(None)
    shared = masks_of_layers(
        lambda: [layer(query, key, value, packed_seq_params=packing) for layer in (of_window, of_all, of_window)]
    )
    with_bias = [mask for mask in shared if mask is not None]
    assert len(with_bias) == (4 if packed else 2), "the layers with a window have one for each bucket"
    assert len({mask.data_ptr() for mask in with_bias}) == len(with_bias) // 2
    for mask in with_bias:
        assert mask.dtype is query.dtype, "of a bool mask, each layer would make and keep a bias"
        assert mask.stride(-1) == 1 and all(stride % 16 == 0 for stride in mask.stride()[:-1])
    (later,) = masks_of_layers(lambda: of_window(query[:30], key[:30], value[:30]))
    assert later.size(-1) == 30, "other sequences have biases of their own"


def test_biases_of_earlier_sequences_are_freed():
    biases = LastBiases()
    kept = weakref.ref(biases.get((8,), "window", lambda: torch.zeros(3)))
    assert biases.get((8,), "window", lambda: torch.ones(3)) is kept()
    biases.get((9,), "window", lambda: torch.ones(3))
    assert kept() is None


def test_flash_attention_of_the_last_queries_has_the_right_shapes_and_gradients():
    """The values are compared on a GPU (tests/gpu)."""
    query, key, value = (
        torch.empty(length, 2, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for length, heads in ((4, 8), (16, 2), (16, 2))
    )
    found = attend_last(query, key, value, None)
    assert found.shape == (4, 2, 8 * 64)
    gradients = torch.autograd.grad(found.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [x.shape for x in (query, key, value)]


def test_flash_attention_of_a_pack_has_the_right_shapes_and_gradients():
    """The values are compared on a GPU (tests/gpu)."""
    parts = [torch.empty(20, heads, 64, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)]
    found = attend_within_pack(*parts, torch.empty(4, device="meta", dtype=torch.int32), 9, None)
    assert found.shape == (20, 8 * 64)
    gradients = torch.autograd.grad(found.sum(), parts)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in parts]
