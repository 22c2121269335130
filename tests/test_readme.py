"""The README: it begins with two commands, its links are valid, and its Python example gives the right numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_two_commands_come_first():
    assert COMMANDS[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_links_are_valid():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target


def run_example(code: str) -> float:
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return names["report"]["loss"], names["report"]["grad_norm"]


def test_the_python_example_runs(ranks):
    *_, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)  # the first one trains a real model
    loss, gradient_norm = ranks.run(1, run_example, code)[0]
    assert loss == pytest.approx(-1.0, abs=1e-4)  # the ratio and the advantage are 1
    assert gradient_norm > 0
