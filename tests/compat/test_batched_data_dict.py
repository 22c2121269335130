"""NeMo RL's `BatchedDataDict`, under its import path: shards, microbatches, methods that work in place, errors."""

import pickle
from importlib import import_module

import pytest
import torch

from rl_megatron.batching.cost import SequenceCost
from rl_megatron.compat import nemo_rl
from rl_megatron.compat.nemo_rl.batched_data_dict import BatchedDataDict
from rl_megatron.compat.nemo_rl.errors import RuleError
from rl_megatron.data.batch import BatchedDataDict as CoreBatch
from tests.unit.data.test_batch import assert_same
from tests.unit.data.test_batch import batch_of as core_batch_of

NAMES = nemo_rl.MODULES["nemo_rl.distributed.batched_data_dict"]
LENGTHS = [3, 17, 9, 1, 12, 12, 5, 20, 2, 7, 16, 11]
DYNAMIC = NAMES["DynamicBatchingArgs"](max_tokens_per_microbatch=48, sequence_length_round=4)
PACKING = NAMES["SequencePackingArgs"](max_tokens_per_microbatch=48, sequence_length_pad_multiple=4)


def batch_of(lengths):
    return BatchedDataDict(core_batch_of(lengths))


class TestNames:
    def test_the_names_of_the_module(self):
        assert NAMES["BatchedDataDict"] is NAMES["SlicedDataDict"] is BatchedDataDict
        assert issubclass(BatchedDataDict, CoreBatch)
        module = import_module("rl_megatron.compat.nemo_rl.batched_data_dict")
        assert {"BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs"} <= set(vars(module))

    def test_settings_are_plain_dictionaries(self):
        assert type(DYNAMIC) is type(PACKING) is dict
        assert DYNAMIC["max_tokens_per_microbatch"] == 48 and "input_key" not in PACKING


class TestSequences:
    def test_chunk(self):
        batch = batch_of([1, 2, 3, 4])
        assert batch.chunk(1, 2)["names"] == ["sequence 2", "sequence 3"]
        with pytest.raises(AssertionError, match="index OOB: not enough splits.*rank must be between 0 and 1"):
            batch.chunk(2, 2)
        with pytest.raises(AssertionError, match=r"batch size \(4\) is not a multiple of chunks \(3\)"):
            batch.chunk(0, 3)

    def test_a_slice_past_the_end_is_an_assertion_and_an_index_error(self):
        for kind in (AssertionError, IndexError, ValueError):
            with pytest.raises(kind, match=r"slice\(2, 4\) of a batch of size 3"):
                batch_of([1, 2, 3]).slice(2, 4)

    def test_shards_do_not_share_memory(self):
        shard = batch_of([4] * 512).shard_by_batch_size(128)[0]
        assert len(pickle.dumps(shard["input_ids"])) < 2000

    def test_repeat_interleave_copies_records(self):
        batch = BatchedDataDict(x=torch.tensor([1, 2]), log=[{"turns": []}, {"turns": []}]).repeat_interleave(2)
        assert batch["x"].tolist() == [1, 1, 2, 2]
        batch["log"][0]["turns"].append("mine")
        assert batch["log"][1] == {"turns": []}

    def test_from_batches_without_batches_is_an_empty_batch(self):
        assert BatchedDataDict.from_batches([]) == BatchedDataDict.from_batches([{}, {}]) == {}

    def test_a_batch_without_sequences_may_lack_keys_and_widens_no_other(self):
        batch = batch_of([2, 3])
        nothing = {"input_ids": torch.zeros(0, 9), "names": []}
        joined = BatchedDataDict.from_batches([nothing, batch, {}, batch.slice(0, 1)])
        assert joined.keys() == batch.keys() and joined["names"] == ["sequence 0", "sequence 1", "sequence 0"]
        assert joined["input_ids"].shape == (3, 3)
        only_empty = BatchedDataDict.from_batches([nothing, {"flags": torch.zeros(0)}])
        assert only_empty.keys() == {"input_ids", "names", "flags"} and only_empty.size == 0

    def test_a_key_that_a_batch_with_sequences_lacks_is_named(self):
        batches = [{"x": [1]}, {"x": [2], "y": [3]}, {"y": []}, {"x": [4]}]
        for kind in (KeyError, AssertionError, ValueError):
            with pytest.raises(kind, match=r"^Key 'y' is missing from non-empty batches \[0, 3\]"):
                BatchedDataDict.from_batches(batches)
        with pytest.raises(KeyError, match=r"'y' is missing from non-empty batches \[0\]"):
            BatchedDataDict.from_batches([{"x": [1]}, {"y": []}])

    def test_multimodal_batches_are_refused(self):
        with pytest.raises(NotImplementedError, match="does not provide NeMo RL's multimodal batches"):
            batch_of([1]).get_multimodal_dict(as_tensors=True)

    def test_truncate_and_to_work_in_place(self):
        batch = batch_of([5, 5])
        assert batch.truncate_tensors(1, 3) is batch and batch.to("cpu") is batch
        assert batch["input_ids"].shape == (2, 3) and batch["input_lengths"].shape == (2,)
        assert batch.truncate_tensors(1, 9)["input_ids"].shape == (2, 3)
        batch.to("meta")
        assert batch["token_mask"].device.type == "meta"

    def test_reorder_undoes_an_order(self):
        batch = batch_of([1, 2, 3, 4])
        order = [2, 0, 3, 1]
        assert_same(batch.select_indices(order).reorder_data(order), batch)
        with pytest.raises(ValueError, match="each of 0"):
            batch.reorder_data([0, 0, 1, 2])

    def test_a_shard_travels_with_its_plan(self):
        shard = batch_of(LENGTHS).shard_by_batch_size(2, sequence_packing_args=PACKING)[0][1]
        received = pickle.loads(pickle.dumps(shard))
        assert_same(received, shard)
        assert received.micro_batch_indices == shard.micro_batch_indices
        assert BatchedDataDict[dict](x=[1]).size == 1


class TestShards:
    def test_every_step_batch_is_split_over_all_shards(self):
        first, second = batch_of([1] * 8).shard_by_batch_size(2, batch_size=4)
        assert first["names"] == ["sequence 0", "sequence 1", "sequence 4", "sequence 5"]
        assert second["names"] == ["sequence 2", "sequence 3", "sequence 6", "sequence 7"]
        assert first.get_batch(1, 2)["names"] == ["sequence 4", "sequence 5"]
        with pytest.raises(ValueError, match="batch_size"):
            first.get_batch(1)

    def test_uneven_shards_lose_no_sequence(self):
        shards = batch_of([1] * 5).shard_by_batch_size(3, allow_uneven_shards=True)
        assert [shard.size for shard in shards] == [2, 2, 1]
        assert sum((shard["names"] for shard in shards), []) == batch_of([1] * 5)["names"]

    def test_a_shard_without_sequences_keeps_all_keys(self):
        batch = batch_of([1] * 5)
        shards = batch.shard_by_batch_size(4, allow_uneven_shards=True)
        assert [shard.size for shard in shards] == [2, 2, 1, 0]
        assert shards[3].keys() == batch.keys() and shards[3]["input_ids"].shape == (0, 1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shards": 5}, r"Batch size \(12\) is not a multiple of shards \(5\).*pad_to_multiple\(5\)"),
            ({"shards": 2, "batch_size": 8}, r"Total batch size \(12\) is not a multiple of batch_size \(8\)"),
            (
                {"shards": 2, "batch_size": 6, "allow_uneven_shards": True},
                "batch_size must be None if allow_uneven_shards is True",
            ),
            (
                {"shards": 2, "dynamic_batching_args": DYNAMIC, "sequence_packing_args": PACKING},
                "dynamic_batching_args and sequence_packing_args cannot be passed together",
            ),
            ({"shards": 2, "dynamic_batching_args": {**DYNAMIC, "sequence_round": 1}}, "sequence_length_round"),
            ({"shards": 2, "dynamic_batching_args": {"input_key": "x"}}, "max_tokens_per_microbatch"),
            ({"shards": 2, "sequence_packing_args": {**PACKING, "algorithm": "first_fit"}}, "first_fit_decreasing"),
            (
                {"shards": 2, "sequence_packing_args": {**PACKING, "microbatch_order": "longest"}},
                "'largest_first', got",
            ),
            ({"shards": 2, "sequence_packing_args": {**PACKING, "group_size": 0}}, "group_size must be at least 1"),
            ({"shards": 2, "sequence_packing_args": {"max_tokens_per_microbatch": 19}}, "20 tokens.*raise"),
            ({"shards": 2, "dynamic_batching_args": {"max_tokens_per_microbatch": 19}}, "raise it to at least 20"),
            ({"shards": 2, "dynamic_batching_args": {**DYNAMIC, "input_lengths_key": "n"}}, "'n'"),
            ({"shards": 8, "allow_uneven_shards": True, "dynamic_batching_args": DYNAMIC}, "pad_to_multiple"),
            ({"shards": 13, "allow_uneven_shards": True, "sequence_packing_args": PACKING}, "cannot fill 13 packs"),
        ],
    )
    def test_errors_are_assertions_and_value_errors_that_name_the_remedy(self, arguments, message):
        assert issubclass(RuleError, ValueError) and issubclass(RuleError, AssertionError)
        with pytest.raises(RuleError, match=message):
            batch_of(LENGTHS).shard_by_batch_size(**arguments)

    def test_keys_of_different_sizes_are_an_assertion(self):
        with pytest.raises(AssertionError, match="Batch sizes are not the same across the rollout batch.*'y': 1"):
            BatchedDataDict(x=[1, 2], y=[1]).shard_by_batch_size(1)

    def test_packing_goes_by_the_cost_that_is_given(self):
        """By its tokens a sequence of 8 weighs as much as two of 4, by its pairs of tokens as much as four."""
        batch = batch_of([8, 4, 4, 4, 4])
        for cost, tokens in ((SequenceCost(1.0, 0.0), [12, 12]), (SequenceCost(0.0, 1.0), [8, 16])):
            shards, _ = batch.shard_by_batch_size(
                2, allow_uneven_shards=True, sequence_packing_args={"max_tokens_per_microbatch": 16, "cost": cost}
            )
            assert sorted(shard.micro_batch_lengths[0][0] for shard in shards) == tokens

    @pytest.mark.parametrize("num_shards", [1, 2, 3])
    @pytest.mark.parametrize("batch_size", [None, 6])
    @pytest.mark.parametrize("planned", [{"dynamic_batching_args": DYNAMIC}, {"sequence_packing_args": PACKING}])
    def test_undoing_the_order_gives_the_batch(self, num_shards, batch_size, planned):
        batch = batch_of(LENGTHS)
        shards, order = batch.shard_by_batch_size(num_shards, batch_size, **planned)
        assert order != list(range(len(LENGTHS))), "the plan moved no sequence: the test would prove nothing"
        assert_same(BatchedDataDict.from_batches(shards).reorder_data(order), batch)

    @pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
    @pytest.mark.parametrize("planned", ["dynamic_batching_args", "sequence_packing_args"])
    def test_microbatches_cover_each_step_batch_equally_on_every_shard(self, num_shards, planned):
        batch = batch_of(LENGTHS)
        args = DYNAMIC if planned.startswith("dynamic") else PACKING
        shards, _ = batch.shard_by_batch_size(num_shards, 6, **{planned: args})
        for step, numbers in enumerate((range(6), range(6, 12))):
            seen, counts = [], set()
            for shard in shards:
                part = shard.get_batch(step, 6 // num_shards)
                microbatches = list(read(part, planned))
                counts.add(len(microbatches))
                seen += [name for microbatch in microbatches for name in microbatch["names"]]
            assert len(counts) == 1, "shards would wait for each other"
            assert sorted(seen) == sorted(f"sequence {number}" for number in numbers)

    def test_a_shard_of_many_step_batches_needs_one_picked(self):
        shard = batch_of(LENGTHS).shard_by_batch_size(2, 6, dynamic_batching_args=DYNAMIC)[0][0]
        with pytest.raises(ValueError, match="get_batch"):
            shard.make_microbatch_iterator_with_dynamic_shapes()
        with pytest.raises(IndexError, match="batch_idx=2 must be between 0 and 1"):
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
        parts = [part["input_lengths"].tolist() for part in batch.make_microbatch_iterator(2)]
        assert parts == [[1, 2], [3, 4]]
        message = r"Data dict size \(4\) is not a multiple of the provided microbatch size \(3\)"
        with pytest.raises(AssertionError, match=message):
            batch.make_microbatch_iterator(3)

    def test_dynamic_shapes_stay_within_the_budget_and_keep_every_token(self):
        batch = batch_of(LENGTHS)
        shards, _ = batch.shard_by_batch_size(2, dynamic_batching_args=DYNAMIC)
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
        assert min(shape[1] for shape in widths[0]) < 20, "short sequences are cut"

    @pytest.mark.parametrize(("budget", "sizes"), [(19, [2, 1, 1]), (20, [2, 2]), (29, [2, 2]), (40, [4])])
    def test_dynamic_shapes_use_the_budget_to_the_last_token(self, budget, sizes):
        """Four sequences of 5, 10, 5, 10 tokens."""
        shards, _ = batch_of([5, 10, 5, 10]).shard_by_batch_size(
            1, dynamic_batching_args={"max_tokens_per_microbatch": budget}
        )
        assert [part.size for part in shards[0].make_microbatch_iterator_with_dynamic_shapes()] == sizes

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
        shards, _ = batch.shard_by_batch_size(2, sequence_packing_args=PACKING)
        for shard in shards:
            microbatches = list(shard.make_microbatch_iterator_for_packable_sequences())
            num_microbatches, most_tokens = shard.get_microbatch_iterator_for_packable_sequences_len()
            tokens = [sum(-(-n // 4) * 4 for n in part["input_lengths"].tolist()) for part in microbatches]
            assert (len(tokens), max(tokens)) == (num_microbatches, most_tokens) and most_tokens <= 48
            assert tokens == shard.micro_batch_lengths[0]
            assert all(part["input_ids"].shape[1] == 20 for part in microbatches), "unpacking is not its work"
        num_packs = sum(len(shard.micro_batch_lengths[0]) for shard in shards)
        assert num_packs == 4, "132 tokens fit 3 packs of 48, made even for 2 shards"

    def test_packs_run_in_the_order_of_the_plan_or_largest_first(self):
        """The plan begins with the costliest pack: the sequence of 16 tokens, by its pairs of tokens."""
        batch = batch_of([8, 8, 8, 16, 16, 8, 8, 8])
        args = {"max_tokens_per_microbatch": 24, "algorithm": "concatenative", "cost": SequenceCost(0.0, 1.0)}
        for order, tokens in ((None, [16, 24]), ("packer", [16, 24]), ("largest_first", [24, 16])):
            (shard,), undo = batch.shard_by_batch_size(1, 4, sequence_packing_args=args | {"microbatch_order": order})
            assert [sorted(step) for step in shard.micro_batch_lengths] == [[16, 24]] * 2
            assert shard.micro_batch_lengths[0] == tokens
            microbatches = shard.get_batch(0).make_microbatch_iterator_for_packable_sequences()
            assert [part["input_lengths"].sum().item() for part in microbatches] == tokens
            assert_same(BatchedDataDict.from_batches([shard]).reorder_data(undo), batch)

    @pytest.mark.parametrize("planned", ["dynamic_batching_args", "sequence_packing_args"])
    def test_a_preference_pair_is_never_split(self, planned):
        batch = batch_of(LENGTHS)
        shards, order = batch.shard_by_batch_size(3, **{planned: {"max_tokens_per_microbatch": 40, "group_size": 2}})
        for shard in shards:
            for microbatch in read(shard, planned):
                numbers = [int(name.removeprefix("sequence ")) for name in microbatch["names"]]
                assert all(number % 2 == 0 for number in numbers[::2])
                assert numbers[1::2] == [number + 1 for number in numbers[::2]]
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


@pytest.mark.change
def test_all_gather_joins_uneven_ranks(ranks):
    """Rank r brings r sequences of width 2 + r; rank 0 brings none."""
    results = ranks.run(3, gather_on_rank, 0.5)
    gathered, error = results[0]
    assert gathered["names"] == ["rank 1", "rank 2", "rank 2"]
    assert gathered["ids"] == [[2, 2, 2, -1], [3, 3, 3, 3], [3, 3, 3, 3]]
    assert gathered["flags"] == [True, True, True]
    assert gathered["half"] == [[[0.5] * 3] * 2] + [[[1.0] * 3] * 2] * 2
    assert all(result[0] == gathered for result in results)
    assert "only_here" in error and "only_there" in error
