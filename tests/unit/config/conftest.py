"""Commands that are refused, and experiments of one stage and of three."""

import re

import pytest
import yaml

from rl_megatron.cli import main


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """`refused(*arguments)`: the one line that `rl-megatron train` answers with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        status = main(["train", *arguments])
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert re.fullmatch(r"error: [^\n]+\n", err)
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture
def experiment(tmp_path):
    """`experiment(tree)`: the arguments that choose an experiment of the user's own with this content."""

    def write(tree):
        directory = tmp_path / "mine" / "experiment"
        directory.mkdir(parents=True)
        (directory / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(tree, sort_keys=False))
        return "experiment=own", "--config-dir", str(tmp_path / "mine")

    return write


# An experiment that sets what the tests below override; the shipped ones may change.
THREE = {
    "stages": {
        "pretrain": {"algorithm": {"name": "pretrain"}, "train": {"steps": 3}, "data": {"sequence_length": 64}},
        "sft": {"algorithm": {"name": "sft"}, "train": {"steps": 2}},
        "grpo": {
            "algorithm": {"name": "grpo", "prompts_per_step": 4},
            "train": {"steps": 1, "eval_every": 1},
            "optimizer": {"lr": 5.0e-4},
            "loss": {"reference_policy_kl_penalty": 0.0},
        },
    }
}


@pytest.fixture
def three(experiment):
    """The arguments that choose `THREE`."""
    return experiment(THREE)
