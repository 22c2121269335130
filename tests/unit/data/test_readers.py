"""The same records come from every format, from any position; and what is refused."""

import gzip
import json
import time

import pytest

from rl_megatron.config.data_sources import PromptsConfig, TextConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.files import find_parts
from rl_megatron.data.readers import list_hub_splits
from rl_megatron.data.records import Part
from rl_megatron.data.sources import PromptsSource, TextSource

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
# Records as in verl's files; one has a field less.
RECORDS = [
    {
        "prompt": [{"role": "user", "content": f"{n}+1="}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n} | ({"hard": True} if n == 4 else {}),
    }
    for n in range(10)
]


def jsonl(records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The records in every format: {format: the keys of the data section}."""
    import datasets

    datasets.disable_progress_bars()
    base = tmp_path_factory.mktemp("formats")
    (base / "r.jsonl").write_text(jsonl(RECORDS))
    with gzip.open(base / "r.jsonl.gz", "wt") as file:
        file.write(jsonl(RECORDS))
    pq.write_table(pa.Table.from_pylist(RECORDS), base / "r.parquet", row_group_size=3)
    datasets.Dataset.from_list(RECORDS).save_to_disk(base / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(RECORDS)).save_to_disk(base / "saved_dict")
    (base / "parts").mkdir()
    for number, part in enumerate((RECORDS[:4], RECORDS[4:])):
        pq.write_table(pa.Table.from_pylist(part), base / "parts" / f"train-{number:05d}-of-00002.parquet")
    places = {
        "jsonl": "r.jsonl", "gzip": "r.jsonl.gz", "parquet": "r.parquet", "saved": "saved", "dict": "saved_dict",
        "splits": "parts",
    }  # fmt: skip
    keys = {name: {"path": str(base / place)} for name, place in places.items()}
    keys["pattern"] = {"path": str(base / "parts" / "train-*.parquet")}
    keys["list"] = {"path": sorted(map(str, (base / "parts").iterdir()))}
    (base / "hub").mkdir()
    (base / "hub" / "train.parquet").hardlink_to(base / "r.parquet")
    keys["hub"] = {"dataset_name": str(base / "hub")}
    return keys


FORMATS = ("jsonl", "gzip", "parquet", "saved", "dict", "splits", "pattern", "list", "hub")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_records_from_every_position(written, form):
    reader = find_parts(PromptsConfig(**written[form])).train
    found = list(reader.read())
    values = [record.values for record, _ in found]
    assert [without_nulls_in("extra_info", each) for each in values] == RECORDS
    for number, (_, position) in enumerate(found):
        rest = [record.values for record, _ in reader.read(position)]
        assert rest == values[number + 1 :]


def without_nulls_in(field, record):
    """Return a record without the null keys of a mapping, which tables have if another row has the key."""
    return record | {field: {key: value for key, value in record[field].items() if value is not None}}


def test_in_tables_mappings_keep_their_nulls_and_messages_do_not(tmp_path):
    rows = [
        {
            "messages": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "n"}],
            "extra_info": {"tools": tools}, "note": tools,
        }
        for tools in (None, "t")
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    first = find_parts(PromptsConfig(path=str(tmp_path / "r.parquet"))).train.all()[0].values
    assert first["extra_info"] == {"tools": None} and "note" not in first
    assert first["messages"][0] == {"role": "user", "content": "a"}


@pytest.mark.parametrize("form", ("jsonl", "gzip", "parquet", "saved"))
def test_a_record_knows_its_file_and_line(written, form):
    reader = find_parts(PromptsConfig(**written[form])).train
    assert [record.location for record, _ in reader.read()][8] == f"{written[form]['path']}:9"


def test_records_for_verl_and_prompts_with_answers_become_problems(written, tmp_path):
    source = PromptsSource(None, PromptsConfig(**written["parquet"], heldout_fraction=0.0))
    problem = source.problems(0)[3]
    assert (problem.prompt, problem.answer) == ("3+1=", "4"), "the last message, and reward_model.ground_truth"
    assert without_nulls_in("extra_info", dict(problem.record)) == RECORDS[3] and problem.location.endswith(
        "r.parquet:4"
    )
    (tmp_path / "p.jsonl").write_text(jsonl([{"question": "1+1=", "answer": 2}, {"question": "1+2=", "answer": "3"}]))
    source = PromptsSource(None, PromptsConfig(path=str(tmp_path / "p.jsonl"), heldout_fraction=0.0))
    assert [(each.prompt, each.answer) for each in source.problems(0)] == [("1+1=\n", "2"), ("1+2=\n", "3")]


def test_columns_rename_fields_and_take_nested_ones(written):
    columns = {"answer": "reward_model.ground_truth", "source": "data_source"}
    record = find_parts(PromptsConfig(**written["gzip"], columns=columns)).train.all()[2]
    assert (record.values["answer"], record.values["source"]) == ("3", "sums")
    assert "data_source" not in record.values and record.values["reward_model"] == RECORDS[2]["reward_model"]
    with pytest.raises(ValueError, match=r"r.jsonl.gz:1: data.columns.answer=reward_model.truth names a field that"):
        find_parts(PromptsConfig(**written["gzip"], columns={"answer": "reward_model.truth"})).train.all()


def test_splits_are_chosen_by_name(tmp_path):
    for name, size in {"train": 3, "validation": 2, "hard": 1}.items():
        (tmp_path / f"{name}.jsonl").write_text(jsonl(RECORDS[:size]))
    sizes = lambda **keys: [len(part.all()) for part in vars(find_parts(PromptsConfig(**keys))).values()]  # noqa: E731
    path = str(tmp_path)
    assert sizes(path=path) == [3, 2]
    assert sizes(path=path, split="hard", eval_split="train") == [1, 3]
    assert sizes(path=path, eval_path=str(tmp_path / "hard.jsonl")) == [3, 1]
    parts = find_parts(PromptsConfig(path=str(tmp_path / "*.jsonl")))
    assert len(parts.train.all()) == 6 and parts.heldout is None


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"path": "absent"}, FileNotFoundError, "data.path: there is nothing at .*absent"),
        ({"path": "a.jsonl", "eval_path": "absent"}, FileNotFoundError, "data.eval_path: there is nothing at .*absent"),
        ({"path": "*.parquett"}, FileNotFoundError, r"no file matches .*\*.parquett"),
        ({"path": "splits", "split": "tran"}, ValueError, "data.split=tran: .* no such split; did you mean 'train'"),
        ({"path": "splits", "eval_split": "tests"}, ValueError, "data.eval_split=tests: .* did you mean 'test'"),
        ({"path": "a.jsonl", "split": "train"}, ValueError, "data.split=train has no effect"),
        ({"path": "a.jsonl", "eval_split": "test"}, ValueError, "data.eval_split=test has no effect"),
        ({"path": "only_test"}, FileNotFoundError, "has test data, and no train data"),
        ({"path": "nothing"}, FileNotFoundError, "has no data files"),
        ({"path": "empty.parquet"}, ValueError, "empty.parquet is empty: it has no records"),
        ({"path": "broken.parquet"}, ValueError, "broken.parquet cannot be read as Parquet"),
        ({"path": "broken.jsonl.gz"}, ValueError, "broken.jsonl.gz cannot be read as gzip"),
        ({"path": "array.json"}, ValueError, "array.json:1 is not JSON .*one object per line"),
        (
            {"path": ["one.parquet", "two.parquet"]},
            ValueError,
            "two.parquet has the columns b, but .*one.parquet has a",
        ),
        ({"dataset_name": "splits", "split": "tran"}, ConfigError, "data.split=tran: .*no such split; did you mean"),
    ],
)
def test_bad_places_are_refused_by_name(tmp_path, monkeypatch, keys, error, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text(jsonl(RECORDS))
    for name in ("splits/train.jsonl", "splits/test.jsonl", "only_test/test.jsonl", "nothing/readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(jsonl(RECORDS[:2]))
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), "empty.parquet")
    pq.write_table(pa.table({"a": [1]}), "one.parquet")
    pq.write_table(pa.table({"b": [1]}), "two.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "array.json").write_text('[\n{"a": 1}\n]')
    with pytest.raises(error, match=words) as refused:
        find_parts(PromptsConfig(**keys)).train.all()
    assert "\n" not in str(refused.value)


def test_documents_are_text_files_and_records_with_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\nfour\n")
    texts = TextSource(None, TextConfig(path=str(tmp_path), heldout_fraction=0.5))
    assert list(texts.read_documents()) == [["one\n", "three\n"], ["two\n", "four\n"]]
    (tmp_path / "t.jsonl").write_text(jsonl([{"text": "five"}, {"text": "six"}]))
    path = [str(tmp_path / name) for name in ("a.txt", "b.txt", "t.jsonl")]
    mixed = TextSource(None, TextConfig(path=path, heldout_fraction=0.0))
    assert mixed.read_documents() == (["one\ntwo\n", "three\nfour\n", "five", "six"], [])
    (tmp_path / "t.jsonl").write_text(jsonl([{"id": 1, "texts": "five"}]))
    with pytest.raises(ValueError, match=r"t.jsonl:1: .*'text', .*its fields: id, texts\).*\{text: texts\}"):
        mixed.read_documents()


def test_the_first_records_can_be_left_out(written):
    reader = find_parts(PromptsConfig(**written["list"])).train
    assert [record.values for record, _ in Part(reader, limit=3).read()] == RECORDS[:3]
    rest = list(Part(reader, skipped=3).read())
    assert [without_nulls_in("extra_info", record.values) for record, _ in rest] == RECORDS[3:]
    assert list(Part(reader, skipped=3).read(rest[1][1])) == rest[2:]


def test_a_hub_that_does_not_answer_is_named_without_the_retries_of_the_library(monkeypatch, logged):
    library = pytest.importorskip("datasets")
    from huggingface_hub import constants, utils

    class Silent:
        def head(self, *address, timeout):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(utils, "get_session", Silent)
    for module in (constants, library.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="data.dataset_name=no/such cannot be found: .*set data.path to local files"):
        list_hub_splits("no/such", None)
    assert time.monotonic() - began < 10
    assert any("does not answer" in line and "no route to host" in line for line in logged)
