"""What the README tells people to type is right: commands compose, files exist, the Python example runs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from rl_megatron.cli import _parser
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.load import load_config
from rl_megatron.config.schema import ModelConfig

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def test_it_is_short():
    assert len(README.splitlines()) <= 120


def test_the_two_commands_come_first():
    assert COMMANDS[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_right(command, tmp_path, monkeypatch):
    words = shlex.split(command)
    for word in words:
        if word.startswith("scripts/"):
            assert (REPOSITORY / word).is_file(), word
    started = next((word for word in ("train", "certify") if word in words), None)
    if "convert" in words:
        assert _parser().parse_args(words[1:]).direction in ("import", "export")
    elif started:
        monkeypatch.chdir(tmp_path)
        for begun in (word.removeprefix("init_from=") for word in words if word.startswith("init_from=")):
            Path(begun).mkdir(parents=True)
            (Path(begun) / MANIFEST).write_text(json.dumps({"model": asdict(ModelConfig())}))
        overrides = [word for word in words[words.index(started) + 1 :] if not word.startswith("--")]
        assert load_config(overrides).stages
    else:
        assert words[0] == "bash" and words[1].startswith("scripts/")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target


def run_example(code: str) -> float:
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return names["report"]["loss"], names["report"]["grad_norm"]


def test_the_python_example_runs(ranks):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    loss, gradient_norm = ranks.run(1, run_example, code)[0]
    assert loss == pytest.approx(-1.0, abs=1e-4)  # ratio 1, advantage 1
    assert gradient_norm > 0
