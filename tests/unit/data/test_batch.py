import pickle

import pytest
import torch

from rl_megatron.data import BatchedDataDict, DynamicBatchingArgs, SequencePackingArgs


def batch_of(lengths, width=None):
    """Row b holds the tokens 100·b + 1 … 100·b + length, then zeros."""
    lengths = torch.tensor(lengths)
    width = width or int(lengths.max())
    positions = torch.arange(width)
    inside = positions < lengths[:, None]
    tokens = torch.where(inside, 100 * torch.arange(len(lengths))[:, None] + positions + 1, 0)
    return BatchedDataDict(
        input_ids=tokens,
        input_lengths=lengths,
        token_mask=inside.float(),
        sample_mask=torch.ones(len(lengths)),
        names=[f"row {number}" for number in range(len(lengths))],
    )


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert ours[key].dtype == value.dtype, key
            assert torch.equal(ours[key], value), key
        else:
            assert ours[key] == value, key


LENGTHS = [3, 17, 9, 1, 12, 12, 5, 20, 2, 7, 16, 11]
DYNAMIC = {"max_tokens_per_microbatch": 48, "sequence_length_round": 4}
PACKING = {"max_tokens_per_microbatch": 48, "sequence_length_pad_multiple": 4}


class TestRows:
    def test_size_counts_rows_and_names_keys_that_disagree(self):
        assert batch_of([2, 3]).size == 2
        assert BatchedDataDict().size == 0
        with pytest.raises(ValueError, match=r"'rewards': 3"):
            _ = BatchedDataDict(input_ids=torch.zeros(2, 4), rewards=torch.zeros(3)).size

    @pytest.mark.parametrize("value", [torch.tensor(1.0), (1, 2), 3.0, None])
    def test_values_without_rows_are_refused_by_name(self, value):
        with pytest.raises(TypeError, match="'temperature'"):
            _ = BatchedDataDict(temperature=value).size

    def test_slice_select_and_chunk(self):
        batch = batch_of([1, 2, 3, 4])
        assert batch.slice(1, 3)["names"] == ["row 1", "row 2"]
        assert batch.select_indices([3, 0, 3])["input_lengths"].tolist() == [4, 1, 4]
        assert batch.select_indices(torch.tensor([2, 1]))["names"] == ["row 2", "row 1"]
        assert batch.select_indices(batch["input_lengths"] > 2)["names"] == ["row 2", "row 3"]
        assert batch.chunk(1, 2)["names"] == ["row 2", "row 3"]

    def test_rows_that_are_not_there(self):
        batch = batch_of([1, 2, 3])
        with pytest.raises(IndexError, match="rows 2 to 4 of a batch with 3"):
            batch.slice(2, 4)
        with pytest.raises(IndexError, match="chunk 3 of 3"):
            batch.chunk(3, 3)
        with pytest.raises(ValueError, match=r"pad_to_multiple\(2\)"):
            batch.chunk(0, 2)

    def test_slices_share_memory_and_shards_do_not(self):
        batch = batch_of([4] * 512)
        assert batch.slice(0, 2)["input_ids"].data_ptr() == batch["input_ids"].data_ptr()
        shard = batch.shard_by_batch_size(128)[0]
        assert len(pickle.dumps(shard["input_ids"])) < 2000 < len(pickle.dumps(batch.slice(0, 4)["input_ids"]))

    def test_repeat_interleave_copies_records(self):
        batch = BatchedDataDict(x=torch.tensor([1, 2]), log=[{"turns": []}, {"turns": []}]).repeat_interleave(2)
        assert batch["x"].tolist() == [1, 1, 2, 2]
        batch["log"][0]["turns"].append("mine")
        assert batch["log"][1] == {"turns": []}

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

    def test_from_batches_refuses_rows_that_only_add_up(self):
        """Two rows of x with one of y, then one with two: as many in all, and every row but the first misaligned."""
        with pytest.raises(ValueError, match="disagree"):
            BatchedDataDict.from_batches([{"x": [1, 2], "y": [1]}, {"x": [3], "y": [2, 3]}])

    def test_truncate_and_to_work_in_place(self):
        batch = batch_of([5, 5])
        assert batch.truncate_tensors(1, 3) is batch and batch.to("cpu") is batch
        assert batch["input_ids"].shape == (2, 3) and batch["input_lengths"].shape == (2,)
        assert batch.to("meta")["token_mask"].device.type == "meta"

    def test_reorder_undoes_an_order(self):
        batch = batch_of([1, 2, 3, 4])
        order = [2, 0, 3, 1]
        assert_same(batch.select_indices(order).reorder_data(order), batch)
        with pytest.raises(ValueError, match="each of 0"):
            batch.reorder_data([0, 0, 1, 2])

    def test_it_is_a_dict_that_travels(self):
        batch = batch_of([1, 2])
        assert set(batch.get_dict()) == set(batch) and type(batch.get_dict()) is dict
        shard = batch_of(LENGTHS).shard_by_batch_size(2, sequence_packing_args=PACKING)[0][1]
        received = pickle.loads(pickle.dumps(shard))
        assert_same(received, shard)
        assert received.micro_batch_indices == shard.micro_batch_indices
        assert BatchedDataDict[dict](x=[1]).size == 1


class TestFillers:
    def test_they_weigh_nothing_and_leave_the_rows_alone(self):
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


class TestShards:
    def test_every_chunk_is_split_over_all_shards(self):
        first, second = batch_of([1] * 8).shard_by_batch_size(2, batch_size=4)
        assert first["names"] == ["row 0", "row 1", "row 4", "row 5"]
        assert second["names"] == ["row 2", "row 3", "row 6", "row 7"]
        assert first.get_batch(1, 2)["names"] == ["row 4", "row 5"]
        with pytest.raises(ValueError, match="batch_size"):
            first.get_batch(1)

    def test_uneven_shards_lose_no_row(self):
        shards = batch_of([1] * 5).shard_by_batch_size(3, allow_uneven_shards=True)
        assert [shard.size for shard in shards] == [2, 2, 1]
        assert sum((shard["names"] for shard in shards), []) == batch_of([1] * 5)["names"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shards": 5}, r"does not divide by shards = 5.*pad_to_multiple\(5\)"),
            ({"shards": 2, "batch_size": 8}, "batch_size = 8"),
            ({"shards": 2, "batch_size": 6, "allow_uneven_shards": True}, "leave batch_size out"),
            ({"shards": 2, "dynamic_batching_args": DYNAMIC, "sequence_packing_args": PACKING}, "exclude"),
            ({"shards": 2, "dynamic_batching_args": {**DYNAMIC, "sequence_round": 1}}, "sequence_length_round"),
            ({"shards": 2, "dynamic_batching_args": {"input_key": "x"}}, "max_tokens_per_microbatch"),
            ({"shards": 2, "sequence_packing_args": {**PACKING, "algorithm": "first_fit"}}, "first_fit_decreasing"),
            ({"shards": 2, "sequence_packing_args": {**PACKING, "unit_size": 0}}, "unit_size"),
            ({"shards": 2, "sequence_packing_args": {"max_tokens_per_microbatch": 19}}, "20 tokens.*raise"),
            ({"shards": 2, "dynamic_batching_args": {"max_tokens_per_microbatch": 19}}, "raise it to at least 20"),
            ({"shards": 2, "dynamic_batching_args": {**DYNAMIC, "input_lengths_key": "n"}}, "'n'"),
            ({"shards": 8, "allow_uneven_shards": True, "dynamic_batching_args": DYNAMIC}, "pad_to_multiple"),
            ({"shards": 13, "allow_uneven_shards": True, "sequence_packing_args": PACKING}, "cannot fill 13 packs"),
        ],
    )
    def test_errors_name_the_remedy(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            batch_of(LENGTHS).shard_by_batch_size(**arguments)

    @pytest.mark.parametrize("num_shards", [1, 2, 3])
    @pytest.mark.parametrize("batch_size", [None, 6])
    @pytest.mark.parametrize("planned", [{"dynamic_batching_args": DYNAMIC}, {"sequence_packing_args": PACKING}])
    def test_undoing_the_order_gives_the_batch(self, num_shards, batch_size, planned):
        batch = batch_of(LENGTHS)
        shards, order = batch.shard_by_batch_size(num_shards, batch_size, **planned)
        assert order != list(range(len(LENGTHS))), "the plan moved no row: the test would prove nothing"
        assert_same(BatchedDataDict.from_batches(shards).reorder_data(order), batch)

    @pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
    @pytest.mark.parametrize("planned", ["dynamic_batching_args", "sequence_packing_args"])
    def test_microbatches_cover_each_chunk_equally_on_every_shard(self, num_shards, planned):
        batch = batch_of(LENGTHS)
        args = DYNAMIC if planned.startswith("dynamic") else PACKING
        shards, _ = batch.shard_by_batch_size(num_shards, 6, **{planned: args})
        for chunk, rows in enumerate((range(6), range(6, 12))):
            seen, counts = [], set()
            for shard in shards:
                part = shard.get_batch(chunk, 6 // num_shards)
                microbatches = list(read(part, planned))
                counts.add(len(microbatches))
                seen += [name for microbatch in microbatches for name in microbatch["names"]]
            assert len(counts) == 1, "shards would wait for each other"
            assert sorted(seen) == sorted(f"row {row}" for row in rows)

    def test_a_shard_of_many_chunks_wants_one_picked(self):
        shard = batch_of(LENGTHS).shard_by_batch_size(2, 6, dynamic_batching_args=DYNAMIC)[0][0]
        with pytest.raises(ValueError, match="get_batch"):
            shard.make_microbatch_iterator_with_dynamic_shapes()
        with pytest.raises(IndexError, match="chunk 2"):
            shard.get_batch(2)
        with pytest.raises(ValueError, match="no microbatches are planned"):
            batch_of(LENGTHS).make_microbatch_iterator_for_packable_sequences()


def read(batch, planned):
    if planned.startswith("dynamic"):
        return batch.make_microbatch_iterator_with_dynamic_shapes()
    return batch.make_microbatch_iterator_for_packable_sequences()


class TestMicrobatches:
    def test_fixed_size(self):
        batch = batch_of([1, 2, 3, 4])
        assert [part["names"] for part in batch.make_microbatch_iterator(2)] == [["row 0", "row 1"], ["row 2", "row 3"]]
        with pytest.raises(ValueError, match="microbatch_size = 3"):
            batch.make_microbatch_iterator(3)

    def test_dynamic_shapes_stay_within_the_budget_and_keep_every_token(self):
        batch = batch_of(LENGTHS)
        shards, _ = batch.shard_by_batch_size(2, dynamic_batching_args=DynamicBatchingArgs(**DYNAMIC))
        tokens = 0
        for shard in shards:
            microbatches = list(shard.make_microbatch_iterator_with_dynamic_shapes())
            assert len(microbatches) == shard.get_microbatch_iterator_dynamic_shapes_len()
            for microbatch in microbatches:
                assert microbatch["input_ids"].numel() <= 48 and microbatch["input_ids"].shape[1] % 4 == 0
                tokens += int(microbatch["token_mask"].sum())
        assert tokens == sum(LENGTHS)
        widths = [
            [part["input_ids"].shape for part in shard.make_microbatch_iterator_with_dynamic_shapes()]
            for shard in shards
        ]
        assert widths[0] == widths[1], "all shards run the same shapes"
        assert min(shape[1] for shape in widths[0]) < 20, "short rows are cut"

    @pytest.mark.parametrize(("budget", "num_rows"), [(19, [2, 1, 1]), (20, [2, 2]), (29, [2, 2]), (40, [4])])
    def test_dynamic_shapes_use_the_budget_to_the_last_token(self, budget, num_rows):
        """Four rows of 5, 5, 10, 10 tokens."""
        shards, _ = batch_of([5, 10, 5, 10]).shard_by_batch_size(
            1, dynamic_batching_args={"max_tokens_per_microbatch": budget}
        )
        assert [part.size for part in shards[0].make_microbatch_iterator_with_dynamic_shapes()] == num_rows

    def test_rounding_up_never_exceeds_the_width(self):
        shards, _ = batch_of([18, 18]).shard_by_batch_size(
            1, dynamic_batching_args={"max_tokens_per_microbatch": 64, "sequence_length_round": 16}
        )
        assert shards[0].micro_batch_lengths == [[18]]

    def test_dynamic_shapes_refuse_a_tensor_they_would_cut_by_mistake(self):
        batch = batch_of(LENGTHS)
        batch["features"] = torch.zeros(12, 8)
        with pytest.raises(ValueError, match=r"'features' \(12, 8\)"):
            batch.shard_by_batch_size(2, dynamic_batching_args=DYNAMIC)

    def test_packs_fit_with_every_sequence_rounded_up(self):
        batch = batch_of(LENGTHS)
        shards, _ = batch.shard_by_batch_size(2, sequence_packing_args=SequencePackingArgs(**PACKING))
        for shard in shards:
            microbatches = list(shard.make_microbatch_iterator_for_packable_sequences())
            num_microbatches, most_tokens = shard.get_microbatch_iterator_for_packable_sequences_len()
            tokens = [sum(-(-n // 4) * 4 for n in part["input_lengths"].tolist()) for part in microbatches]
            assert (len(tokens), max(tokens)) == (num_microbatches, most_tokens) and most_tokens <= 48
            assert tokens == shard.micro_batch_lengths[0]
            assert all(part["input_ids"].shape[1] == 20 for part in microbatches), "unpacking is not its work"
        num_packs = sum(len(shard.micro_batch_lengths[0]) for shard in shards)
        assert num_packs == 4, "132 tokens fit 3 packs of 48, made even for 2 shards"

    @pytest.mark.parametrize("planned", ["dynamic_batching_args", "sequence_packing_args"])
    def test_a_preference_pair_is_never_split(self, planned):
        batch = batch_of(LENGTHS)
        shards, order = batch.shard_by_batch_size(3, **{planned: {"max_tokens_per_microbatch": 40, "unit_size": 2}})
        for shard in shards:
            for microbatch in read(shard, planned):
                rows = [int(name.removeprefix("row ")) for name in microbatch["names"]]
                assert all(row % 2 == 0 for row in rows[::2])
                assert rows[1::2] == [row + 1 for row in rows[::2]]
        assert_same(BatchedDataDict.from_batches(shards).reorder_data(order), batch)


def gather_on_rank(scale):
    import torch.distributed as dist

    rank = dist.get_rank()
    batch = BatchedDataDict(
        names=[f"rank {rank}"] * rank,
        ids=torch.full((rank, 2 + rank), rank + 1),
        flags=torch.ones(rank, dtype=torch.bool),
        half=torch.full((rank, 2, 3), scale * rank, dtype=torch.bfloat16),
    )
    if rank == 1:  # the order of keys is not part of a batch
        batch = BatchedDataDict(dict(reversed(batch.get_dict().items())))
    gathered = batch.all_gather(dist.group.WORLD, pad_value_dict={"ids": -1})
    batch["only_here" if rank else "only_there"] = [0] * rank
    try:
        batch.all_gather(dist.group.WORLD)
    except ValueError as error:
        plain = {key: value if isinstance(value, list) else value.tolist() for key, value in gathered.items()}
        return plain, str(error)


def test_all_gather_joins_uneven_ranks(ranks):
    """Rank r brings r rows of width 2 + r; rank 0 brings none."""
    results = ranks.run(3, gather_on_rank, 0.5)
    gathered, error = results[0]
    assert gathered["names"] == ["rank 1", "rank 2", "rank 2"]
    assert gathered["ids"] == [[2, 2, 2, -1], [3, 3, 3, 3], [3, 3, 3, 3]]
    assert gathered["flags"] == [True, True, True]
    assert gathered["half"] == [[[0.5] * 3] * 2] + [[[1.0] * 3] * 2] * 2
    assert all(result[0] == gathered for result in results)
    assert "only_here" in error and "only_there" in error
