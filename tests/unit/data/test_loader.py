"""Mixtures and streams: which items form a batch, and that a loader continues where another stopped."""

import json
from dataclasses import replace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.loader import DataLoader, InMemory, ItemList, Streamed
from rl_megatron.data.mixture import MixtureCounts
from rl_megatron.data.readers import JsonLines
from rl_megatron.data.records import NothingLeft, Part
from rl_megatron.topology.ranks import Ranks


def joined(batches, order):
    items = [item for batch in batches for item in batch]
    return [items[place] for place in order]


def write(path, prefix, count):
    path.write_text("".join(json.dumps({"name": f"{prefix}{number}"}) + "\n" for number in range(count)))
    return path


@pytest.fixture
def loader(tmp_path):
    """`loader(batch_size)`: a mixture of 7 items in memory and of 23 that are streamed in blocks of 5."""
    stream = JsonLines(write(tmp_path / "s.jsonl", "s", 23))

    def make(
        batch_size=4, weights=(1.0, 3.0), block=5, build=lambda records: [each.values["name"] for each in records]
    ):
        memory = InMemory("memory", ItemList([f"m{number}" for number in range(7)]), "0/memory")
        streamed = Streamed("stream", stream, lambda records: ItemList(build(records)), block, "0/stream")
        counts = MixtureCounts(["memory", "stream"], batch_size, lambda step: weights)
        return DataLoader([memory, streamed], counts, 0, joined)

    return make


def test_the_items_of_a_mixture_follow_the_weights_with_carried_remainders():
    counts = MixtureCounts(["a", "b", "c"], 10, lambda step: [0.5, 0.33, 0.17])
    for number in range(200):
        before, now = counts.at(number)
        assert sum(now) == 10 and sum(before) == 10 * number
        for taken, share in zip(before, (0.5, 0.33, 0.17), strict=True):
            assert abs(taken - 10 * number * share) < 1.5
    assert counts.at(3) == MixtureCounts(["a", "b", "c"], 10, lambda step: [0.5, 0.33, 0.17]).at(3), "in any order"
    rare = MixtureCounts(["rare", "often"], 1, lambda step: [0.1, 0.9])
    assert [rare.at(number)[1][0] for number in range(40)].count(1) == 4


def test_the_data_set_of_each_item_of_the_last_batch_is_known(loader):
    made, seen = loader(), set()
    for number in (0, 1, 5, 2):
        items = made.batch(number)
        assert [name[0] for name in made.data_sets] == [item[0] for item in items]
        seen.update(made.data_sets)
    assert seen == {"memory", "stream"}


def test_weights_may_change_with_the_step():
    counts = MixtureCounts(["a", "b"], 4, lambda step: {"b": 0 if step < 3 else 1, "a": 1}, batches_per_step=2)
    assert [counts.at(number)[1] for number in range(6)] == [[4, 0]] * 4 + [[2, 2]] * 2


def test_an_error_of_the_function_of_the_weights_names_its_line_and_the_step():
    counts = MixtureCounts(["a", "b"], 4, lambda step: [1, 1 / (2 - step)])
    counts.at(0)
    with pytest.raises(
        ConfigError, match=r"data.mix_weights \(step 2\) raised ZeroDivisionError: .*test_loader.py:\d+"
    ):
        counts.at(1)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1], "has 2 data sets"),
        ({"a": 1, "x": 1}, r"names \['a', 'x'\], but data.mix has \['a', 'b'\]"),
        ([1, -1], "0 or more"),
        ([0, 0], "and not all 0"),
        ([1, float("nan")], "finite"),
        (None, "None, but"),
    ],
)
def test_a_function_that_returns_no_weights_is_refused(returned, words):
    with pytest.raises(ConfigError, match=rf"data.mix_weights returned .*{words}.*\(step 1\)"):
        MixtureCounts(["a", "b"], 4, lambda step: returned).at(0)


def test_an_epoch_of_a_stream_has_every_item_once_and_the_next_is_shuffled_anew(loader):
    stream = loader().components[1]
    epochs = [[item.among.items[item.index] for item in stream.draw(0, 23)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(f"s{number}" for number in range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sorted(epochs[1][:5]) == [f"s{number}" for number in range(5)] != epochs[1][:5], "blocks are shuffled"


@pytest.mark.parametrize("killed_after", range(0, 17, 3))
def test_a_loader_continues_where_another_stopped(loader, killed_after):
    running = loader()
    whole = [running.batch(number) for number in range(20)]
    stopped = loader()
    for number in range(killed_after):
        stopped.batch(number)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = loader()
    resumed.load_state_dict(state)
    assert [resumed.batch(number) for number in range(killed_after, 20)] == whole[killed_after:]
    without_state = loader()
    assert without_state.batch(killed_after) == whole[killed_after], "it passes what comes before"
    assert running.batch(2) == whole[2], "it goes back"


def test_a_continued_stream_does_not_read_what_came_before(loader):
    built = []

    def build(records):
        built.append(records[0].location.rpartition(":")[2])
        return [each.values["name"] for each in records]

    stopped = loader(build=build)
    for number in range(6):  # 18 items of the stream
        stopped.batch(number)
    resumed = loader(build=build)
    built.clear()
    resumed.load_state_dict(stopped.state_dict())
    resumed.batch(6)
    assert built == ["16", "21"]


def test_blocks_without_an_item_are_passed_over_and_a_stopped_run_continues_behind_them(loader, logged):
    """Blocks 0, 2 and 4 have no item. The batches are the same whether or not the run is stopped before them."""

    def build(records):
        if int(records[0].location.rpartition(":")[2]) % 10 == 1:
            raise NothingLeft("every sequence is too long")
        return [each.values["name"] for each in records]

    stopped, whole = loader(build=build, weights=(0, 1)), loader(build=build, weights=(0, 1))
    batches = [whole.batch(number) for number in range(12)]
    assert {name for batch in batches[:5] for name in batch} == {f"s{n}" for n in (*range(5, 10), *range(15, 20))}
    for number in range(11):
        assert stopped.batch(number) == batches[number]
        resumed = loader(build=build, weights=(0, 1))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert resumed.batch(number + 1) == batches[number + 1]
    assert any("blocks without an item are skipped" in message for message in logged)


def test_a_stream_of_which_nothing_is_left_is_refused(loader):
    def build(records):
        if refusing:
            raise NothingLeft("every sequence is too long")
        return [each.values["name"] for each in records]

    refusing = True
    with pytest.raises(ConfigError, match="every sequence is too long"):
        loader(build=build)
    refusing = False
    changed = loader(build=build)
    refusing = True
    with pytest.raises(ConfigError, match="every sequence is too long"):
        for number in range(9):
            changed.batch(number)


def test_batches_left_out_are_passed(loader):
    every, some = loader(), loader()
    whole = [every.batch(number) for number in range(10)]
    assert [some.batch(number) for number in (0, 3, 4, 9)] == [whole[number] for number in (0, 3, 4, 9)]


def test_distinct_batches_have_every_item_once_and_leave_the_position(loader):
    one, other = loader(), loader()
    assert one.batch(0) == other.batch(0)
    distinct = [item for batch in one.distinct_batches(30) for item in batch]
    assert sorted(distinct) == sorted([f"m{n}" for n in range(7)] + [f"s{n}" for n in range(23)])
    assert one.batch(1) == other.batch(1)


def test_the_position_in_other_data_is_refused(loader, tmp_path):
    state = loader().state_dict()
    state["streams"]["gone"] = state["streams"].pop("stream")
    with pytest.raises(ConfigError, match="the checkpoint has a position in the streamed data gone"):
        loader().load_state_dict(state)


def test_a_stream_without_records_is_refused(tmp_path):
    file = write(tmp_path / "few.jsonl", "x", 3)
    words = (
        "few.jsonl has no records to train on: the first 3 are held out .*data.num_eval_examples.*heldout_fraction=0"
    )
    for part in (Part(JsonLines(file), skipped=3), Part(Part(JsonLines(file), skipped=3), limit=2)):
        with pytest.raises(ValueError, match=words):
            Streamed("few", part, ItemList, 5, 0)
        with pytest.raises(ValueError, match=words):
            part.all()


class RankThreeFails(Ranks):
    def gather(self, value):
        return [value, None, None, "s.jsonl:8 is gone"]


def test_an_error_on_another_rank_ends_a_batch_that_is_read_from_files(loader):
    reading = replace(loader(), can_fail=True)
    reading.batch(0)
    reading.ranks = RankThreeFails()
    with pytest.raises(ConfigError, match=r"s.jsonl:8 is gone \(on rank 3\)"):
        reading.batch(1)
