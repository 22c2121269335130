"""docs/data.md: its examples can be read, and it has every source, preset, task and key."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import rl_megatron.algorithms  # noqa: F401  # it registers what ALGORITHM_CONFIGS has
from rl_megatron.config.data_sources import PreferenceConfig, PromptAnswerConfig
from rl_megatron.config.schema import ALGORITHM_CONFIGS, SOURCE_CONFIGS, DataConfig
from rl_megatron.data.datasets import PreferenceDataset, PromptAnswerDataset
from rl_megatron.data.files import load_records
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.run_tokenizer import load_tokenizer, train_bpe
from rl_megatron.data.sources import SOURCES, PreferenceSource
from rl_megatron.data.tasks.registry import TASKS, build_task
from tests.unit.data.chat_families import write_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "data.md").read_text()
EXAMPLES = dict(re.findall(r'```json title="(\w+)\.jsonl"\n(.*?)```', PAGE, re.DOTALL))
TOKENIZER = train_bpe([PAGE], 300)


@pytest.fixture
def example(tmp_path):
    """Return a function that writes an example of the page to a file and returns the path."""

    def write(name: str) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text(EXAMPLES[name])
        return path

    return write


def test_the_example_of_prompts_and_answers_is_read(example):
    train, heldout = load_records(example("prompt_answer"))
    assert (len(train), len(heldout)) == (2, 1)
    assert len(PromptAnswerDataset(train, Renderer(PromptAnswerConfig(), TOKENIZER), 128)) == 2


def test_the_example_of_conversations_is_read(example, tmp_path):
    train, heldout = load_records(example("messages"))
    tokenizer = load_tokenizer(write_tokenizer("deepseek", tmp_path / "tokenizer"))
    dataset = PromptAnswerDataset(train + heldout, Renderer(PromptAnswerConfig(), tokenizer), 2048)
    assert len(dataset) == 3 and dataset.batch(range(3))["token_mask"].sum(1).min() > 0


@pytest.mark.parametrize("name", ["preference", "graded"])
def test_the_examples_of_pairs_are_read(example, name):
    data = PreferenceConfig(path=str(example(name)), heldout_fraction=0.5)
    train, heldout = PreferenceSource(None, data).parts()
    assert [record.values["chosen"] for record in train + heldout] in (
        ["It is 5.", "It is 8."],
        ["It is 8.", "It is 5."],
    )
    assert len(PreferenceDataset(train, Renderer(data, TOKENIZER), 128)) == 1


def test_the_example_of_gsm8k_is_read_and_rewarded(example):
    task = build_task("gsm8k", path=str(example("gsm8k")))
    problems = task.train_problems() + task.heldout_problems()
    assert sorted(problem.answer for problem in problems) == ["5", "8", "8"]
    assert task.reward(problems[0], f"so #### {problems[0].answer}.0") == 1.0
    assert task.reward(problems[0], problems[0].answer) == 0.0


@pytest.mark.parametrize("source", [name for name, cls in SOURCES.items() if cls.__module__.startswith("rl_megatron.")])
def test_every_source_has_a_section(source):
    assert f"\n### {source}\n" in PAGE and f"| [`{source}`](#{source}) |" in PAGE


@pytest.mark.parametrize("task", [name for name, cls in TASKS.items() if cls.__module__.startswith("rl_megatron.")])
def test_every_task_has_a_row(task):
    """Its options have rows in reference/configuration.md (tests/docs/test_references.py)."""
    assert f"\n| `{task}` | " in PAGE


@pytest.mark.parametrize("key", [field.name for field in fields(DataConfig)])
def test_every_key_of_data_is_on_the_page(key):
    assert f"data.{key}" in PAGE


@pytest.mark.parametrize("preset", sorted(path.stem for path in (REPOSITORY / "configs" / "data").glob("*.yaml")))
def test_every_preset_is_on_the_page(preset):
    assert f"`data={preset}`" in PAGE


@pytest.mark.parametrize("source", [name for name, cls in SOURCES.items() if cls.__module__.startswith("rl_megatron.")])
def test_the_table_of_sources_has_the_algorithms_that_learn_from_each(source):
    (row,) = re.findall(rf"^\| \[`{source}`\].*$", PAGE, re.MULTILINE)
    learning = {
        name
        for name, cls in ALGORITHM_CONFIGS.items()
        if cls.__module__.startswith("rl_megatron.") and cls.learns_from in SOURCE_CONFIGS[source].provides
    }
    assert set(re.findall(r"`(\w+)`", row.split(" | ")[2])) - SOURCES.keys() == learning
