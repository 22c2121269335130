"""What a run that is started again says and keeps, of stages that are finished and of stages that go on."""

import logging

import pytest
import yaml

from rl_megatron import log
from rl_megatron.algorithms import rerun
from rl_megatron.algorithms.rerun import recorded_config
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import load_config, to_yaml

BASE = ("experiment=quickstart", "stages.sft.train.steps=8")
OTHER = ("train.seed=7", "generation.temperature=0.2")


@pytest.fixture
def said():
    messages = []

    class Kept(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler, level = Kept(), log.LOGGER.level
    log.LOGGER.addHandler(handler)
    log.LOGGER.setLevel(logging.INFO)
    yield messages
    log.LOGGER.removeHandler(handler)
    log.LOGGER.setLevel(level)


@pytest.fixture
def output_dir(tmp_path, monkeypatch):
    """A run that finished pretrain, was in the middle of sft, and has not begun grpo."""
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([*BASE])))
    saved = {"pretrain": ["step-000650"], "sft": ["step-000002", "step-000004"], "grpo": []}
    monkeypatch.setattr(rerun, "complete_checkpoints", lambda stage: [stage / name for name in saved[stage.name]])
    finished = {"pretrain": {"step": 650, "results": {}}}
    monkeypatch.setattr(rerun, "manifest_at_the_end", lambda stage, config: finished.get(stage.name))
    return tmp_path


def test_the_same_settings_are_written_again(output_dir, said):
    config = load_config([*BASE])
    assert recorded_config(config, output_dir) == to_yaml(config)
    assert said == [
        f"stage pretrain: skipped, it is complete at step 650: {output_dir}/checkpoints/pretrain/step-000650"
    ]


def test_a_finished_stage_keeps_its_settings_and_says_what_has_no_effect(output_dir, said):
    config = load_config([*BASE, *OTHER])
    stages = yaml.safe_load(recorded_config(config, output_dir))["stages"]
    assert {name: stage["train"]["seed"] for name, stage in stages.items()} == {"pretrain": 0, "sft": 7, "grpo": 7}
    assert stages["pretrain"]["generation"]["temperature"] == 1.0
    changed = "train.seed: 0 → 7, generation.temperature: 1.0 → 0.2"
    assert said[1:] == [
        f"stage pretrain: settings that changed have no effect on this finished stage: {changed}; set another "
        f"output_dir to train with them ({output_dir}/config.yaml is kept)",
        f"stage sft: settings that changed apply from here on: {changed}",
    ]


def test_a_stage_keeps_the_settings_of_its_checkpoint_and_not_those_of_a_failed_attempt(output_dir, said):
    """The run's config.yaml is written before the first step, so it may have settings that no step was taken with."""
    trained, failed = load_config([*BASE]), load_config([*BASE, "train.seed=7"])
    checkpoint = output_dir / "checkpoints" / "pretrain" / "step-000650"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(to_yaml(trained))
    (output_dir / "config.yaml").write_text(to_yaml(failed))
    recorded = yaml.safe_load(recorded_config(trained, output_dir))["stages"]["pretrain"]
    assert recorded["train"]["seed"] == 0
    assert not [message for message in said if "pretrain: settings" in message]
    assert yaml.safe_load(recorded_config(failed, output_dir))["stages"]["pretrain"] == recorded


def test_an_unreadable_record_names_the_remedy(output_dir):
    (output_dir / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="(?s)config.yaml is not a configuration .*restore it"):
        recorded_config(load_config([*BASE]), output_dir)


def test_many_settings_are_cut_short(output_dir, said):
    overrides = [f"data.{key}=9" for key in ("num_documents", "num_demonstrations")]
    overrides += ["generation.top_k=3", "generation.top_p=0.5", "optimizer.beta1=0.5", "optimizer.beta2=0.5"]
    recorded_config(load_config([*BASE, *OTHER, *overrides]), output_dir)
    assert said[1].count(" → ") == 6 and "and 2 more" in said[1]


def test_a_run_in_a_new_directory_says_nothing(tmp_path, said):
    config = load_config([*BASE])
    assert recorded_config(config, tmp_path) == to_yaml(config)
    assert said == []
