import random

import pytest

from rl_megatron.batching.packing import ALGORITHMS, pack_sequences, split_packs


def load(pack, lengths):
    return sum(lengths[index] for index in pack)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_packed_once_within_the_capacity(algorithm, seed):
    source = random.Random(seed)
    lengths = [source.randint(1, 100) for _ in range(200)]
    packs = pack_sequences(lengths, 100, algorithm)
    assert sorted(index for pack in packs for index in pack) == list(range(200))
    assert all(0 < load(pack, lengths) <= 100 and pack == sorted(pack) for pack in packs)
    assert packs == pack_sequences(lengths, 100, algorithm)
    least = -(-sum(lengths) // 100)
    bound = {"concatenative": 2, "first_fit_decreasing": 11 / 9, "modified_first_fit_decreasing": 71 / 60}[algorithm]
    # Two sequences of more than half of the capacity do not fit together, so each of them needs its own package.
    assert len(packs) <= bound * max(least, sum(length > 50 for length in lengths)) + 10


def test_concatenative_keeps_the_order():
    assert pack_sequences([4, 4, 4, 9, 1], 10, "concatenative") == [[0, 1], [2], [3, 4]]


def test_first_fit_decreasing_by_hand():
    assert pack_sequences([2, 5, 4, 7, 1, 3, 8], 10, "first_fit_decreasing") == [[0, 6], [3, 5], [1, 2, 4]]


def test_modified_first_fit_decreasing_needs_fewer_packages_in_its_best_case():
    """Six packages are filled by 51 + 26 + 23; plain first fit puts a 27 with each 51 and wastes the rest."""
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    plain = pack_sequences(lengths, 100, "first_fit_decreasing")
    modified = pack_sequences(lengths, 100, "modified_first_fit_decreasing")
    assert len(modified) == 10 and len(plain) == 11
    assert sum(load(pack, lengths) == 100 for pack in modified) == 6


def test_modified_first_fit_decreasing_by_hand():
    """With capacity 60, each long sequence first gets the longest medium one that fits, and then small ones."""
    long, medium, small, tiny = [35, 32], [26, 24], [12, 11], [5, 4]
    packs = pack_sequences(long + medium + small + tiny, 60, "modified_first_fit_decreasing")
    assert packs == [[0, 3], [1, 2], [4, 5, 6, 7]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_edges(algorithm):
    assert pack_sequences([], 10, algorithm) == []
    assert pack_sequences([10, 10], 10, algorithm) == [[0], [1]]
    assert sorted(map(len, pack_sequences([0, 0, 10], 10, algorithm))) in ([3], [1, 2])


def test_errors():
    with pytest.raises(ValueError, match="did you mean 'first_fit_decreasing'"):
        pack_sequences([1], 10, "first_fit_decresing")
    with pytest.raises(ValueError, match="sequence 1 has 12 tokens.*at least 14"):
        pack_sequences([1, 12, 14], 10)
    with pytest.raises(ValueError, match="sequence 0 has length -1"):
        pack_sequences([-1], 10)


def test_splitting_takes_the_heaviest_and_balances_its_halves():
    lengths = [6, 1, 5, 4, 3, 2]
    packs = split_packs([[0, 1], [2, 3, 4], [5]], lengths, 4)
    assert packs == [[0, 1], [2], [3, 4], [5]]
    assert split_packs([[0, 1, 2, 3, 4, 5]], lengths, 6) == [[0], [1], [2], [3], [4], [5]]
    assert split_packs([[0], [1, 2]], [9, 0, 0], 3) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="2 sequences cannot fill 3 packs"):
        split_packs([[0, 1]], lengths, 3)
