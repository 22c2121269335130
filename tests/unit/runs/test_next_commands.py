"""The commands that a run ends with: they parse, whatever the paths look like."""

import shlex
from pathlib import Path

import pytest

from rl_megatron.cli.parser import build_parser
from rl_megatron.config.checkpoint_metadata import HUGGING_FACE
from rl_megatron.config.loading.load import load_config
from rl_megatron.runs.next_commands import list_next_commands
from tests.unit.algorithms.fakes import Characters


def commands_of(*overrides, output_dir="outputs/run"):
    config = load_config([*overrides, f"output_dir={output_dir}"])
    checkpoint = Path(config.output_dir) / "checkpoints" / list(config.stages)[-1] / "step-000003"
    return [command for _, command in list_next_commands(config, Characters(), checkpoint)]


def test_they_inspect_export_and_go_on():
    assert commands_of("experiment=quickstart") == [
        "rl-megatron inspect outputs/run/checkpoints/grpo/step-000003",
        "rl-megatron convert export outputs/run/checkpoints/grpo/step-000003 outputs/run/exported/grpo",
        "rl-megatron train model=init_from init_from=outputs/run/checkpoints/grpo/step-000003 "
        "output_dir=outputs/run-next tokenizer.path=outputs/run/tokenizer",
    ]


def test_a_reward_model_is_neither_exported_nor_followed():
    reward_model = ("algorithm=reward_model", "loss=preference", "data=gsm8k_pairs", "data.path=x")
    assert commands_of(*reward_model) == ["rl-megatron inspect outputs/run/checkpoints/reward_model/step-000003"]


def test_a_model_that_hugging_face_does_not_know_is_not_exported(monkeypatch):
    assert not [each for each in commands_of("model.sandwich_norms=true") if "export" in each]


def test_a_tokenizer_that_the_checkpoint_brings_is_not_named(tmp_path):
    (tmp_path / HUGGING_FACE).mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / HUGGING_FACE / name).write_text("{}")
    assert "tokenizer.path" not in commands_of(output_dir=tmp_path)[-1]


@pytest.mark.parametrize("output_dir", ["'my runs/first, and \"best\"'", "runs/ü", "runs/a=b"])
def test_paths_are_quoted_for_the_shell_and_for_hydra(output_dir):
    output_dir = output_dir.strip("'")
    written = '"' + output_dir.replace('"', '\\"') + '"'
    inspect, export, train = commands_of(output_dir=written)
    checkpoint = f"{output_dir}/checkpoints/sft/step-000003"
    parsed = build_parser().parse_args(shlex.split(inspect)[1:])
    assert (parsed.command, str(parsed.path)) == ("inspect", checkpoint)
    parsed = build_parser().parse_args(shlex.split(export)[1:])
    assert (parsed.source, parsed.target) == (checkpoint, f"{output_dir}/exported/sft")
    overrides = build_parser().parse_args(shlex.split(train)[1:]).overrides
    config = load_config([each for each in overrides if not each.startswith(("model=", "init_from="))])
    assert config.output_dir == f"{output_dir}-next"
    assert config.first.tokenizer.path == f"{output_dir}/tokenizer"
