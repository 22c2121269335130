"""The loader of a stage: every kind of data from mixtures and streams, and a stage that continues in the middle."""

import gzip
import json

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.data.sources import HeldoutBatch, build_source
from rl_megatron.data.training_data import RolloutPrompts, build_dataset_loader, check_dataset

TOKENIZER = train_bpe(["question answer good bad text 0123456789\n" * 3], 270)
SMALL = ("data.num_eval_examples=4", "train.steps=9", "model.max_sequence_length=128")
KINDS = {
    "sft": ("algorithm=sft", "train.global_batch_size=8"),
    "dpo": ("algorithm=dpo", "loss=dpo", "train.global_batch_size=16"),
    "pretrain": ("algorithm=pretrain", "train.global_batch_size=8", "data.sequence_length=12"),
}
MIX = "data.mix=[{path: a.jsonl, weight: 3},{path: b.jsonl.gz, name: b},{path: c.parquet, weight: 0.5}]"
STREAM = ("data.streaming=true", "data.shuffle_block=5")


def record(source, number):
    question = f"question {source}{number}"
    return {
        "question": question, "answer": f"answer {number}", "chosen": f"good {number}", "rejected": f"bad {number}",
        "text": f"text {source} " + "0123456789"[: number % 10],
    }  # fmt: skip


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Three files with 31, 23 and 17 records."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    lines = lambda source, count: "".join(json.dumps(record(source, n)) + "\n" for n in range(count))  # noqa: E731
    (tmp_path / "a.jsonl").write_text(lines("a", 31))
    with gzip.open("b.jsonl.gz", "wt") as file:
        file.write(lines("b", 23))
    pq.write_table(pa.Table.from_pylist([record("c", n) for n in range(17)]), "c.parquet", row_group_size=4)
    return tmp_path


def stage_of(*overrides):
    return load_config([*SMALL, *overrides]).first


def ids_of(batch):
    ids, lengths = batch["input_ids"].tolist(), batch["input_lengths"].tolist()
    return [sequence[:length] for sequence, length in zip(ids, lengths, strict=True)]


@pytest.mark.parametrize("streaming", [(), STREAM], ids=["memory", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_continues_with_the_batches_of_the_uninterrupted_run(files, kind, streaming):
    stage = stage_of(*KINDS[kind], MIX, *streaming)
    running = build_dataset_loader(stage, TOKENIZER)
    whole = [ids_of(running.batch(number)) for number in range(9)]
    assert all(len(batch) == stage.train.global_batch_size for batch in whole)
    stopped, resumed = build_dataset_loader(stage, TOKENIZER), build_dataset_loader(stage, TOKENIZER)
    for number in range(5):
        stopped.batch(number)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [ids_of(resumed.batch(number)) for number in range(5, 9)] == whole[5:]


def test_a_batch_has_the_sequences_of_its_data_sets_by_weight(files):
    loader = build_dataset_loader(stage_of(*KINDS["sft"], MIX, *STREAM), TOKENIZER)
    texts = [TOKENIZER.decode(ids) for number in range(9) for ids in ids_of(loader.batch(number))]
    counts = {source: sum(f"question {source}" in text for text in texts) for source in "abc"}
    assert counts == {"a": 48, "b": 16, "c": 8}
    held_out = {f"question {source}{number}\n" for source in "abc" for number in range(2)}
    assert not any(question in text for question in held_out for text in texts), "the first records are held out"


def test_prompts_of_a_streamed_mixture_continue_too(files):
    overrides = ("algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.dynamic_sampling=true", MIX, *STREAM)
    stage = stage_of(*overrides, "generation.max_new_tokens=4")
    prompts = lambda: RolloutPrompts(stage, stage.algorithm, TOKENIZER)  # noqa: E731
    running, stopped, resumed = prompts(), prompts(), prompts()
    whole = [[each.problem.prompt for each in running.at(step)] for step in range(1, 7)]
    for step in range(1, 4):
        stopped.at(step), stopped.at(step, 1)
    resumed.loader.load_state_dict(json.loads(json.dumps(stopped.loader.state_dict())))
    assert [[each.problem.prompt for each in resumed.at(step)] for step in range(4, 7)] == whole[3:]


def test_weights_may_come_from_a_function_of_the_user(files):
    (files / "curriculum.py").write_text(
        "def weights(step):\n    return {'a': 1, 'b': 0, 'c': 0 if step < 3 else 1}\ndef wrong(step):\n    return []\n"
    )
    stage = stage_of(*KINDS["sft"], MIX, "data.mix_weights=curriculum.py:weights")
    loader = build_dataset_loader(stage, TOKENIZER)
    texts = ["".join(TOKENIZER.decode(ids) for ids in ids_of(loader.batch(number))) for number in range(4)]
    assert ["question c" in text for text in texts] == [False, False, True, True]
    assert not any("question b" in text for text in texts)
    for name, words in {"wrong": "returned \\[\\]", "absent": "absent"}.items():
        with pytest.raises(ConfigError, match=f"data.mix_weights.*{words}"):
            build_dataset_loader(stage_of(*KINDS["sft"], MIX, f"data.mix_weights=curriculum.py:{name}"), TOKENIZER)


@pytest.mark.parametrize("streaming", [(), STREAM], ids=["memory", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_data_comes_from_every_data_set(files, kind, streaming):
    number = f"data.num_eval_examples={4 if streaming else 'null'}"
    heldout = build_source(stage_of(*KINDS[kind], MIX, number, *streaming)).heldout(TOKENIZER)
    assert isinstance(heldout, HeldoutBatch)
    texts = " ".join(TOKENIZER.decode(ids) for ids in ids_of(heldout.batch))
    assert all(f"{'text' if kind == 'pretrain' else 'question'} {source}" in texts for source in "abc")
    assert (heldout.tokens_per_character is None) == (kind != "pretrain")
    alone = build_source(stage_of(*KINDS[kind], MIX, "data.eval_path=c.parquet", *streaming)).heldout(TOKENIZER)
    texts = " ".join(TOKENIZER.decode(ids) for ids in ids_of(alone.batch))
    assert not any(f"{'text' if kind == 'pretrain' else 'question'} {source}" in texts for source in "ab")


def test_a_data_set_of_the_hub_is_streamed(files):
    (files / "hub").mkdir()
    (files / "c.parquet").rename(files / "hub" / "train.parquet")
    (files / "hub" / "test.parquet").write_bytes((files / "hub" / "train.parquet").read_bytes())
    stage = stage_of(*KINDS["sft"], "data.dataset_name=hub", *STREAM)
    running, resumed = build_dataset_loader(stage, TOKENIZER), build_dataset_loader(stage, TOKENIZER)
    whole = [ids_of(running.batch(number)) for number in range(4)]
    assert {TOKENIZER.decode(ids).splitlines()[0] for batch in whole[:3] for ids in batch} == {
        f"question c{number}" for number in range(17)
    }
    resumed.batch(0)
    state = resumed.state_dict()
    resumed = build_dataset_loader(stage, TOKENIZER)
    resumed.load_state_dict(state)
    assert [ids_of(resumed.batch(number)) for number in range(1, 4)] == whole[1:]


def test_records_that_are_too_long_are_reported_of_some_blocks_only(files, logged):
    records = [{"question": "question", "answer": "answer" * (30 if number % 5 == 0 else 1)} for number in range(80)]
    (files / "long.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    stage = stage_of(
        *KINDS["sft"], "data.path=long.jsonl", *STREAM, "model.max_sequence_length=24", "data.too_long=drop"
    )
    loader = build_dataset_loader(stage, TOKENIZER)
    for number in range(7):  # 56 of the 64 records that fit, in 14 blocks
        loader.batch(number)
    assert len([message for message in logged if "1 of 5 sequences exceed" in message]) == 4, "blocks 1, 2, 4 and 8"


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_all_blocks_of_a_stream_have_the_templates_that_the_first_one_chose(files, kind):
    first, later = {"question": "question a", "answer": "1"}, {"prompt": "question b", "answer": "2"}
    lines = [json.dumps(first)] * 9 + [json.dumps(later)] * 15
    (files / "two.jsonl").write_text("\n".join(lines))
    overrides = {"sft": KINDS["sft"], "grpo": ("algorithm=grpo", "algorithm.prompts_per_step=4")}[kind]
    rewards = () if kind == "sft" else ("reward.functions=[{name: exact_match}]",)
    stage = stage_of(*overrides, *rewards, "data.path=two.jsonl", *STREAM)
    prompts = RolloutPrompts(stage, stage.algorithm, TOKENIZER) if kind == "grpo" else None
    loader = build_dataset_loader(stage, TOKENIZER) if prompts is None else prompts.loader
    with pytest.raises(ConfigError, match="two.jsonl:10: data.prompt_template '{question}.*needs a field .*'question'"):
        for number in range(5):
            loader.batch(number)


@pytest.mark.parametrize(
    ("kind", "gone", "settings"),
    [
        ("sft", {"answer": "long " * 60}, ("data.too_long=drop",)),
        ("dpo", {"chosen": "long " * 60}, ("data.too_long=drop",)),
        ("dpo", None, ()),
        ("pretrain", {"text": ""}, ()),
    ],
)
def test_a_later_block_without_an_item_is_passed_over(files, kind, gone, settings):
    records = [record("q", n) | (gone or {}) if 9 <= n < 14 else record("q", n) for n in range(24)]
    if gone is None:  # a question without answers
        records[9:14] = [{"question": "q"}] * 5
    (files / "holes.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    stage = stage_of(*KINDS[kind], "data.path=holes.jsonl", *STREAM, "model.max_sequence_length=64", *settings)
    loader = build_dataset_loader(stage, TOKENIZER)
    texts = " ".join(TOKENIZER.decode(ids) for number in range(6) for ids in ids_of(loader.batch(number)))
    field = "text q " if kind == "pretrain" else "question q"
    assert f"{field}{'0123' if kind == 'pretrain' else '20'}" in texts and "long" not in texts


def test_an_error_in_a_later_block_names_its_line(files):
    with (files / "a.jsonl").open("a") as file:
        file.write('{"question": "broken"\n')
    stage = stage_of(*KINDS["sft"], "data.path=a.jsonl", *STREAM)
    assert len(check_dataset(stage, TOKENIZER)) == 5, "the first block is checked"
    loader = build_dataset_loader(stage, TOKENIZER)
    with pytest.raises(ValueError, match=r"a.jsonl:32 is not JSON"):
        for number in range(9):
            loader.batch(number)


def test_too_few_problems_name_the_key_that_asks_for_them(files):
    stage = stage_of("algorithm=grpo", "data=arithmetic", "data.num_eval_examples=99999")
    with pytest.raises(ValueError, match="data.num_eval_examples=99999: arithmetic holds .* out, and 99999 were asked"):
        build_source(stage).heldout(TOKENIZER)


def test_a_mixture_that_would_render_its_data_sets_in_two_formats_is_refused(files, monkeypatch):
    template = "{% for each in messages %}{{ each.content }};{% endfor %}"
    monkeypatch.setattr(TOKENIZER, "chat_templates", {"default": template})
    chat = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]}
    (files / "chat.jsonl").write_text(f"{json.dumps(chat)}\n" * 40)
    stage = stage_of(*KINDS["sft"], "data.mix=[{path: a.jsonl},{path: chat.jsonl}]")
    with pytest.raises(ValueError, match=r"records of chat are conversations, and those of a .*data.format=chat"):
        build_source(stage).check_files(TOKENIZER)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.path=a.jsonl", "data.mix=[{path: b.jsonl.gz}]"], "data.path and data.mix both name the data"),
        (["data.mix=[{weight: 2}]"], r"data.mix\[0\] needs either a path or a dataset_name"),
        (["data.mix=[{path: x/a.jsonl},{path: y/a.jsonl}]"], r"data.mix\[1\] and data.mix\[0\] are both called 'a'"),
        (["data.mix=[{path: a.jsonl, weight: 0}]"], "every weight is 0"),
        (["data.mix=[{path: a.jsonl, weigth: 1}]"], "weigth"),
        (
            ["data.path=a.jsonl", "data.mix_weights=own.module:w"],
            "data.mix_weights=own.module:w has no effect without data.mix",
        ),
        (["data.path=a.jsonl", "data.shuffle_block=7"], "data.shuffle_block=7 has no effect without data.streaming"),
        (["data=arithmetic", "data.streaming=true"], "data.streaming=True has no effect: data.source=task"),
        (["data.mix=[{path: a.jsonl}]", "data.split=train"], "data.split has no effect with data.mix"),
        (["data.path=a.jsonl", "data.subset=main"], "data.subset=main has no effect without data.dataset_name"),
    ],
)
def test_settings_without_an_effect_or_a_place_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(overrides)
