"""Older names of keys and values: they work wherever a configuration is written, and are noted once."""

import logging

import pytest
import yaml

from rl_megatron import log
from rl_megatron.config.aliases import KEY_ALIASES, VALUE_ALIASES
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import from_yaml, load_config, to_yaml
from rl_megatron.generation.registry import register_engine

OLD, NEW = "data.num_eval_rows", "data.num_eval_examples"
STAGES = "stages: {one: {algorithm: {name: sft}}}"


@pytest.fixture
def notes(monkeypatch):
    """The messages that are logged, as a list that grows."""
    messages = []

    class Kept(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Kept()
    monkeypatch.setattr(log.once, "messages", set())
    log.LOGGER.addHandler(handler)
    yield messages
    log.LOGGER.removeHandler(handler)


@pytest.fixture
def own(tmp_path):
    """`own(text, path)`: the user's config directory, with this YAML file in it."""

    def write(text, path="experiment/mine.yaml"):
        file = tmp_path / "own" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(tmp_path / "own")

    return write


def test_every_alias_leads_to_a_key_and_a_value_that_exist():
    section = yaml.safe_load(to_yaml(load_config(["peft.r=1"])))["stages"]["sft"]
    for key in (*KEY_ALIASES.values(), *VALUE_ALIASES):
        found = section
        for part in key.split("."):
            found = found[part]
    for key, values in VALUE_ALIASES.items():
        for value in values.values():
            load_config([f"{key}={value}"])


@pytest.mark.parametrize("prefix", ["", "++"])
def test_an_older_key_on_the_command_line_is_the_key(notes, prefix):
    assert load_config([f"{prefix}{OLD}=7"]) == load_config([f"{NEW}=7"])
    assert notes == [f"{OLD} is an older name of {NEW}; it works as before"]


def test_an_older_key_of_a_stage_is_the_key():
    old, new = (load_config(["experiment=quickstart", f"stages.sft.{key}=7"]) for key in (OLD, NEW))
    assert old == new and old.stages["sft"].data.num_eval_examples == 7
    assert old.stages["grpo"].data.num_eval_examples == 400


def test_an_older_value_is_the_value(notes):
    old = load_config(["generation.engine=megatron"])
    assert old == load_config([]) and old.first.generation.engine == "embedded"
    assert notes == ["generation.engine=megatron is an older name of generation.engine=embedded; it works as before"]


@pytest.mark.parametrize(
    ("text", "path", "choice"),
    [
        (f"# @package _global_\ndata: {{num_eval_rows: 7}}\n{STAGES}", "experiment/mine.yaml", "experiment=mine"),
        ("# @package _global_\nstages: {one: {data: {num_eval_rows: 7}}}", "experiment/mine.yaml", "experiment=mine"),
        ("source: task\ntask: {name: arithmetic}\nnum_eval_rows: 7", "data/mine.yaml", "data=mine"),
        (
            "# @package _global_.data\nsource: task\ntask: {name: arithmetic}\nnum_eval_rows: 7",
            "data/mine.yaml",
            "data=mine",
        ),
        ("# @package data\nsource: task\ntask: {name: arithmetic}\nnum_eval_rows: 7", "data/mine.yaml", "data=mine"),
    ],
)
def test_an_older_key_in_a_file_is_the_key_and_comes_before_what_was_set_below_it(own, text, path, choice):
    directory = own(text, path)
    assert load_config([choice], directory).first.data.num_eval_examples == 7
    if "stages" not in text or "{one: {algorithm" in text:
        assert load_config([choice, f"{OLD}=9"], directory).first.data.num_eval_examples == 9
        assert load_config([choice, f"{NEW}=9"], directory).first.data.num_eval_examples == 9


def test_both_names_on_the_command_line_are_refused():
    message = f"{OLD} and {NEW} are both set, but they are the same setting; keep {NEW}"
    for overrides in ([f"{OLD}=7", f"{NEW}=7"], [f"{NEW}=7", f"++{OLD}=8"]):
        with pytest.raises(ConfigError, match=message):
            load_config(overrides)
    with pytest.raises(ConfigError, match=f"stages.sft.{OLD} and stages.sft.{NEW} are both set"):
        load_config(["experiment=quickstart", f"stages.sft.{OLD}=7", f"stages.sft.{NEW}=7"])


def test_both_names_in_one_file_are_refused_with_the_file(own):
    directory = own(f"# @package _global_\ndata: {{num_eval_rows: 7, num_eval_examples: 7}}\n{STAGES}")
    with pytest.raises(ConfigError, match=rf"experiment/mine.yaml: {OLD} and {NEW} are both set"):
        load_config(["experiment=mine"], directory)


def test_the_config_of_an_older_run_is_read_and_noted_once(notes):
    config = load_config(["experiment=quickstart", f"{OLD}=7", "generation.engine=megatron"])
    old = to_yaml(config).replace("num_eval_examples", "num_eval_rows").replace("embedded", "megatron")
    assert old.count("num_eval_rows") == old.count("engine: megatron") == 3
    assert from_yaml(old, "config.yaml") == config == from_yaml(to_yaml(config), "config.yaml")
    assert len(notes) == 2, "one of the key and one of the value, over all places"


def test_both_names_in_the_config_of_a_run_are_refused():
    text = to_yaml(load_config([])).replace(
        "num_eval_examples: null", "num_eval_examples: null\n      num_eval_rows: 2"
    )
    with pytest.raises(ConfigError, match=rf"run/config.yaml: stages.sft.{OLD} and stages.sft.{NEW} are both set"):
        from_yaml(text, "run/config.yaml")


def test_an_unknown_engine_names_the_engines():
    engines = "embedded, sglang, transformers, vllm"
    with pytest.raises(ConfigError, match=f"'embeded'; did you mean 'embedded'.*Known: {engines}"):
        load_config(["generation.engine=embeded"])


def test_a_plugin_cannot_take_an_older_name():
    with pytest.raises(ValueError, match="'megatron' is one of the package's own"):
        register_engine("megatron")(lambda policy, stage: None)
