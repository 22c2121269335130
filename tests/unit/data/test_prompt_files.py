"""Prompts of files that are completed outside of training: which tokens they become, and what is refused."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rl_megatron.config.data_sources import PromptAnswerConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.prompt_files import build_prompts_config, read_prompts
from rl_megatron.data.run_tokenizer import load_tokenizer, train_bpe
from tests.unit.data.chat_families import ONE_TURN, write_tokenizer

TOKENIZER = train_bpe(["1+2=3\n" * 9], 260)


def ids(text):
    return TOKENIZER.prefix_ids + TOKENIZER.encode(text)


def prompts(path, tokenizer=TOKENIZER, longest=40, **data):
    return read_prompts(build_prompts_config(PromptAnswerConfig(**data), str(path)), tokenizer, longest, 8)


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_parquet_and_text_give_the_same_prompts(tmp_path):
    texts = ["1+2=", "3+5="]
    jsonl(tmp_path / "p.jsonl", *({"prompt": text} for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "p.parquet")
    (tmp_path / "p.txt").write_text("1+2=\n\n3+5=")
    for name in ("p.jsonl", "p.parquet", "p.txt"):
        found = prompts(tmp_path / name).prompts
        assert [prompt.ids for prompt in found] == [ids(text) for text in texts]
        assert [prompt.number for prompt in found] == [0, 1]
    assert found[1].record.location == f"{tmp_path}/p.txt:3"  # blank lines count as lines, but are not prompts


def test_the_template_and_the_columns_of_the_data_section_are_used(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", {"problem": "1+2"})
    found = prompts(file, columns={"question": "problem"}, prompt_template="{question}=")
    assert found.prompts[0].ids == ids("1+2=")
    assert found.end_of_turn_ids == ()


def test_a_conversation_is_rendered_with_the_chat_template(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer("qwen3", tmp_path / "qwen3"))
    found = prompts(jsonl(tmp_path / "p.jsonl", {"messages": ONE_TURN}), tokenizer, longest=400)
    text = tokenizer.decode(found.prompts[0].ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n") and ONE_TURN[-1]["content"] not in text
    assert [tokenizer.decode([id_], skip_special_tokens=False) for id_ in found.end_of_turn_ids] == ["<|im_end|>"]


def test_token_ids_are_used_as_they_are(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", {"prompt_ids": [5, 6], "prompt": "1+2="}, {"prompt": "1+2="})
    assert [prompt.ids for prompt in prompts(file).prompts] == [[5, 6], ids("1+2=")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "must be a list of at least one token id"),
        ("5", "must be a list of at least one token id"),
        ([5, 900], r"prompt_ids\[1\]=900 is not a token of the tokenizer, whose ids are 0 to "),
        ([True], r"prompt_ids\[0\]=True is not a token"),
        ([-1], r"prompt_ids\[0\]=-1 is not a token"),
    ],
)
def test_wrong_token_ids_are_refused_with_their_line(tmp_path, value, said):
    file = jsonl(tmp_path / "p.jsonl", {"prompt_ids": [5]}, {"prompt_ids": value})
    with pytest.raises(ConfigError, match=rf"p.jsonl:2: prompt_ids.*{said.removeprefix('prompt_ids')}"):
        prompts(file)


def test_a_prompt_that_leaves_no_space_is_refused_dropped_or_cut_at_its_beginning(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", {"prompt_ids": list(range(2, 40))}, {"prompt": "1="})
    with pytest.raises(ConfigError, match="p.jsonl:1: this prompt has 38 tokens, but .* is 32"):
        prompts(file)
    (kept,) = prompts(file, too_long="drop").prompts
    assert (kept.number, kept.ids) == (1, ids("1="))
    assert prompts(file, too_long="truncate").prompts[0].ids == list(range(8, 40))


def test_the_digest_tells_prompts_and_their_numbers_apart(tmp_path):
    one = prompts(jsonl(tmp_path / "a.jsonl", {"prompt": "1="}, {"prompt": "2="}))
    assert one.digest == prompts(jsonl(tmp_path / "b.jsonl", {"prompt": "1="}, {"prompt": "2="})).digest
    assert one.digest != prompts(jsonl(tmp_path / "c.jsonl", {"prompt": "2="}, {"prompt": "1="})).digest


def test_a_file_without_prompts_or_without_their_field_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="empty.jsonl is empty"):
        prompts(jsonl(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="p.jsonl:1: the record has none of question, prompt"):
        prompts(jsonl(tmp_path / "p.jsonl", {"words": "1="}))
    with pytest.raises(ConfigError, match="--prompts: there is nothing at .*absent"):
        prompts(tmp_path / "absent")
