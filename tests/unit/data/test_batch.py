import pickle

import pytest
import torch

from rl_megatron import data
from rl_megatron.data.batch import BatchedDataDict


def test_the_data_package_has_the_batch_and_names_what_it_lacks():
    assert data.BatchedDataDict is BatchedDataDict
    with pytest.raises(AttributeError, match="module 'rl_megatron.data' has no attribute 'Batch'"):
        data.Batch  # noqa: B018


def batch_of(lengths):
    """Sequence b holds the tokens 100·b + 1 … 100·b + length, then zeros."""
    lengths = torch.tensor(lengths)
    positions = torch.arange(int(lengths.max()))
    inside = positions < lengths[:, None]
    tokens = torch.where(inside, 100 * torch.arange(len(lengths))[:, None] + positions + 1, 0)
    return BatchedDataDict(
        input_ids=tokens,
        input_lengths=lengths,
        token_mask=inside.float(),
        sample_mask=torch.ones(len(lengths)),
        names=[f"sequence {number}" for number in range(len(lengths))],
    )


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert ours[key].dtype == value.dtype, key
            assert torch.equal(ours[key], value), key
        else:
            assert ours[key] == value, key


class TestSequences:
    def test_size_counts_sequences_and_names_keys_that_disagree(self):
        assert batch_of([2, 3]).size == 2
        assert BatchedDataDict().size == 0
        with pytest.raises(ValueError, match=r"'rewards': 3"):
            _ = BatchedDataDict(input_ids=torch.zeros(2, 4), rewards=torch.zeros(3)).size

    @pytest.mark.parametrize("value", [torch.tensor(1.0), (1, 2), 3.0, None])
    def test_values_without_sequences_are_refused_by_name(self, value):
        with pytest.raises(TypeError, match="'temperature'"):
            _ = BatchedDataDict(temperature=value).size

    def test_slice_and_select(self):
        batch = batch_of([1, 2, 3, 4])
        assert batch.slice(1, 3)["names"] == ["sequence 1", "sequence 2"]
        assert batch.select_indices([3, 0, 3])["input_lengths"].tolist() == [4, 1, 4]
        assert batch.select_indices(torch.tensor([2, 1]))["names"] == ["sequence 2", "sequence 1"]
        assert batch.select_indices(batch["input_lengths"] > 2)["names"] == ["sequence 2", "sequence 3"]

    def test_sequences_that_do_not_exist_are_refused(self):
        with pytest.raises(IndexError, match="sequences 2 to 4 of a batch with 3"):
            batch_of([1, 2, 3]).slice(2, 4)

    def test_slices_share_memory_and_selections_do_not(self):
        batch = batch_of([4] * 512)
        assert batch.slice(0, 2)["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
        selected = batch.select_indices([0, 1, 2, 3])
        assert len(pickle.dumps(selected["input_ids"])) < 2000 < len(pickle.dumps(batch.slice(0, 4)["input_ids"]))

    def test_from_batches_pads_the_sequence(self):
        narrow, wide = (
            {"ids": torch.ones(n, 2 * n, dtype=torch.long), "top_k": torch.ones(n, 2 * n, 3), "r": torch.ones(n)}
            for n in (1, 2)
        )
        narrow["n"], wide["n"] = ["a"], ["b", "c"]
        joined = BatchedDataDict.from_batches([narrow, wide], pad_value_dict={"ids": -7})
        assert joined["ids"].tolist() == [[1, 1, -7, -7], [1, 1, 1, 1], [1, 1, 1, 1]]
        assert joined["top_k"].shape == (3, 4, 3) and joined["top_k"][0, 2:].sum() == 0
        assert joined["r"].shape == (3,) and joined["n"] == ["a", "b", "c"]

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            ({"y": torch.ones(1, 2)}, "keys"),
            ({"x": [1]}, "a tensor in some"),
            ({"x": torch.ones(1, 2).double()}, "dtypes"),
            ({"x": torch.ones(1, 2, 3)}, r"\(1, 2, 3\)"),
        ],
    )
    def test_from_batches_refuses_what_does_not_fit(self, second, message):
        with pytest.raises(ValueError, match=message):
            BatchedDataDict.from_batches([{"x": torch.ones(1, 2)}, second])
        with pytest.raises(ValueError, match="at least one"):
            BatchedDataDict.from_batches([])

    def test_from_batches_refuses_sequences_that_only_add_up(self):
        """Two of x with one of y, then one with two: as many in all, and every sequence but the first misaligned."""
        with pytest.raises(ValueError, match="disagree"):
            BatchedDataDict.from_batches([{"x": [1, 2], "y": [1]}, {"x": [3], "y": [2, 3]}])

    def test_to_moves_a_copy_and_leaves_the_batch(self):
        batch = batch_of([5, 5])
        moved = batch.to("meta")
        assert moved is not batch and moved.keys() == batch.keys() and moved["names"] == batch["names"]
        assert moved["token_mask"].device.type == "meta" and batch["token_mask"].device.type == "cpu"
        here = batch.to("cpu")
        here["extra"] = [1, 2]
        assert "extra" not in batch

    def test_a_batch_is_a_dict_that_can_be_pickled(self):
        batch = batch_of([1, 2])
        assert set(batch.get_dict()) == set(batch) and type(batch.get_dict()) is dict
        assert_same(pickle.loads(pickle.dumps(batch)), batch)
        assert BatchedDataDict[dict](x=[1]).size == 1


class TestPaddingSequences:
    def test_they_have_zero_weight_and_leave_the_others_alone(self):
        batch = batch_of([3, 2, 4])
        padded = batch.pad_to_multiple(4)
        assert_same(padded.slice(0, 3), batch)
        assert padded["sample_mask"].tolist() == [1, 1, 1, 0]
        assert padded["token_mask"][3].sum() == 0 and torch.equal(padded["input_ids"][3], batch["input_ids"][0])
        assert batch["token_mask"].sum() == 9, "the batch itself keeps its masks"
        assert batch.pad_to_multiple(3).size == 3

    def test_without_a_sample_mask_they_would_count(self):
        with pytest.raises(ValueError, match="sample_mask"):
            BatchedDataDict(x=torch.ones(3)).pad_to_multiple(2)
